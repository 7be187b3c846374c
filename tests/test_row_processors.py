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
    cached,
    left_padded,
    middle_padded,
    prefilled,
    suffix_only,
    suffixes,
    whole,
)
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


@pytest.fixture
def model(tiny_model: Build) -> PreTrainedModel:
    return tiny_model("llama")


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


def test_rows_whose_earlier_ids_nobody_gave_see_what_transformers_shows(
    model: PreTrainedModel,
) -> None:
    cache, inputs = prefilled(model), left_padded(whole(suffixes(3, 7)))
    ids = called(model, inputs, max_new_tokens=2, **cached(cache)).sequences
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], 1)
    rest = {"input_ids": ids[:, -1:], "attention_mask": mask}
    kinds = prepared(model, rest, no_repeat_ngram_size=1, **cached(cache))
    assert kinds == [NoRepeatNGramLogitsProcessor]


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
