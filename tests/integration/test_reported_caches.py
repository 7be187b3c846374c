"""What was reported of caches that serve several questions, rows, beams or owners."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agents import SHARED, byte_tokenizer, llama
from families import SHARED_PATH
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    step,
    suffix_only,
    suffixes,
    whole,
)
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, set_seed
from transformers.cache_utils import Cache

import hf_granikv
from hf_granikv import AsymmetricPagedCache
from hf_granikv.multi_agent import MultiAgentRunner

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]


# ---- one text, several questions: NVIDIA/kvpress #154 and #27, where the answer to the first one was
# ---- still there, or more than the answer was taken away, when the second one came

LEAVE: dict[str, Callable[[Any, int], None]] = {
    "crop": lambda cache, length: cache.crop(-length),
    "reset": lambda cache, _: cache.reset(),
}


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "deepseek_v3", "bloom"])
def test_an_answer_by_hand_leaves_before_the_next_question(
    tiny_model: Build, family: str, leave: str
) -> None:
    """Questions A, B, A with an answer of five tokens each."""
    stock = tiny_model(family, "eager")
    model = stock if family == "bloom" else tiny_model(family)
    held, (one, other) = prefilled(model), suffixes(4, 6)
    stored = [t.data_ptr() for t in held._state.prefixes.only.tensors()]
    for question in (one, other, one):
        assert held.get_seq_length() == P
        row, new = list(question), question
        for _ in range(5):
            logits = step(model, held, [new])[0]
            want = logits_alone(stock, [*PREFIX, *row], len(new))
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
            new = [int(logits[-1].argmax())]
            row += new
        LEAVE[leave](held, len(row) - 1)
    prefix = held._state.prefixes.only
    assert [t.data_ptr() for t in prefix.tensors()] == stored
    assert prefix.keys[0].dtype == torch.float32


def answers(runner: MultiAgentRunner, questions: dict[str, str]) -> None:
    """Asks, and compares with each prompt alone."""
    prompts = {name: runner.prompt_ids(name, text) for name, text in questions.items()}
    replies = runner.run(questions, max_new_tokens=6, eos_token_id=-1)
    options = {"num_new": 6, "eos_token_id": -1, "use_cache": False}
    for name, ids in prompts.items():
        want = new_tokens(runner.model, left_padded([ids]), **options)[0]
        assert list(replies[name].token_ids) == want


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_batches_of_a_runner_may_grow_and_shrink_over_one_prefix(attention: str) -> None:
    """Three requests, five, one, and one again: huggingface/transformers #28738, and #42960, where
    a cache that was made for one batch did not serve a smaller one. Each asker is a new one, so that
    the last question is the first (NVIDIA/kvpress #154)."""
    runner = MultiAgentRunner(llama(attention), byte_tokenizer())
    prefix, places, sizes = runner.share(SHARED), set(), set()
    texts = ["Why?", "When is high water?", "Who keeps the log?", "", "Where to?"]
    for turn, num in enumerate((3, 5, 1, 1)):
        names = {f"{turn}-{i}": text or "So?" for i, text in enumerate(texts[:num])}
        for name in names:
            runner.agent(name, prefix)
        answers(runner, names)
        assert all(runner.agents[name].prefix is prefix for name in names)
        places.add(tuple(t.data_ptr() for t in prefix.tensors()))
        sizes.add(runner._shares.cache.stats().hot_bytes)
    assert (len(places), len(sizes)) == (1, 1)


# ---- many continuations: huggingface/transformers #28738, which expands every tensor for them


@pytest.mark.parametrize("repeats", [1, 2, 16])
@pytest.mark.parametrize("verb", ["repeat", "reorder", "select"])
def test_continuations_of_one_row_copy_nothing(
    model: PreTrainedModel, verb: str, repeats: int
) -> None:
    held, row = prefilled(model), suffixes(6)[0]
    step(model, held, [row])
    before = held.stats()
    first = torch.zeros(repeats, dtype=torch.int64)
    if verb == "repeat":
        held.batch_repeat_interleave(repeats)
    elif verb == "reorder":
        held.reorder_cache(first)
    else:
        held.batch_select_indices(first)
    after = held.stats()
    assert (after.hot_bytes, after.cold_tokens) == (before.hot_bytes, before.cold_tokens)
    later = suffixes(*[3] * repeats, seed=300)
    got = step(model, held, later)
    want = torch.stack([logits_alone(model, [*PREFIX, *row, *new], 3) for new in later])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert held.stats().cold_tokens == 6 + 3 * repeats
    held.check_integrity()


# ---- beams: huggingface/transformers #39682, where each one reads the prompt by itself


@pytest.mark.parametrize("lengths", [(4,), (3, 8)], ids=["one_prompt", "two_ragged_prompts"])
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
def test_a_prefix_is_as_large_for_eight_beams_as_for_one(
    tiny_model: Build, family: str, lengths: tuple[int, ...]
) -> None:
    model, sizes = tiny_model(family), set()
    rows = whole(suffixes(*lengths))
    for num_beams in (1, 2, 8):
        held = prefilled(model)
        options = {"num_beams": num_beams, "num_return_sequences": min(2, num_beams)}
        got = new_tokens(model, left_padded(rows), **options, **cached(held))
        assert got == [
            new
            for row in rows
            for new in new_tokens(
                tiny_model(family, "eager"), left_padded([row]), use_cache=False, **options
            )
        ]
        sizes.add((held.stats().hot_bytes, held.stats().hot_tokens))
    assert len(sizes) == 1


# ---- what callers own: huggingface/transformers #48700, where the first call used up a config

WAYS: dict[str, Callable[[PreTrainedModel, dict[str, Any]], dict[str, Any]]] = {
    "cache": lambda model, options: cached(prefilled(model, **options)),
    "custom_generate": lambda *_: {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_configs_and_inputs_are_what_they_were_after_two_calls(way: str) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    inputs, options = left_padded(whole(suffixes(4, 6))), {"dispatch": "cascade", "cold_slots": 900}
    asked = GenerationConfig(
        num_beams=4,
        num_return_sequences=2,
        # more than one growth of the pool
        max_new_tokens=40,
        bad_words_ids=[[47], [13, 42]],
        pad_token_id=0,
    )

    def owned() -> Any:
        dicts = model.config.to_dict(), model.generation_config.to_dict(), asked.to_dict(), options
        return copy.deepcopy((dicts, {name: t.tolist() for name, t in inputs.items()}))

    before = owned()
    want = model.generate(**inputs, generation_config=asked, use_cache=False)
    assert owned() == before
    for _ in range(2):
        got = model.generate(**inputs, generation_config=asked, **WAYS[way](model, options))
        assert got.tolist() == want.tolist()
        assert owned() == before


# ---- copies: huggingface/transformers #32681, where a cache was a module, and could not be copied


def test_a_cache_is_no_part_of_the_module_that_holds_it(model: PreTrainedModel) -> None:
    holder: Any = nn.Module()
    holder.held = prefilled(model)
    assert not isinstance(holder.held, nn.Module)
    assert list(holder.modules()) == [holder]
    assert not holder.state_dict()
    rows, twin = whole(suffixes(3, 7)), copy.deepcopy(holder).held
    assert twin is not holder.held
    for cache in (twin, holder.held):
        assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    holder.to(torch.bfloat16)
    assert holder.held._state.prefixes.only.keys[0].dtype == torch.float32


def test_one_cache_in_two_places_is_one_copy(model: PreTrainedModel) -> None:
    held, other = prefilled(model), prefilled(model)
    first, inner, last = copy.deepcopy([held, {"cache": held}, other])
    assert first is inner["cache"]
    assert len({id(cache) for cache in (first, last, held, other)}) == 4
    assert first._state.prefixes.only is held._state.prefixes.only


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda c: c.fork()])
@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2"])
def test_rows_with_a_graph_can_be_copied(
    tiny_model: Build, family: str, copied: Callable[[Any], Any]
) -> None:
    """Tensors with a graph cannot, and nothing here runs under `no_grad`."""
    model = tiny_model(family)
    row, held = suffixes(3)[0], prefilled(model)
    assert model(input_ids=torch.tensor([row]), **cached(held)).logits.requires_grad
    twin = copied(held)
    want = logits_alone(model, [*PREFIX, *row, 7, 8], 2)
    for cache in (twin, held):
        got = model(input_ids=torch.tensor([[7, 8]]), **cached(cache)).logits[0]
        torch.testing.assert_close(got.detach(), want, atol=1e-4, rtol=1e-4)


# ---- scores of prompts and answers: vllm-project/vllm #3914, #8268 and NVIDIA/Model-Optimizer #1577,
# ---- where they were cut off, or those of the tokens next to them


@pytest.mark.parametrize("lengths", [(6, 2, 4), (1, 9), (5, 5)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_scores_of_ragged_suffixes_are_those_of_whole_prompts(
    tiny_model: Build, family: str, lengths: tuple[int, ...]
) -> None:
    model, rows = tiny_model(family), suffixes(*lengths)
    with torch.no_grad():
        logits = model(**suffix_only(rows), **cached(prefilled(model))).logits
    # none of the prefix, whose scores nobody has computed here
    assert logits.shape[1] == max(lengths)
    for row, ids in enumerate(rows):
        want = logits_alone(tiny_model(family, "eager"), [*PREFIX, *ids], len(ids))
        taken = torch.tensor([*ids[1:], 5])[:, None]
        got = logits[row, -len(ids) :].log_softmax(-1).gather(1, taken)
        torch.testing.assert_close(got, want.log_softmax(-1).gather(1, taken), atol=1e-4, rtol=0)


def test_labels_over_the_prefix_are_an_error_and_no_shift(model: PreTrainedModel) -> None:
    ids, held = torch.tensor(suffixes(6, 6)), prefilled(model)
    labels = torch.cat([torch.tensor([PREFIX] * 2), ids], 1)
    with pytest.raises(ValueError, match="batch_size"):
        model(input_ids=ids, labels=labels, **cached(held))


SCORED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("lengths", [(5, 5), (3, 8)], ids=["even", "ragged"])
@pytest.mark.parametrize("mode", SCORED)
def test_transition_scores_belong_to_their_tokens(
    model: PreTrainedModel, mode: str, lengths: tuple[int, ...]
) -> None:
    inputs, results = left_padded(whole(suffixes(*lengths))), []
    for options in ({"use_cache": False}, cached(prefilled(model))):
        set_seed(11)
        out = model.generate(
            **inputs,
            **{"do_sample": False, "max_new_tokens": 8, **SCORED[mode], **options},
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = model.compute_transition_scores(
            out.sequences, out.scores, out.get("beam_indices"), normalize_logits=True
        )
        results.append((out.sequences.tolist(), scores))
    (want_ids, want), (got_ids, got) = results
    assert got_ids == want_ids
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# ---- names: huggingface/transformers #48479 and microsoft/MInference #216, where caches of others
# ---- lacked what a version had renamed or added

# models and generate may ask any of these of a cache that they are given, of the first layer if of one
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "get_max_length": lambda c: c.get_max_length(),
    "get_query_offset": lambda c: c.get_query_offset(),
    "get_seq_length": lambda c: c.get_seq_length(),
    "is_dummy": lambda c: c.is_dummy,
    "is_linear": lambda c: c.is_linear,
    "is_recording_past": lambda c: [c.is_recording_past(i) for i in range(len(c))],
    "is_sliding": lambda c: c.is_sliding,
    "is_croppable": lambda c: c.is_croppable,
    "is_compileable": lambda c: c.is_compileable,
    "has_previous_state": lambda c: c.has_previous_state(),
    "get_mask_sizes": lambda c: c.get_mask_sizes(3, 0),
}
STATEFUL = ("lfm2", "falcon_h1", "qwen3_next")
ASKED = [
    (family, name)
    for family in ("llama", "deepseek_v3", *STATEFUL)
    for name in QUESTIONS
    if name != "has_previous_state" or family in STATEFUL
]


@pytest.mark.parametrize(("family", "name"), ASKED)
def test_a_cache_answers_as_the_stock_cache_does(tiny_model: Build, family: str, name: str) -> None:
    if not hasattr(Cache, name):
        pytest.skip("this transformers version does not ask it")
    model, rows = tiny_model(family), whole(suffixes(4, 4))
    caches = [AsymmetricPagedCache(model.config), DynamicCache(config=model.config)]
    for cache in caches:
        step(model, cache, rows)
    ours, stock = map(QUESTIONS[name], caches)
    # stock convolutions can be given back, ours are refused
    is_refused = name == "is_croppable" and family in STATEFUL
    assert ours == (False if is_refused else stock)
