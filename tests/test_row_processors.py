"""Processors that look at ids see each row's own: no pads, though the pad is the end token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agents import byte_tokenizer, llama
from families import SHARED_PATH
from padded_rows import (
    CASES,
    COUNTED,
    SUFFIXES,
    Batch,
    Options,
    assert_alone,
    called,
    given,
)
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    middle_padded,
    new_tokens,
    prefilled,
    right_padded,
    suffix_only,
    suffixes,
    whole,
)
from refusals import observed
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_granikv
from hf_granikv import row_processors
from hf_granikv.row_processors import RowLogitsProcessor

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]


WAYS: dict[str, Options] = {
    "greedy": {},
    # sums of log-probabilities: what ends early is not beaten for being short
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0},
    # the only choice of each step, whatever number is drawn
    "sampling": {"do_sample": True, "top_k": 1},
    "three_samples": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
}


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_batch_gives_what_each_row_gives_alone(
    model: PreTrainedModel, name: str, way: str
) -> None:
    batch = Batch(model, name, **WAYS[way])
    inputs = left_padded(batch.rows)
    assert_alone(batch, inputs, **cached(prefilled(model)))
    assert_alone(batch, inputs, custom_generate=hf_granikv.generate, min_shared_tokens=4)


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_cases_tell_pads_that_count(model: PreTrainedModel, name: str, way: str) -> None:
    """transformers' own padded batch differs from its rows alone wherever a case says so."""
    batch, counts = Batch(model, name, **WAYS[way]), CASES[name].stock_counts_pads
    inputs = batch.padded(left_padded(batch.rows))
    differs = batch.differs(batch(inputs, use_cache=False), inputs["input_ids"].shape[1])
    # this one comes after the choice has been made
    is_late = name == "watermark" and WAYS[way].get("do_sample", False)
    if counts is not None and not is_late:
        assert bool(differs) == counts, differs


LAYOUTS = {"prefix_pads_suffix": middle_padded, "suffix_ids": suffix_only}


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COUNTED)
def test_a_prefix_is_seen_in_every_layout(model: PreTrainedModel, name: str, layout: str) -> None:
    batch = Batch(model, name)
    assert_alone(batch, LAYOUTS[layout](batch.suffixes), **cached(prefilled(model)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_any_attention_serves(tiny_model: Build, attention: str) -> None:
    model = tiny_model("llama", attention)
    batch = Batch(model, "no_repeated_tokens")
    assert_alone(batch, left_padded(batch.rows), **cached(prefilled(model)))


def test_a_prompt_in_chunks_is_seen_whole(model: PreTrainedModel) -> None:
    batch = Batch(model, "no_repeated_tokens")
    inputs = left_padded(batch.rows)
    assert_alone(batch, inputs, prefill_chunk_size=8, **cached(prefilled(model)))


ASSISTED: dict[str, Options] = {
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": True},
}


@pytest.mark.smoke
@pytest.mark.parametrize("way", ASSISTED)
# 5.17 gives nothing where prompt lookup meets a row that ends with the end token, with any cache
@pytest.mark.parametrize("name", [name for name in COUNTED if name != "no_repeated_bigrams"])
def test_drafted_tokens_of_a_padded_row_are_checked_alone(
    model: PreTrainedModel, name: str, way: str
) -> None:
    batch, options = Batch(model, name), dict(ASSISTED[way])
    if options.get("assistant_model"):
        options["assistant_model"] = SHARED_PATH["llama"].model(seed=3)
    batch.rows, batch.alone = batch.rows[:1], batch.alone[:1]
    assert_alone(batch, left_padded(batch.rows, extra=4), **options, **cached(prefilled(model)))


# ---- what is left alone


class Recorder(LogitsProcessor):
    """Somebody's own processor."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.tolist())
        return scores


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """Somebody's own, though it is like one that everybody has."""


@pytest.mark.smoke
def test_what_the_caller_wrote_sees_what_transformers_shows(model: PreTrainedModel) -> None:
    inputs = left_padded(whole(SUFFIXES))
    heard: dict[bool, Any] = {}
    for has_cache in (False, True):
        recorder, sent = Recorder(), []

        def allowed(batch_id: int, ids: Tensor, sent: list[Any] = sent) -> range:
            sent.append((batch_id, ids.tolist()))
            return range(2, 97)

        options = {
            **given(recorder, OwnPenalty(1.5)),
            "prefix_allowed_tokens_fn": allowed,
            **(cached(prefilled(model)) if has_cache else {"use_cache": False}),
        }
        out = called(model, inputs, **options)
        heard[has_cache] = (recorder.seen, sent, out.sequences.tolist())
    assert heard[True] == heard[False]


SKIPPING = {
    "columns": lambda: RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=P + 9),
    "ids_of_its_own": lambda: EncoderRepetitionPenaltyLogitsProcessor(9.0, torch.tensor([[5]] * 3)),
}


@pytest.mark.parametrize("kind", SKIPPING)
def test_what_the_caller_told_a_processor_of_columns_and_rows_stays(
    model: PreTrainedModel, kind: str
) -> None:
    inputs = left_padded(whole(SUFFIXES))
    want = called(model, inputs, use_cache=False, **given(SKIPPING[kind]()))
    got = called(model, inputs, **cached(prefilled(model)), **given(SKIPPING[kind]()))
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(got.scores, want.scores, atol=1e-4, rtol=0)


def prepared(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> list[type]:
    """The kinds of processors that a loop has at its end."""
    heard: list[LogitsProcessorList] = []

    def loop(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
        heard.append(kwargs["logits_processor"])
        return model._sample(input_ids, **kwargs)

    called(model, inputs, custom_generate=loop, **options)
    return [type(processor) for processor in heard[0]]


def test_the_list_of_the_call_changes_and_the_one_of_the_caller_does_not(
    model: PreTrainedModel,
) -> None:
    options, inputs = given(RepetitionPenaltyLogitsProcessor(3.0)), left_padded(whole(SUFFIXES))
    kinds = prepared(model, inputs, no_repeat_ngram_size=1, **options, **cached(prefilled(model)))
    assert kinds == [RowLogitsProcessor] * 2
    own = options["logits_processor"]
    assert [type(processor) for processor in own] == [RepetitionPenaltyLogitsProcessor]


def test_nothing_changes_without_pads(model: PreTrainedModel) -> None:
    inputs = left_padded(whole(suffixes(5, 5)))
    kinds = prepared(model, inputs, no_repeat_ngram_size=1, **cached(prefilled(model)))
    assert kinds == [NoRepeatNGramLogitsProcessor]


# ---- rows that go on, of whose earlier ids a cache holds keys and values only


def second_turn(model: PreTrainedModel) -> tuple[Any, dict[str, Tensor], list[list[int]]]:
    """A cache with rows of a first turn, the new ids of a second one, and the whole rows."""
    cache, inputs = prefilled(model), left_padded(whole(suffixes(3, 7)))
    ids = called(model, inputs, max_new_tokens=2, **cached(cache)).sequences
    new = torch.tensor([[9, 14, 9], [11, 15, 11]])
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
    given = torch.cat([ids[:, -1:], new], 1)
    # the last token that was generated is not in the cache yet
    rest = {"input_ids": given, "attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    whole_rows = torch.cat([ids, new], 1)
    shown = rest["attention_mask"].bool()
    rows = [row[is_token].tolist() for row, is_token in zip(whole_rows, shown, strict=True)]
    return cache, rest, rows


FAR_SIGHTED: dict[str, tuple[str, Options]] = {
    "penalty": ("RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 2.5}),
    "ngrams": ("NoRepeatNGramLogitsProcessor", {"no_repeat_ngram_size": 2}),
    "encoder": (
        "EncoderRepetitionPenaltyLogitsProcessor",
        {"encoder_repetition_penalty": 1.5},
    ),
    "long_word": ("NoBadWordsLogitsProcessor", {"bad_words_ids": [[5, 6, 7, 8, 9, 10]]}),
    "given": ("NoRepeatNGramLogitsProcessor", given(NoRepeatNGramLogitsProcessor(2))),
}


@pytest.mark.parametrize("name", FAR_SIGHTED)
def test_what_looks_at_ids_of_an_earlier_call_is_refused(model: PreTrainedModel, name: str) -> None:
    """It saw the new ids alone, and gave other tokens than a row alone."""
    (kind, options), (cache, rest, rows) = FAR_SIGHTED[name], second_turn(model)
    before = observed(cache)
    with pytest.raises(ValueError, match=f"{kind} looks at .* with 4 new ones.*Pass all ids"):
        called(model, rest, **options, **cached(cache))
    assert observed(cache) == before
    got = called(model, left_padded(rows), **options, **cached(cache)).sequences
    for row, ids in zip(got.tolist(), rows, strict=True):
        want = called(model, left_padded([ids]), use_cache=False, **options).sequences[0]
        assert row[-8:] == want[-8:].tolist()


NEAR_SIGHTED: dict[str, Options] = {
    "nothing": {},
    "short_words": {"bad_words_ids": [[47], [13, 42], [11, 40, 7]]},
    "biased": {"sequence_bias": [[[11, 5], 9.0], [[7], 3.0]]},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("name", NEAR_SIGHTED)
def test_what_looks_at_given_ids_only_goes_on(model: PreTrainedModel, name: str) -> None:
    options, (cache, rest, rows) = NEAR_SIGHTED[name], second_turn(model)
    got = called(model, rest, **options, **cached(cache)).sequences
    for row, ids in zip(got.tolist(), rows, strict=True):
        want = called(model, left_padded([ids]), use_cache=False, **options).sequences[0]
        assert row[-8:] == want[-8:].tolist()


LAST_IS_A_PAD: dict[str, Callable[[], dict[str, Tensor]]] = {
    "suffix_ids": lambda: suffix_only(suffixes(3, 0)),
    "prefix_pads_suffix": lambda: middle_padded(suffixes(3, 0)),
    "right": lambda: right_padded(whole(suffixes(3, 0))),
    "left": lambda: left_padded(whole(suffixes(3, 0))),
}


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAST_IS_A_PAD)
def test_guidance_starts_from_the_last_id_of_each_row(model: PreTrainedModel, layout: str) -> None:
    """It started from the last column, which is a pad of some rows."""
    inputs, options = LAST_IS_A_PAD[layout](), {"guidance_scale": 1.7}
    got = new_tokens(model, inputs, **options, **cached(prefilled(model)))
    assert got == alone(model, whole(suffixes(3, 0)), **options)


def test_guidance_from_ids_of_ones_own_stays(model: PreTrainedModel) -> None:
    rows = whole(suffixes(3, 7))
    negative = torch.tensor([[5, 6], [7, 8]])
    options = {"guidance_scale": 1.7, "negative_prompt_ids": negative}
    got = new_tokens(model, left_padded(rows), **options, **cached(prefilled(model)))
    for row, tokens_of_row in enumerate(got):
        options["negative_prompt_ids"] = negative[row : row + 1]
        assert [tokens_of_row] == alone(model, rows[row : row + 1], **options)


def test_another_generate_is_not_guessed_at(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Batch(model, "no_repeated_tokens")
    inputs = batch.padded(left_padded(batch.rows))
    want = batch(inputs, use_cache=False).sequences
    names = row_processors.variables_of_generate
    monkeypatch.setattr(
        row_processors,
        "variables_of_generate",
        lambda: {name: v for name, v in names().items() if name != "prepared_logits_processor"},
    )
    got = batch(inputs, **cached(prefilled(model))).sequences
    assert got.tolist() == want.tolist()
    assert "has no prepared_logits_processor: logits processors count pads" in caplog.text


# ---- criteria


@pytest.mark.smoke
def test_a_stop_string_does_not_begin_in_the_pads() -> None:
    model, tokenizer = llama(), byte_tokenizer()
    texts = ["ab", "abcd"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    inputs, pad = left_padded(rows), tokenizer("z", add_special_tokens=False)["input_ids"][0]
    inputs["input_ids"].masked_fill_(inputs["attention_mask"] == 0, pad)
    first = called(model, left_padded(rows[:1]), use_cache=False, eos_token_id=-1).sequences[0, 2]
    stop = StopStringCriteria(tokenizer, ["zab" + tokenizer.decode(first)])
    options = {"stopping_criteria": StoppingCriteriaList([stop]), "pad_token_id": pad}
    options["eos_token_id"] = -1
    alone = called(model, left_padded(rows[:1]), use_cache=False, **options).sequences[0, 2:]
    stopped = called(model, inputs, use_cache=False, **options).sequences[0, 4:]
    got = called(model, inputs, **cached(prefilled(model, rows[0][:1])), **options)
    assert stopped.tolist() != alone.tolist() == got.sequences[0, 4:].tolist()


@pytest.mark.parametrize("layout", [left_padded, middle_padded])
def test_prompts_of_embeddings_have_no_ids_to_skip(
    model: PreTrainedModel, layout: Callable[..., dict[str, Tensor]]
) -> None:
    """transformers skips as many ids as a row has pads: here those were generated ones."""
    embed, options = model.get_input_embeddings(), {"repetition_penalty": 1.7, "do_sample": False}

    def answers(inputs: dict[str, Tensor], **kwargs: Any) -> list[list[int]]:
        embeds = embed(inputs["input_ids"]).detach()
        mask = inputs["attention_mask"]
        options_of_call = {**options, **kwargs, "max_new_tokens": 8}
        out = model.generate(inputs_embeds=embeds, attention_mask=mask, **options_of_call)
        tokens: list[list[int]] = out.tolist()
        return tokens

    rows = suffixes(3, 7, 5)
    inputs = layout(whole(rows)) if layout is left_padded else layout(rows)
    want = [answers(left_padded([row]), use_cache=False)[0] for row in whole(rows)]
    assert answers(inputs, **cached(prefilled(model))) == want
