"""Logits processors that see the ids of each row as if it were alone.

transformers shows them the ids in columns. Under left padding the pads are among them, so where
pads are end tokens, say, a repetition penalty makes an end less likely in the shorter rows only;
and of prompts given without their prefix, the prefix is missing. What depends on the ids is
therefore called once for all rows of one length, with the whole of their own ids.
"""

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import StopStringCriteria

from hf_granikv.compat import variables_of_generate

logger = logging.getLogger(__name__)

# by exact type: a subclass is somebody's own, and is shown what transformers shows it
_READ_IDS = (
    stock.NoBadWordsLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.WatermarkLogitsProcessor,
)
_NEEDED = (
    *("generation_config", "input_ids", "inputs_tensor", "logits_processor", "model_kwargs"),
    *("prepared_logits_processor", "prepared_stopping_criteria"),
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows whose prompts are of one length.

    Attributes:
        index: `[num_rows]` which rows of the batch.
        prompts: `[num_rows, prompt_len]` their own ids, without pads.
    """

    index: Tensor
    prompts: Tensor

    def ids(self, input_ids: Tensor, num_columns: int) -> Tensor:
        """Gives `[num_rows, seq_len]`, the prompts and what was generated since.

        Args:
            input_ids: `[batch_size, num_columns + num_new]` as `generate` has them.
            num_columns: Columns of the prompts in there.
        """
        return torch.cat([self.prompts, input_ids[self.index, num_columns:]], dim=1)


def _places(parts: list[tuple[Rows, Any]]) -> Tensor:
    return torch.cat([rows.index for rows, _ in parts]).argsort()


class RowLogitsProcessor(LogitsProcessor):
    """Calls processors with the own ids of the rows that each is for.

    Args:
        parts: The rows, each row in one part, and what processes their scores.
        num_columns: Columns of the prompts as `generate` has them.
    """

    def __init__(self, parts: list[tuple[Rows, LogitsProcessor]], num_columns: int) -> None:
        self._parts, self._num_columns, self._places = parts, num_columns, _places(parts)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Gives the processed `[batch_size, vocab_size]`."""
        done = [
            processor(rows.ids(input_ids, self._num_columns), scores[rows.index])
            for rows, processor in self._parts
        ]
        return torch.cat(done)[self._places]


class RowStoppingCriteria(StoppingCriteria):
    """Likewise for what stops rows."""

    def __init__(self, parts: list[tuple[Rows, StoppingCriteria]], num_columns: int) -> None:
        self._parts, self._num_columns, self._places = parts, num_columns, _places(parts)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Gives `[batch_size]`, whether each row is done."""
        done = [
            criterion(rows.ids(input_ids, self._num_columns), scores, **kwargs)
            for rows, criterion in self._parts
        ]
        return torch.cat(done)[self._places]


@dataclass(frozen=True, slots=True)
class OwnIds:
    """What is known of the ids of each row as if it were alone.

    Attributes:
        rows: Of each row, in order, without pads.
        is_whole: Whether that is all of them; if not, it is what was given last, and before that
            come ids of earlier calls, of which a cache holds keys and values only.
    """

    rows: list[Tensor]
    is_whole: bool

    def check_reach(self, reader: Any) -> None:
        """Checks that what looks at ids finds those that it looks at.

        Args:
            reader: A logits processor or stopping criterion.

        Raises:
            ValueError: If it looks further back than ids are known.
        """
        shortest = min(map(len, self.rows))
        reach = _reach(reader)
        if not self.is_whole and (reach is None or reach > shortest):
            looked_at = "all ids" if reach is None else f"the last {reach} ids"
            raise ValueError(
                f"{type(reader).__name__} looks at {looked_at} of a row, and this call goes on from "
                f"rows of the one before with {shortest} new ones: the cache holds keys and values "
                "of the others, not their ids. Pass all ids of each row, from the first one on, or "
                "leave out what looks at them."
            )


def _reach(reader: Any) -> int | None:
    """How many of the last ids before the first new one something looks at; None for all."""
    kind = type(reader)
    if kind is stock.UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return 1
    if kind in (stock.NoBadWordsLogitsProcessor, stock.SequenceBiasLogitsProcessor):
        return max(map(len, reader.sequence_bias), default=1) - 1
    if kind is StopStringCriteria:
        return int(reader.maximum_token_len) - 1
    return None


def show_rows_alone(model: nn.Module, starts_of: Callable[[int], Any]) -> None:
    """Shows each row's own ids to what depends on them in the `generate` call under way.

    To be called before the call's first scores. Its own lists of processors and criteria are
    changed in place; they belong to that call. Left alone are: what looks at the number of columns
    or at which row is which; processors with a state of their own, but guidance, which starts from
    the last id of each row; the functions and classes of the caller; and calls in which no row has
    pads or a hidden prefix.

    Args:
        model: The model that generates.
        starts_of: Gives the prefixes that so many rows start from, whose ids may not be among those
            given.

    Raises:
        ValueError: If something looks at ids of earlier calls, which nobody knows any more.
    """
    held = variables_of_generate()
    if held.get("self") is not model:
        return
    if missing := [name for name in _NEEDED if name not in held]:
        logger.warning(
            "generate of this transformers version has no %s: logits processors count pads as "
            "tokens, as they do without a cache.",
            ", ".join(missing),
        )
        return
    input_ids: Tensor = held["input_ids"]
    own = _own_ids(input_ids, held["model_kwargs"], held["generation_config"], starts_of)
    if own is None:
        return
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(own.rows):
        by_length.setdefault(len(prompt), []).append(row)
    groups = [_rows(own.rows, rows) for rows in by_length.values()]
    # samples and beams of a prompt are neighbours
    each = len(own.rows) // len(held["inputs_tensor"])
    starts = range(0, len(own.rows), each)
    samples = [_rows(own.rows, list(range(i, i + each))) for i in starts]

    num_columns = input_ids.shape[1]
    processors, criteria = held["prepared_logits_processor"], held["prepared_stopping_criteria"]
    given = {id(processor) for processor in held["logits_processor"] or ()}
    for i, processor in enumerate(processors):
        if type(processor) is stock.UnbatchedClassifierFreeGuidanceLogitsProcessor:
            processors[i] = _guided_from_own_ids(processor, own)
            continue
        parts = _parts(processor, groups, samples, is_given=id(processor) in given)
        if parts is not None:
            own.check_reach(processor)
            processors[i] = RowLogitsProcessor(parts, num_columns)
    for i, criterion in enumerate(criteria):
        if type(criterion) is StopStringCriteria:
            own.check_reach(criterion)
            criteria[i] = RowStoppingCriteria([(rows, criterion) for rows in groups], num_columns)


def _own_ids(
    input_ids: Tensor, model_kwargs: dict[str, Any], config: Any, starts_of: Any
) -> OwnIds | None:
    """Gives the ids of each row as if alone; None if they are `input_ids`."""
    mask: Tensor | None = model_kwargs.get("attention_mask")
    num_rows, num_ids = input_ids.shape
    if not num_ids and model_kwargs.get("inputs_embeds") is not None:
        # prompts of embeddings alone: what was generated since is all ids there are
        return OwnIds(list(input_ids), is_whole=True)
    if mask is None:
        # generate drops a mask of ones; without it, ids are whole prompts
        mask = input_ids.new_ones(num_rows, getattr(config, "_mask_length", num_ids))
    num_hidden = mask.shape[1] - num_ids
    is_token = mask.bool().to(input_ids.device)
    if not num_hidden and is_token.all():
        return None
    hidden = is_token[:, :num_hidden].sum(1).tolist()
    starts = starts_of(num_rows)
    given = [ids[shown] for ids, shown in zip(input_ids, is_token[:, num_hidden:], strict=True)]
    known = [input_ids.new_tensor(starts.ids(row)) for row in range(num_rows)]
    if any(num > len(ids) for num, ids in zip(hidden, known, strict=True)):
        return OwnIds(given, is_whole=False)
    return OwnIds(
        [torch.cat([known[i][: hidden[i]], given[i]]) for i in range(num_rows)], is_whole=True
    )


def _guided_from_own_ids(processor: Any, own: OwnIds) -> Any:
    """Guidance that starts from the last id of each row, and not from the last column of the batch."""
    context = processor.unconditional_context
    if not context["first_pass"] or context["input_ids"] is not None:
        return processor
    own.check_reach(processor)
    guided: Any = copy(processor)
    last = torch.stack([ids[-1:] for ids in own.rows])
    guided.unconditional_context = {**context, "input_ids": last}
    return guided


def _rows(prompts: list[Tensor], index: list[int]) -> Rows:
    own = torch.stack([prompts[row] for row in index])
    return Rows(torch.tensor(index, device=own.device), own)


def _parts(
    processor: Any, groups: list[Rows], samples: list[Rows], *, is_given: bool
) -> list[tuple[Rows, LogitsProcessor]] | None:
    """Gives what processes which rows; None if the processor is to stay as it is."""
    kind = type(processor)
    if kind is stock.RepetitionPenaltyLogitsProcessor:
        # of generate's own making, from 5.24 on, it skips as many columns as a row has pads
        skips = processor.prompt_ignore_length
        if is_given and (isinstance(skips, Tensor) or skips):
            return None
        processor = processor if is_given else kind(processor.penalty)
    if kind in _READ_IDS:
        return [(rows, processor) for rows in groups]
    if is_given:
        return None
    if kind is stock.EncoderNoRepeatNGramLogitsProcessor:
        return [(rows, kind(processor.ngram_size, rows.prompts[:1])) for rows in samples]
    if kind is stock.EncoderRepetitionPenaltyLogitsProcessor:
        return [(rows, _of_prompt(processor, rows.prompts[:1])) for rows in samples]
    return None


def _of_prompt(processor: Any, prompt: Tensor) -> LogitsProcessor:
    alone: Any = copy(processor)
    alone.encoder_input_ids = prompt
    return alone
