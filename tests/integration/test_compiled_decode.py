"""Decode steps as one graph of `torch.compile`: the same tokens, no graph break, no graph made twice."""

import copy
import functools
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

from hf_granikv import AsymmetricPagedCache, compile_decode, graphs
from hf_granikv.attention import ATTENTION_NAME, granikv_attention
from hf_granikv.errors import ColdPoolFullError, NotCompiledError
from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention.attention import MODULE
from hf_granikv.pools.cold import ColdPool
from hf_granikv.pools.cold_write import Places

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
    found = re.search(r"in graphs of torch.compile: (\d+) forward pass", cache.explain())
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


@pytest.mark.skipif(isinstance(compiled.load(MODULE), str), reason="needs the compiled pass")
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7)])
def test_later_layers_store_and_attend_in_one_go(
    monkeypatch: pytest.MonkeyPatch, family: str, lengths: tuple[int, int]
) -> None:
    """The same keys and values in the same places as where `update` stores them."""
    prompts, written, put = left_padded(whole(suffixes(*lengths))), [], []
    write, put_alone = ColdPool.write, Places.put

    def noted_write(self: ColdPool, layer_idx: int, *args: Any) -> None:
        written.append(layer_idx)
        write(self, layer_idx, *args)

    def noted_put(self: Places, *args: Any) -> None:
        put.append(self)
        put_alone(self, *args)

    model: Any = model_of(family)
    # the usual one, which the first layer says
    model.base_model.layers[1].self_attn.scaling = None
    plain, in_graphs = prefilled(model), prefilled(model)
    want = new_tokens(model, prompts, num_new=NUM_NEW, **cached(plain))
    monkeypatch.setattr(ColdPool, "write", noted_write)
    monkeypatch.setattr(Places, "put", noted_put)
    compile_decode(model, **TRACED)
    assert new_tokens(model, prompts, num_new=NUM_NEW, **cached(in_graphs)) == want
    # the prompt, and then the first layer of every step
    assert written == [*range(len(plain.layers)), *[0] * (NUM_NEW - 1)]
    is_even = lengths[0] == lengths[1]
    assert len(put) == (len(written) if is_even else 0)
    for its, layer in zip(in_graphs.layers, plain.layers, strict=True):
        assert its.get_seq_length() == layer.get_seq_length() == in_graphs.get_seq_length()
        for got, expected in zip(its.private(), layer.private(), strict=True):
            torch.testing.assert_close(got, expected)


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
    "compared": lambda keys: keys if (keys == keys).all() and len(keys) else -keys,
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


@pytest.mark.parametrize(
    "touched", ["transposed", "contiguous", "asked for its shape"], indirect=True
)
def test_keys_that_are_touched_in_a_compiled_step_are_the_stored_ones(touched: str) -> None:
    rows = whole(suffixes(3, 7))
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


# rows of one length need no mask of pads, but one of windows
@pytest.mark.parametrize(
    ("touched", "family", "lengths"),
    [
        *(("cloned", "llama", (3, 7)), ("scaled", "llama", (3, 7))),
        *(("compared", "llama", (3, 7)), ("cloned", "mistral", (5, 5))),
    ],
    indirect=["touched"],
)
def test_keys_that_need_a_mask_in_a_compiled_step_are_refused(
    touched: str, family: str, lengths: tuple[int, int]
) -> None:
    rows = whole(suffixes(*lengths))
    model = compile_decode(model_of(family), backend="eager")
    held = prefilled(model)
    with pytest.raises(ValueError, match=r"compiled forwards have none; run this model without"):
        new_tokens(model, left_padded(rows), num_new=3, **cached(held))
    held.check_integrity()
    # the step is taken back: the prompts alone are held
    assert held.rows.cold.table.lengths.tolist() == list(lengths)


def step_refused(model: PreTrainedModel, held: Any, rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"compiled forwards have none; run this model without"):
        step(model, held, rows)


def test_several_tokens_over_a_layer_that_turns_dense_are_refused() -> None:
    """SDPA would let the first of them see what the last one does."""
    model = model_of()
    held = prefilled(model)
    step(model, held, suffixes(5, 5))
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    layer: Any = model.base_model
    layer.layers[1].self_attn.config = copy.deepcopy(model.config)
    layer.layers[1].self_attn.config._attn_implementation = "sdpa"
    step_refused(model, held, suffixes(4, 4, seed=7))
    held.check_integrity()


def test_a_forward_that_was_dense_is_followed_by_none_in_a_graph() -> None:
    model = compile_decode(model_of(), **TRACED)
    layer: Any = model.base_model
    layer.layers[1].self_attn.config = copy.deepcopy(model.config)
    layer.layers[1].self_attn.config._attn_implementation = "sdpa"
    rows = whole(suffixes(3, 7))
    want = alone(model_of(attention="eager"), rows, num_new=NUM_NEW)
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
    assert steps_in_graphs(held) == 0


def test_a_column_that_is_a_pad_in_some_row_stays_outside() -> None:
    model, plain = compile_decode(model_of(), **TRACED), model_of(attention="eager")
    held = prefilled(model)
    first, second = suffixes(4, 4)
    step(model, held, [first, second])
    mask = torch.ones(2, len(PREFIX) + 5, dtype=torch.int64)
    mask[1, -1] = 0
    got = step(model, held, [[9], [0]], attention_mask=mask)[0, -1]
    want = step(plain, None, [[*PREFIX, *first, 9]])[0, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert steps_in_graphs(held) == 0


@pytest.mark.parametrize("mode", ["train", "eager"])
def test_a_model_in_another_mode_stays_outside(mode: str) -> None:
    model = compile_decode(model_of(), **TRACED)
    held = prefilled(model)
    step(model, held, suffixes(4, 4))
    if mode == "train":
        model.train()
    else:
        model.set_attn_implementation(mode)
    step(model, held, [[5], [6]])
    assert steps_in_graphs(held) == 0


def test_sinks_enter_in_graphs() -> None:
    plain, compiled = model_of("gpt_oss"), compile_decode(model_of("gpt_oss"), **TRACED)
    logits = []
    for model in (plain, compiled):
        for module in model.modules():
            if hasattr(module, "sinks"):
                torch.nn.init.constant_(module.sinks, 4.0)
        held = prefilled(model)
        step(model, held, suffixes(4, 4))
        logits.append(step(model, held, [[5], [6]]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert steps_in_graphs(held) == 1


def test_a_graph_finds_the_cache_by_a_copy_of_its_number_too() -> None:
    """As where a backend hands its inputs on as other tensors."""
    model = model_of()
    held, other = prefilled(model), prefilled(model)
    for cache in (held, other, held.fork(), copy.deepcopy(held)):
        assert graphs._cache_of(cache.number) is cache
        assert graphs._cache_of(cache.number.clone()) is cache


def with_sinks(
    module: Any, query: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    return granikv_attention(module, query, *args, s_aux=query.new_full([4], 2.0), **kwargs)


@pytest.mark.parametrize("change", ["scale", "sinks"])
def test_a_layer_that_scores_in_another_way_is_not_taken_for_one_like_the_first(
    change: str,
) -> None:
    AttentionInterface.register("granikv_with_sinks", with_sinks)
    logits = []
    for is_changed, is_compiled in ((False, False), (True, False), (True, True)):
        model: Any = model_of()
        second = model.base_model.layers[1].self_attn
        assert second.config.num_attention_heads == 4
        if is_changed and change == "sinks":
            second.config = copy.deepcopy(model.config)
            second.config._attn_implementation = "granikv_with_sinks"
        elif is_changed:
            second.scaling = 1e3
        model = compile_decode(model, **TRACED) if is_compiled else model
        held = prefilled(model)
        step(model, held, suffixes(4, 4))
        logits.append(step(model, held, [[5], [6]]))
        assert steps_in_graphs(held) == is_compiled
    like_the_first, plain, in_graph = logits
    torch.testing.assert_close(in_graph, plain, rtol=1e-4, atol=1e-5)
    assert (plain - like_the_first).abs().max() > 1e-3


def test_a_step_without_room_changes_nothing_and_says_so() -> None:
    model = compile_decode(model_of(), **TRACED)
    held = prefilled(model, cold_slots=12)
    with pytest.raises(ColdPoolFullError, match="12"):
        new_tokens(model, left_padded(whole(suffixes(4, 4))), num_new=NUM_NEW, **cached(held))
    held.check_integrity()
    assert held.stats().cold_tokens == 12


def test_a_step_that_cannot_be_compiled_is_refused_and_the_rows_go_on_without() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here\nand more of it\n\nhow to see all of it")

    rows, model = suffixes(4, 4), model_of()
    want = alone(model, whole(rows), num_new=2)
    compile_decode(model, backend=fails)
    held = prefilled(model)
    first = step(model, held, rows)[:, -1].argmax(-1, keepdim=True)
    refused = r"no compiler here and more of it\)\. .* named by .*CXX.* delete .* of the LlamaFor"
    with pytest.raises(NotCompiledError, match=refused):
        step(model, held, first.tolist())
    held.check_integrity()
    del model.forward
    second = step(model, held, first.tolist())[:, -1].argmax(-1, keepdim=True)
    assert torch.cat([first, second], 1).tolist() == want


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
    plain: Any = model.forward
    assert compile_decode(model, **TRACED) is model
    first: Any = model.forward
    compile_decode(model, **TRACED)
    assert model.forward.__wrapped__ is first.__wrapped__ is plain.__func__
    rows = whole(suffixes(3))
    want = alone(model_of(attention="eager"), rows, num_new=3)
    got = new_tokens(model, left_padded(rows), num_new=3, **cached(DynamicCache()))
    assert got == want
    assert not counters["stats"]
    with pytest.raises(ValueError, match="Linear contains no transformers model"):
        compile_decode(torch.nn.Linear(2, 2))


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model = compile_decode(model_of(), **TRACED)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(1.1)
    bare = model_of(attention="eager")
    bare.load_state_dict(twin.state_dict())
    rows = whole(suffixes(3, 7))
    got = new_tokens(twin, left_padded(rows), num_new=4, **cached(prefilled(twin)))
    assert got == alone(bare, rows, num_new=4)


def test_what_others_have_put_around_a_compiled_forward_stays() -> None:
    model = compile_decode(model_of(), **TRACED)
    ours, calls = model.forward, []

    @functools.wraps(ours)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return ours(*args, **kwargs)

    model.forward = counting  # type: ignore[method-assign]
    compile_decode(model, **TRACED)
    new_tokens(model, left_padded(whole(suffixes(3))), num_new=2, **cached(prefilled(model)))
    assert calls


def test_generate_is_not_told_to_compile_what_cannot_be_a_graph() -> None:
    config = CompileConfig(backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True
    inputs = left_padded(whole(suffixes(5, 5)))
    for model, held in (
        (model_of(), AsymmetricPagedCache(model_of().config)),
        (sdpa := model_of(attention="sdpa"), prefilled(sdpa)),
        (hybrid := model_of("lfm2"), prefilled(hybrid)),
    ):
        new_tokens(model, inputs, num_new=3, compile_config=config, **cached(held))
    assert not counters["stats"]
