"""Decode steps as one graph of `torch.compile`: the same tokens, no graph break, no graph made twice."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agents import byte_tokenizer, llama, new_runner
from families import HYBRIDS, LOCAL, SHARED_PATH
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    step,
    suffixes,
    tokens,
    whole,
)
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AttentionInterface, CompileConfig, DynamicCache, PreTrainedModel

from hf_granikv import compile_decode
from hf_granikv.attention import ATTENTION_NAME, granikv_attention
from hf_granikv.errors import ColdPoolFullError

NUM_NEW = 6
# runs what was traced as it is, through the passes that look for aliases and mutations
TRACED: dict[str, Any] = {"backend": "aot_eager"}
ALL = {**SHARED_PATH, **LOCAL, **HYBRIDS}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(family: str = "llama", attention: str = "granikv") -> PreTrainedModel:
    model: PreTrainedModel = ALL[family].model(attn_implementation=attention)
    return model


def steps_in_graphs(cache: Any) -> int:
    found = re.search(r"in graphs of torch.compile: (\d+) forward passes", cache.explain())
    return int(found[1]) if found else 0


# of every kind: scores capped, windows, sinks, experts, layers that attend to another layer's keys,
# fused projections, positions of their own
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3_moe", "phi3", "gpt_neox", "gpt2", "persimmon"),
        *("mistral", "gemma2", "gemma3", "gpt_oss", "cohere2", "gemma3n", "gemma4"),
    ],
)
def test_every_decode_step_is_one_graph(family: str) -> None:
    rows = whole(suffixes(3, 7, 5))
    want = alone(model_of(family, "eager"), rows, num_new=NUM_NEW)
    model = compile_decode(model_of(family), fullgraph=True, **TRACED)
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
    assert steps_in_graphs(held) == NUM_NEW - 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    held.check_integrity()


@pytest.mark.parametrize("family", ["opt", "llama4", "jetmoe", "lfm2"])
def test_what_is_no_single_graph_gives_the_same_tokens(family: str) -> None:
    rows = whole(suffixes(*((5, 5) if family in HYBRIDS else (3, 7, 5))))
    want = alone(model_of(family, "eager"), rows, num_new=NUM_NEW)
    model = compile_decode(model_of(family), **TRACED)
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compilers_code_gives_the_same_tokens() -> None:
    rows = whole(suffixes(3, 7, 5))
    want = alone(model_of(attention="eager"), rows, num_new=NUM_NEW)
    model = compile_decode(model_of())
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
    assert steps_in_graphs(held) == NUM_NEW - 1


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": False, "length_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_every_way_to_generate_gives_the_tokens_of_the_plain_model(mode: dict[str, Any]) -> None:
    rows = whole(suffixes(4) if "prompt_lookup_num_tokens" in mode else suffixes(3, 7))
    plain, compiled = model_of(), compile_decode(model_of(), **TRACED)
    want, got = (
        new_tokens(model, left_padded(rows), num_new=8, **cached(prefilled(model)), **mode)
        for model in (plain, compiled)
    )
    assert got == want


def test_other_caches_prefixes_and_lengths_run_in_the_same_graph() -> None:
    model = compile_decode(model_of(), fullgraph=True, **TRACED)
    plain = model_of(attention="eager")
    rows = whole(suffixes(3, 7))
    new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(prefilled(model)))
    other = tokens(33, seed=9)
    with torch.compiler.set_stance("fail_on_recompile"):
        held = prefilled(model, other)
        second = held.prefill(model, prefix_ids())
        assert second in held.rows.prefixes.all
        mixed = [*whole(suffixes(9), other), *whole(suffixes(2))]
        inputs = left_padded(mixed)
        for cache in (held, held.fork()):
            got = new_tokens(model, inputs, num_new=NUM_NEW, **cached(cache.bind(**inputs)))
            assert got == alone(plain, mixed, num_new=NUM_NEW)
            assert steps_in_graphs(cache) == NUM_NEW - 1


def test_rows_that_are_more_or_fewer_are_compiled_once_for_any_number() -> None:
    model = compile_decode(model_of(), **TRACED)
    held = prefilled(model)
    for num_rows in (2, 5, 3, 7):
        rows = whole(suffixes(*range(3, 3 + num_rows)))
        want = alone(model_of(attention="eager"), rows, num_new=3)
        assert new_tokens(model, left_padded(rows), num_new=3, **cached(held)) == want
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7)])
def test_generate_compiles_where_it_is_told_how(lengths: tuple[int, int]) -> None:
    rows = whole(suffixes(*lengths))
    want = alone(model_of(attention="eager"), rows, num_new=12)
    config = CompileConfig(backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True
    model = model_of()
    held = prefilled(model)
    options = {"compile_config": config, **cached(held)}
    assert new_tokens(model, left_padded(rows), num_new=12, **options) == want
    assert steps_in_graphs(held) == 11
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_generate_compiles_nothing_of_its_own_accord() -> None:
    model = model_of()
    held = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=3, **cached(held))
    assert not held.is_compileable
    assert not counters["stats"]


def test_a_forward_compiled_by_hand_is_one_graph_once_the_first_has_shown_how_it_goes() -> None:
    rows = whole(suffixes(3, 7))
    want = alone(model_of(attention="eager"), rows, num_new=NUM_NEW)
    model = model_of()
    held = prefilled(model)
    model.forward = torch.compile(model.forward, **TRACED)  # type: ignore[method-assign]
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
    assert steps_in_graphs(held) == NUM_NEW - 1


# what a layer may do to keys in decode steps alone, after prompts that did not show it
TOUCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda keys: keys.transpose(1, 2).transpose(1, 2),
    "contiguous": lambda keys: keys.contiguous(),
    "asked for its shape": lambda keys: keys if keys.shape[1] and keys.size(0) else -keys,
    "cloned": torch.clone,
    "scaled": lambda keys: 1.0 * keys * 1.0,
    "moved where they are": lambda keys: keys.to(torch.float32),
}


@pytest.fixture
def touched(request: pytest.FixtureRequest) -> Iterator[str]:
    change = TOUCHES[request.param]

    def attention(module: Any, query: Tensor, key: Any, *args: Any, **kwargs: Any) -> Any:
        key = change(key) if query.shape[2] == 1 else key
        return granikv_attention(module, query, key, *args, **kwargs)

    AttentionInterface.register(ATTENTION_NAME, attention)
    yield request.param
    AttentionInterface.register(ATTENTION_NAME, granikv_attention)


@pytest.mark.parametrize("touched", TOUCHES, indirect=True)
def test_keys_that_are_touched_in_a_compiled_step_are_the_stored_ones(touched: str) -> None:
    rows = whole(suffixes(5, 5))
    want = alone(model_of(attention="eager"), rows, num_new=3)
    model = compile_decode(model_of(), backend="eager")
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=3, **cached(held)) == want
    held.check_integrity()


@pytest.mark.parametrize("touched", ["moved where they are"], indirect=True)
def test_keys_that_are_moved_where_they_are_stay_in_the_graph(touched: str) -> None:
    model = compile_decode(model_of(), backend="eager", fullgraph=True)
    held = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=3, **cached(held))
    assert steps_in_graphs(held) == 2


@pytest.mark.parametrize("touched", ["cloned", "scaled"], indirect=True)
def test_keys_that_need_a_mask_in_a_compiled_step_are_refused(touched: str) -> None:
    rows = whole(suffixes(3, 7))
    model = compile_decode(model_of(), backend="eager")
    held = prefilled(model)
    with pytest.raises(ValueError, match=r"compiled forwards have none; run this model without"):
        new_tokens(model, left_padded(rows), num_new=3, **cached(held))
    held.check_integrity()
    # the step is taken back: the prompts alone are held
    assert held.rows.cold.table.lengths.tolist() == [3, 7]


def test_a_step_without_room_changes_nothing_and_says_so() -> None:
    model = compile_decode(model_of(), **TRACED)
    held = prefilled(model, cold_slots=12)
    with pytest.raises(ColdPoolFullError, match="12"):
        new_tokens(model, left_padded(whole(suffixes(4, 4))), num_new=NUM_NEW, **cached(held))
    held.check_integrity()
    assert held.stats().cold_tokens == 12


def test_forwards_with_gradients_stay_outside() -> None:
    model = compile_decode(model_of(), **TRACED)
    plain = model_of(attention="eager")
    held = prefilled(model)
    row, more = suffixes(4)[0], tokens(4, seed=77)
    step(model, held, [row])
    logits = model(input_ids=torch.tensor([more[:1]]), **cached(held)).logits
    assert logits.requires_grad
    assert not counters["stats"]
    got = step(model, held, [more[1:2]])
    with torch.no_grad():
        want = plain(input_ids=torch.tensor([[*PREFIX, *row, *more[:2]]])).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_agents_answer_alike_over_a_compiled_model() -> None:
    replies = []
    for compiles in (False, True):
        model = llama()
        if compiles:
            compile_decode(model, **TRACED)
        runner = new_runner(model, byte_tokenizer())
        shared = runner.share("Ein Dokument, das alle lesen. " * 4)
        agents = [runner.agent(f"agent {i}", shared, "Antworte kurz. " * i) for i in range(3)]
        said = {agent: f"Frage {i}?" for i, agent in enumerate(agents)}
        turn = runner.run(said, max_new_tokens=8)
        replies.append({name: reply.text for name, reply in turn.items()})
        runner.close()
    assert replies[0] == replies[1]
    assert counters["stats"]["unique_graphs"] > 0


def test_a_model_is_compiled_in_place_and_again_in_place_of_that() -> None:
    model = model_of()
    plain = model.forward
    assert compile_decode(model, **TRACED) is model
    first: Any = model.forward
    compile_decode(model, **TRACED)
    second: Any = model.forward
    assert first._granikv_plain == second._granikv_plain == plain
    rows = whole(suffixes(3))
    want = alone(model_of(attention="eager"), rows, num_new=3)
    got = new_tokens(model, left_padded(rows), num_new=3, **cached(DynamicCache()))
    assert got == want
    assert not counters["stats"]
    with pytest.raises(ValueError, match="Linear contains no transformers model"):
        compile_decode(torch.nn.Linear(2, 2))
