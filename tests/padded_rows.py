"""Padded rows whose pad is the end token, and what each gives alone under every processor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from prompts import PREFIX, left_padded, suffixes, whole
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, WatermarkingConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

Options = dict[str, Any]
Ids = Sequence[int]
SUFFIXES = suffixes(2, 9, 5)


@dataclass(frozen=True)
class Case:
    """A way to process scores.

    Attributes:
        options: From the shortest row, the end token and the first token that follows the row, the
            arguments of `generate`.
        end: The end token, with which rows end already; None for the third token that follows the
            shortest row, which is in no prompt.
        stock_counts_pads: Whether transformers lets the pads count; None for some versions of it.
    """

    options: Callable[[list[int], int, int], Options]
    end: int | None = None
    stock_counts_pads: bool | None = True


def given(*processors: LogitsProcessor) -> Options:
    return {"logits_processor": LogitsProcessorList(processors)}


def watermark(short: list[int], end: int, first: int) -> Options:
    config = WatermarkingConfig(
        bias=9.0, seeding_scheme="selfhash", context_width=len(short) + 2, greenlist_ratio=0.5
    )
    return {"watermarking_config": config}


CASES: dict[str, Case] = {
    "repetition_penalty": Case(lambda *_: {"repetition_penalty": 3.0}, stock_counts_pads=None),
    "repetition_penalty_of_ones_own": Case(lambda *_: given(RepetitionPenaltyLogitsProcessor(3.0))),
    "no_repeated_tokens": Case(lambda *_: {"no_repeat_ngram_size": 1}),
    # two pads in a row forbid a second end token; this row is followed by one
    "no_repeated_bigrams": Case(lambda *_: {"no_repeat_ngram_size": 2}, end=28),
    "forbidden_words": Case(lambda short, end, first: {"bad_words_ids": [[end, *short, first]]}),
    "biased_words": Case(
        lambda short, end, first: {"sequence_bias": [[[end, *short, first], -9.0]]}
    ),
    "encoder_penalty": Case(lambda *_: {"encoder_repetition_penalty": 0.3}),
    "encoder_ngrams": Case(lambda *_: {"encoder_no_repeat_ngram_size": 1}),
    "watermark": Case(watermark),
    # these look at no id of the prompt, or at none but the last
    "guidance": Case(lambda *_: {"guidance_scale": 1.5}, stock_counts_pads=False),
    "minimal_length": Case(lambda *_: {"min_new_tokens": 5}, stock_counts_pads=False),
    "decay": Case(
        lambda *_: {"exponential_decay_length_penalty": (2, 1.5)}, end=28, stock_counts_pads=False
    ),
    "suppressed_first": Case(
        lambda short, end, first: {"begin_suppress_tokens": [first]}, stock_counts_pads=False
    ),
    "forced_end": Case(lambda *_: {"forced_eos_token_id": 7}, stock_counts_pads=False),
}
COUNTED = [name for name, case in CASES.items() if case.stock_counts_pads is not False]


def called(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(11)
    return model.generate(
        **inputs,
        **{"do_sample": False, "max_new_tokens": 8, **options},
        return_dict_in_generate=True,
        output_scores=True,
    )


class Batch:
    """The rows of a case, the shortest first, their end token, and what each gives alone.

    Args:
        model: What they run through, alone without a cache.
        name: The case.
        rows: Whole prompts.
        options: More arguments of `generate`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        rows: Sequence[Ids] = tuple(whole(SUFFIXES)),
        **options: Any,
    ) -> None:
        self.model, case = model, CASES[name]
        self.rows = [[*row, *([] if case.end is None else [case.end])] for row in rows]
        short, first = self.rows[0], 1
        self.options = lambda: {**case.options(short, self.end, first), **options}
        self.end = case.end or 1
        if case.end is None:
            # sequences of the case begin with the end token and the row, so that alone they are none
            free = called(model, left_padded([short]), use_cache=False, **self.options())
            first, self.end = free.sequences[0, [len(short), len(short) + 2]].tolist()
        assert case.end is not None or self.end not in short
        self.ends = {"eos_token_id": self.end, "pad_token_id": self.end}
        self.alone = [self(left_padded([row]), use_cache=False) for row in self.rows]

    @property
    def suffixes(self) -> list[list[int]]:
        """The rows without the prefix that the tests of a cache share."""
        return [row[len(PREFIX) :] for row in self.rows]

    def __call__(self, inputs: dict[str, Tensor], **options: Any) -> Any:
        return called(self.model, inputs, **self.ends, **self.options(), **options)

    def padded(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives the inputs with the end token for a pad."""
        pads = inputs["attention_mask"][:, -inputs["input_ids"].shape[1] :] == 0
        assert pads.any()
        return {**inputs, "input_ids": inputs["input_ids"].masked_fill(pads, self.end)}

    def differs(self, got: Any, width: int) -> str:
        """What is not as it is for a row alone; empty if nothing."""
        each = len(got.sequences) // len(self.rows)
        for i, want in enumerate(self.alone):
            ours, theirs = (
                [ended(row, self.end) for row in tokens.tolist()]
                for tokens in (
                    got.sequences[i * each : (i + 1) * each, width:],
                    want.sequences[:, len(self.rows[i]) :],
                )
            )
            if ours != theirs:
                return f"row {i} has the tokens {ours}, alone {theirs}"
            mine = scores_of(got).unflatten(0, (len(self.rows), -1))[i]
            if not torch.allclose(mine, scores_of(want), atol=1e-4, rtol=0):
                return f"row {i} has other scores"
        return ""


def scores_of(out: Any) -> Tensor:
    """Of beams those of the sequences, else those of the first step, before anything ends."""
    return out.scores[0] if out.get("sequences_scores") is None else out.sequences_scores


def ended(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def assert_alone(batch: Batch, inputs: dict[str, Tensor], **options: Any) -> None:
    inputs = batch.padded(inputs)
    got = batch(inputs, **options)
    assert batch.differs(got, inputs["input_ids"].shape[1]) == ""
