"""What attention works out at the first layer of a kind in a forward pass, for all others too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.backends.base import Attend
from hf_granikv.dispatch import Decision, Dispatcher
from hf_granikv.journal import ForwardNotes, GroupNote
from hf_granikv.kernels.decode_attention import (
    DecodeAttention,
    Place,
    Segment,
    unsupported_reasons,
)
from hf_granikv.kernels.suffix_attention import SuffixMask, prepare_mask
from hf_granikv.views import GroupShape, LayerStep, LayerTokens, PrefixPart, dtype_name
from hf_granikv.windows import PrefixView, prefix_view, suffix_view

# where rows read a prefix as if it was their own
_PASS = "in one pass with the rows' own tokens"


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What a layer does to its scores besides masking.

    Attributes:
        scale: Factor on them.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.
        sinks: `[num_q_heads]` logits of attention sinks, which enter the denominator once.
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class PartWork:
    """What attention works out of one part of the prefixes.

    Attributes:
        part_idx: The part.
        rows: Index of the rows that read it; None for all.
        row_map: `[num_rows]` which of those each row is, -1 for none; None for all.
        attend: What attends to it in a backend; None where `in_pass`, or where it is out of sight.
        in_pass: Whether rows read it as if it was their own, in the compiled pass of a decode step.
        view: What local layers see of it.
        fringe_mask: What only some rows see of its first tokens.
        note: Its entry in the journal.
    """

    part_idx: int
    rows: slice | Tensor | None
    row_map: NDArray[np.int64] | None
    attend: Attend | None
    in_pass: bool
    view: PrefixView | None
    fringe_mask: SuffixMask | None
    note: GroupNote | None


@dataclass(frozen=True, slots=True)
class StepWork:
    """What attention works out at the first layer of a kind and keeps for the others of a step.

    Attributes:
        levels: The parts of each depth.
        in_order: All of them, level by level.
        suffix_start: The first private token that some row sees.
        mask: What rows see from there on; None = everything.
        decode: The compiled pass; None where torch does its work.
        places: For the compiled pass, where the tokens of layers are.
    """

    levels: list[list[PartWork]]
    in_order: list[PartWork]
    suffix_start: int
    mask: SuffixMask | None
    decode: DecodeAttention | None
    places: dict[int, Place]


def prepare(query: Tensor, step: LayerStep, rule: ScoreRule) -> StepWork:
    """Works out what the layers of one kind have to do in a forward pass.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]` of the first of them.
        step: What that one has stored, and who reads it.
        rule: What they do to their scores.
    """
    if query.shape[2] != step.plan.q_len:
        step = replace(step, plan=step.plan.of_last_queries(query.shape[2]))
    plan, window = step.plan, step.window
    mask, start = plan.suffix_mask, 0
    if window is not None:
        own = suffix_view(plan, window, step.private.max_length)
        mask, start = own.mask, own.start
    spans = _decode_spans(query, step, mask, start, rule) if query.shape[2] == 1 else None
    parts = [
        _prepare_part(query, step, part_idx, rule, has_pass=spans is not None)
        for part_idx in range(len(step.parts))
    ]
    levels: dict[int, list[PartWork]] = {}
    for part, work in zip(step.parts, parts, strict=True):
        if work.attend is not None or work.in_pass or work.fringe_mask is not None:
            levels.setdefault(part.group.depth, []).append(work)
    in_order = list(chain.from_iterable(levels.values()))
    decode, places = None, {}
    if spans is not None:
        lengths = [segment.keys.shape[1] for segment in segments_of(in_order, step)]
        decode = DecodeAttention(
            query, step.private, spans, scale=rule.scale, num_segment_tokens=lengths
        )
        places = _places(decode, in_order, step)
    return StepWork(list(levels.values()), in_order, start, _ready(mask, query), decode, places)


def segments_of(in_order: Sequence[PartWork], step: LayerStep | LayerTokens) -> list[Segment]:
    """What rows read in one layer as if it was their own."""
    return [
        Segment(*common_keys(step.parts[part.part_idx], part.view), part.row_map)
        for part in in_order
        if part.in_pass
    ]


def _places(
    decode: DecodeAttention, in_order: Sequence[PartWork], step: LayerStep
) -> dict[int, Place]:
    """Where the tokens of a layer are, and of those to come that are alike."""
    layers: dict[int, LayerStep | LayerTokens] = {step.layer_idx: step, **step.plan.to_come}
    return {
        layer_idx: decode.place(*its.private.storages, segments_of(in_order, its))
        for layer_idx, its in layers.items()
        if its.private.storages is not None and _is_alike(step, its)
    }


def _is_alike(step: LayerStep, other: LayerStep | LayerTokens) -> bool:
    """Whether two layers are of one kind, with their own tokens in the pool."""
    held, its = step.private.storages, other.private.storages
    if held is None or its is None or step.window != other.window:
        return False
    (keys, values), (its_keys, its_values) = held, its
    return bool(
        keys.shape == its_keys.shape
        and values.shape == its_values.shape
        and keys.dtype == values.dtype == its_keys.dtype == its_values.dtype
    )


def _decode_spans(
    query: Tensor, step: LayerStep, mask: Tensor | None, start: int, rule: ScoreRule
) -> NDArray[np.int64] | None:
    """What each row sees of its own tokens, for the compiled pass; None where it cannot serve."""
    private = step.private
    reasons = unsupported_reasons(query, private)
    if rule.softcap is not None:
        reasons.append("scores are soft-capped")
    spans = None if reasons else _spans(mask, start, private.max_length, len(query))
    if not reasons and spans is None:
        reasons = ["rows see private tokens that do not follow each other"]
    step.plan.journal.note_decode(reasons)
    return spans


def common_keys(part: PrefixPart, view: PrefixView | None) -> tuple[Tensor, Tensor]:
    """Keys and values that all rows of a part see."""
    num_before = 0 if view is None else view.common_start - part.start
    if not num_before:
        return part.keys, part.values
    return part.keys[:, num_before:], part.values[:, num_before:]


def _spans(mask: Tensor | None, start: int, width: int, num_rows: int) -> NDArray[np.int64] | None:
    """`[num_rows, 2]` from which to which private token the one query of each row sees.

    Args:
        mask: `[num_rows or 1, 1, 1, width - start]` bool; None where everything is seen.
        start: The first token of the mask.
        width: Private tokens of the longest row.
        num_rows: Rows of the batch.

    Returns:
        None if some row sees tokens that do not follow each other.
    """
    spans = np.full((num_rows, 2), (start, width), dtype=np.int64)
    if mask is not None:
        visible = mask[:, 0, 0].numpy()
        counts = visible.sum(1)
        spans[:, 0] += visible.argmax(1) if visible.shape[1] else 0
        spans[:, 1] = spans[:, 0] + counts
        columns = np.arange(start, width)
        if ((columns >= spans[:, :1]) & (columns < spans[:, 1:]) != visible).any():
            return None
    return spans


def _prepare_part(
    query: Tensor, step: LayerStep, part_idx: int, rule: ScoreRule, *, has_pass: bool
) -> PartWork:
    part, plan, view, attend, note = step.parts[part_idx], step.plan, None, None, None
    in_pass = False
    group, common_start = part.group, part.start
    if step.window is not None:
        view = prefix_view(part, plan, step.window)
        common_start = view.common_start
    num_rows = len(query) if group.rows is None else len(group.rows)
    rows = _index(group.rows, query.device)
    if group.stop > common_start:
        shape = _group_shape(query, part, num_rows, group.stop - common_start, rule)
        decision = _dispatcher(plan.dispatch).choose(shape, str(query.device))
        plan.journal.reckoning = decision.origin
        backend, tensors = BACKENDS[decision.backend_name], common_keys(part, view)
        in_pass = has_pass and backend.is_by_row
        kernel = _PASS
        if not in_pass:
            of_rows = query if rows is None else query[rows]
            kernel = backend.kernel(of_rows, *tensors)
            planned = partial(backend.planned, scale=rule.scale, softcap=rule.softcap)
            attend = planned(of_rows, *tensors)
        note = _notes(step).add(
            decision.backend_name,
            (part_idx, shape),
            partial(_described, shape, decision, kernel),
            is_timed=query.is_cpu or plan.journal.times_accelerators,
        )
    fringe_mask = None if view is None else _ready(view.fringe_mask, query)
    if view is not None and fringe_mask is not None:
        num_tokens = common_start - view.fringe_start
        shape = _group_shape(query, part, num_rows, num_tokens, rule)
        described = f"{_sized(shape)} that only some rows still see"
        fringe = (part_idx, shape, "fringe")
        _notes(step).add("per_row", fringe, lambda: described, is_timed=False)
    row_map = None
    if group.rows is not None:
        row_map = np.full(plan.num_rows, -1, dtype=np.int64)
        row_map[group.rows] = np.arange(num_rows)
    return PartWork(part_idx, rows, row_map, attend, in_pass, view, fringe_mask, note)


def _index(rows: NDArray[np.int64] | None, device: torch.device) -> slice | Tensor | None:
    """An index that takes the rows of a group, without a copy where they are neighbours."""
    if rows is None:
        return None
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.from_numpy(rows).to(device)


def _ready(mask: Tensor | None, query: Tensor) -> SuffixMask | None:
    return None if mask is None else prepare_mask(mask.to(query.device), query.dtype)


def _group_shape(
    query: Tensor, part: PrefixPart, num_rows: int, prefix_len: int, rule: ScoreRule
) -> GroupShape:
    _, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads = part.keys.shape[0]
    return GroupShape(
        num_rows=num_rows,
        q_len=q_len,
        prefix_len=prefix_len,
        num_kv_heads=num_kv_heads,
        gqa_ratio=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=part.keys.element_size(),
        is_capped=rule.softcap is not None,
        dtype=dtype_name(part.keys.dtype),
    )


def _notes(step: LayerStep) -> ForwardNotes:
    """What this forward pass notes, whatever the number of layers and kinds."""
    scratch = step.plan.scratch
    notes: ForwardNotes | None = scratch.get("notes")
    if notes is None:
        notes = scratch["notes"] = ForwardNotes(step.plan.journal)
    return notes


@cache
def _dispatcher(choice: str) -> Dispatcher:
    return Dispatcher(choice, backends=BACKENDS)


def _described(shape: GroupShape, decision: Decision, kernel: str) -> str:
    predicted = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in decision.predicted_s.items())
    refused = "".join(
        f"; {name} refused: {', '.join(why)}" for name, why in decision.refused.items()
    )
    text = f"{_sized(shape)}, {decision.regime}-bound, predicted per layer: {predicted}{refused}"
    return f"{text}, {kernel}" if kernel else text


def _sized(shape: GroupShape) -> str:
    return f"{shape.num_rows} rows x {shape.q_len} tokens over {shape.prefix_len}"
