"""Every way to decode, over one stored prefix: what stock generation gives without any cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    middle_padded,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, set_seed
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_granikv.compat import CACHE_ARGUMENT

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]


@pytest.fixture(params=["granikv", "sdpa"])
def model(tiny_model: Build, request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("llama", request.param)


def seeded(model: PreTrainedModel, inputs: dict[str, Tensor], **kwargs: Any) -> list[list[int]]:
    set_seed(11)
    return new_tokens(model, inputs, **kwargs)


def scored(model: PreTrainedModel, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    set_seed(11)
    options = {"do_sample": False, "max_new_tokens": 10, **kwargs}
    return model.generate(**inputs, return_dict_in_generate=True, output_scores=True, **options)


# ---- tokens of a batch: the same call without a cache, at the same seed

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "top_k_and_top_p": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "three_samples_each": {"do_sample": True, "num_return_sequences": 3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeated_ngrams": {"no_repeat_ngram_size": 1},
    "forbidden_tokens": {"bad_words_ids": [[47], [13, 42]], "suppress_tokens": [4]},
    "minimal_length": {"min_new_tokens": 6, "eos_token_id": [2, 5, 13, 44, 58]},
    "end_tokens": {"eos_token_id": [2, 5, 13, 44, 58]},
}
LENGTHS = {"ragged": (3, 7, 0, 5), "one_row": (4,), "eight_rows": (9, 1, 4, 9, 2, 6, 3, 9)}


@pytest.mark.smoke
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_no_cache(
    model: PreTrainedModel, mode: str, lengths: str
) -> None:
    inputs = left_padded(whole(suffixes(*LENGTHS[lengths])))
    want = seeded(model, inputs, use_cache=False, **MODES[mode])
    cache = prefilled(model)
    assert seeded(model, inputs, **cached(cache), **MODES[mode]) == want
    cache.check_integrity()


@pytest.mark.smoke
@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_both_keywords_of_generate_are_taken(model: PreTrainedModel, keyword: str) -> None:
    """huggingface/transformers #48479 and microsoft/MInference #216: names that a version had changed
    broke the caches of others."""
    if keyword not in (*cached(None), "past_key_values"):
        pytest.skip("this transformers version has no such keyword")
    rows = whole(suffixes(3, 7))
    assert new_tokens(model, left_padded(rows), **{keyword: prefilled(model)}) == alone(model, rows)


# ---- beams

BEAMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "two_of_four": ((4,), {"num_beams": 4, "num_return_sequences": 2}),
    "two_ragged_prompts_by_three": ((3, 8), {"num_beams": 3}),
    "an_exact_prefix_among_them": ((0, 5), {"num_beams": 3, "num_return_sequences": 3}),
    # huggingface/transformers #45510, #48700: a reorder that reached only the newest tokens
    "long_enough_to_grow": ((4, 2), {"num_beams": 3, "max_new_tokens": 40}),
    "length_penalty_and_early_end": (
        (4, 6),
        {
            "num_beams": 3,
            "length_penalty": 2.0,
            "early_stopping": True,
            "eos_token_id": [2, 5, 13, 44],
        },
    ),
    "beam_sampling": ((4, 6), {"num_beams": 3, "do_sample": True, "top_k": 30}),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", BEAMS)
def test_beam_search_gives_the_sequences_and_scores_of_no_cache(
    model: PreTrainedModel, name: str
) -> None:
    lengths, options = BEAMS[name]
    inputs = left_padded(whole(suffixes(*lengths)))
    want = scored(model, inputs, use_cache=False, **options)
    cache = prefilled(model)
    got = scored(model, inputs, **cached(cache), **options)
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=0)
    cache.check_integrity()


def test_beams_do_not_store_the_prompt_once_each(tiny_model: Build) -> None:
    """huggingface/transformers #39682."""
    model, suffix = tiny_model("llama"), suffixes(30)
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffix)), num_new=2, num_beams=4, **cached(cache))
    # generate repeats the prompt before its first forward, so four rows own their suffix each
    assert cache.stats().cold_tokens <= 4 * 31
    assert cache.stats().hot_tokens == P


# ---- one row, several tokens per forward

REPETITIVE = [[*PREFIX, *tokens(3, seed=8), *PREFIX[:9], *tokens(2, seed=8)]]
LOOKUPS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "prompt_lookup_of_one": {"prompt_lookup_num_tokens": 1},
    "prompt_lookup_of_many": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
}


@pytest.mark.smoke
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole_ids", "suffix_ids"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_prompt_lookup_gives_the_greedy_tokens(
    model: PreTrainedModel, lookup: str, is_whole: bool
) -> None:
    rows = REPETITIVE
    inputs = left_padded(rows) if is_whole else suffix_only([row[P:] for row in rows])
    cache = prefilled(model)
    if not is_whole and CACHE_ARGUMENT != "cache":
        # there, generate cuts the mask to the ids before the first forward
        with pytest.raises(ValueError, match="an attention_mask over prefix and suffix"):
            new_tokens(model, inputs, **cached(cache), **LOOKUPS[lookup])
        return
    got = new_tokens(model, inputs, num_new=24, **cached(cache), **LOOKUPS[lookup])
    assert got == alone(model, rows, num_new=24)
    cache.check_integrity()


@pytest.mark.smoke
@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("seed", [0, 3], ids=["same_weights", "other_weights"])
def test_assisted_decoding_gives_the_greedy_tokens(
    model: PreTrainedModel, seed: int, length: int
) -> None:
    assistant = SHARED_PATH["llama"].model(seed=seed)
    rows, cache = whole(suffixes(length)), prefilled(model)
    got = new_tokens(
        model, left_padded(rows), num_new=20, assistant_model=assistant, **cached(cache)
    )
    assert got == alone(model, rows, num_new=20)


def test_assisted_sampling_runs_and_keeps_the_cache_whole(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    seeded(
        model,
        left_padded(whole(suffixes(5))),
        assistant_model=SHARED_PATH["llama"].model(),
        do_sample=True,
        **cached(cache),
    )
    cache.check_integrity()
    rows = whole(suffixes(3, 7))
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)


# ---- what generate hands back and calls on the way


def test_logits_of_every_step_are_those_of_no_cache(model: PreTrainedModel) -> None:
    inputs = left_padded(whole(suffixes(3, 7, 0)))
    options = {"output_logits": True, "output_hidden_states": True}
    want = scored(model, inputs, use_cache=False, **options)
    got = scored(model, inputs, **cached(prefilled(model)), **options)
    for step in range(10):
        torch.testing.assert_close(got.logits[step], want.logits[step], atol=1e-4, rtol=0)
        torch.testing.assert_close(got.scores[step], want.scores[step], atol=1e-4, rtol=0)
        last = [out.hidden_states[step][-1][:, -1] for out in (got, want)]
        torch.testing.assert_close(*last, atol=1e-4, rtol=0)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)


def test_a_streamer_gets_the_prompt_and_then_every_token(model: PreTrainedModel) -> None:
    rows, streamer = whole(suffixes(4)), Collector()
    new_tokens(model, left_padded(rows), streamer=streamer, **cached(prefilled(model)))
    assert streamer.seen == [*rows[0], *alone(model, rows)[0], -1]


class AfterFour(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        is_done = input_ids.shape[1] >= P + 7 + 4
        return torch.full((len(input_ids),), is_done)


def test_a_stopping_criterion_sees_whole_prompts(model: PreTrainedModel) -> None:
    rows, stop = whole(suffixes(3, 7)), StoppingCriteriaList([AfterFour()])
    got = new_tokens(model, left_padded(rows), stopping_criteria=stop, **cached(prefilled(model)))
    assert got == [row[:4] for row in alone(model, rows)]


def test_a_custom_loop_is_handed_the_cache(model: PreTrainedModel) -> None:
    rows, seen = whole(suffixes(3, 7)), []

    def loop(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Tensor:
        seen.append(kwargs.get("cache", kwargs.get("past_key_values")))
        return model._sample(input_ids, **kwargs)

    cache = prefilled(model)
    got = new_tokens(model, left_padded(rows), custom_generate=loop, **cached(cache))
    assert got == alone(model, rows)
    assert seen[0] is cache


# ---- one prefix, many calls


@pytest.mark.smoke
def test_batches_of_any_size_follow_one_prefill(model: PreTrainedModel) -> None:
    """huggingface/transformers #28738 and #42960: every tensor was expanded for a batch, or the cache
    served no smaller one than it was made for."""
    cache, pointers = prefilled(model), set()
    for num_rows, seed in ((3, 10), (5, 20), (1, 30)):
        rows = whole(suffixes(*range(1, num_rows + 1), seed=seed))
        assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
        pointers.add(cache._state.prefixes.only.keys[0].data_ptr())
    assert len(pointers) == 1


def test_an_answer_leaves_before_the_next_question(model: PreTrainedModel) -> None:
    """Questions A, B, A: the third answer is the first. NVIDIA/kvpress #154 and #27."""
    cache, questions = prefilled(model), whole(suffixes(4, 6))
    answers = [
        new_tokens(model, left_padded([row]), **cached(cache)) for row in (*questions, questions[0])
    ]
    assert answers[0] == answers[2] == alone(model, questions[:1])
    assert answers[1] == alone(model, questions[1:])
    cache.reset()
    assert cache.get_seq_length() == P
    assert cache._state.prefixes.only.keys[0].dtype == torch.float32


def test_a_batch_does_not_change_what_a_row_gets(model: PreTrainedModel) -> None:
    """32 copies of one request and 18 of another, in one call."""
    one, other = whole(suffixes(4, 7))
    rows = [one] * 32 + [other] * 18
    want = alone(model, [one, other])
    got = new_tokens(model, left_padded(rows), **cached(prefilled(model)))
    assert got == [want[0]] * 32 + [want[1]] * 18


@pytest.mark.smoke
@pytest.mark.parametrize("dispatch", ["cascade", "batched_gemm", "per_row"])
@pytest.mark.parametrize("prefix_len", [1, 63, 130])
def test_every_backend_is_exact(tiny_model: Build, dispatch: str, prefix_len: int) -> None:
    model, prefix = tiny_model("llama"), tokens(prefix_len, seed=77)
    rows = whole(suffixes(3, 7, 5), prefix)
    cache = prefilled(model, prefix, dispatch=dispatch)
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    assert cache.stats().backend_steps == {dispatch: 10}


@pytest.mark.parametrize("dispatch", ["auto", "cascade", "batched_gemm", "per_row"])
@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_half_precision_stays_close_to_the_stock_cache(
    tiny_model: Build, attention: str, dispatch: str
) -> None:
    """Per step: logits within 0.2, the same choice wherever the stock one is clear."""
    model = tiny_model("llama", attention, initializer_range=0.1).to(torch.bfloat16)
    inputs, options = middle_padded(suffixes(5, 5, 5)), {"output_logits": True}
    want = scored(model, inputs, **cached(DynamicCache(config=model.config)), **options)
    cache = prefilled(model, dispatch=dispatch)
    # forced along the stock tokens, so that one near-tie does not end the comparison
    ids = want.sequences[:, P:]
    with torch.no_grad():
        got = model(input_ids=ids, **cached(cache)).logits[:, 4:-1]
    stock = torch.stack(want.logits, 1)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, stock.to(got.dtype), atol=0.2, rtol=0)
    best, second = stock.topk(2, -1).values.unbind(-1)
    is_clear = best - second > 0.5
    assert torch.equal(got.argmax(-1)[is_clear], stock.argmax(-1)[is_clear])
    assert cache._state.prefixes.only.keys[0].dtype == torch.bfloat16
