"""What attention works out at the first layer of a kind in a forward pass, for all others too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels.decode_attention import (
    DecodeAttention,
    GroupStates,
    Place,
    Prefix,
    Segment,
    unsupported_reasons,
)
from hf_granikv.kernels.suffix_attention import SuffixMask
from hf_granikv.part_work import (
    PartWork,
    ScoreRule,
    common_keys,
    prepare_part,
    ready_mask,
)
from hf_granikv.views import LayerStep, LayerTokens
from hf_granikv.windows import suffix_view


@dataclass(frozen=True, slots=True)
class StepWork:
    """What attention works out at the first layer of a kind and keeps for the others of a step.

    Attributes:
        levels: The parts of each depth.
        in_order: All of them, level by level.
        suffix_start: The first private token that some row sees; for torch, like the mask.
        mask: What rows see from there on; None = everything.
        decode: The compiled pass, with the kernels of `along`; None where torch does its work.
        along: The parts whose kernels run along with it.
        in_pass: Those that rows read in it as if they were their own.
        apart: Those that are attended to before it, in whole or for their fringe.
        places: For the compiled pass, where the tokens of layers are.
    """

    levels: list[list[PartWork]]
    in_order: list[PartWork]
    suffix_start: int = 0
    mask: SuffixMask | None = None
    decode: DecodeAttention | None = None
    along: Sequence[PartWork] = ()
    in_pass: Sequence[PartWork] = ()
    apart: Sequence[PartWork] = ()
    places: dict[int, Place] = field(default_factory=dict)


def prepare(
    query: Tensor, step: LayerStep, rule: ScoreRule, kept: StepWork | None = None
) -> StepWork:
    """Works out what the layers of one kind have to do in a forward pass.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]` of the first of them.
        step: What that one has stored, and who reads it.
        rule: What they do to their scores.
        kept: What it gave for an earlier step, with a compiled pass and without a window, like this
            one but for the rows' own tokens.
    """
    if query.shape[2] != step.plan.q_len:
        step = replace(step, plan=step.plan.of_last_queries(query.shape[2]))
    plan, window = step.plan, step.window
    mask, start = plan.suffix_mask, 0
    if window is not None:
        own = suffix_view(plan, window, step.private.max_length)
        mask, start = own.mask, own.start
    spans = _decode_spans(query, step, mask, start, rule) if query.shape[2] == 1 else None
    if kept is not None and spans is not None and _renew(kept, step, spans):
        return kept
    parts = [
        prepare_part(query, step, part_idx, rule, has_pass=spans is not None)
        for part_idx in range(len(step.parts))
    ]
    levels: dict[int, list[PartWork]] = {}
    for part, its in zip(step.parts, parts, strict=True):
        if its.attend is not None or its.in_pass or its.fringe_mask is not None:
            levels.setdefault(part.group.depth, []).append(its)
    in_order = list(chain.from_iterable(levels.values()))
    work = StepWork(list(levels.values()), in_order)
    if spans is not None:
        return _with_pass(work, query, step, rule, spans)
    return replace(work, suffix_start=start, mask=ready_mask(mask, query))


def _with_pass(
    work: StepWork, query: Tensor, step: LayerStep, rule: ScoreRule, spans: NDArray[np.int64]
) -> StepWork:
    """The same with the compiled pass of a decode step."""
    along = [part for part in work.in_order if part.is_compiled]
    in_pass = [part for part in work.in_order if part.in_pass]
    apart = [
        part
        for part in work.in_order
        if part.fringe_mask is not None or not (part.in_pass or part.is_compiled)
    ]
    decode = DecodeAttention(
        query,
        step.private,
        spans,
        scale=rule.scale,
        num_segment_tokens=[segment.keys.shape[1] for segment in _segments(in_pass, step)],
        prefixes=[_prefix(part) for part in along],
    )
    work = replace(work, decode=decode, along=along, in_pass=in_pass, apart=apart)
    work.places.update((layer_idx, place_of(work, its)) for layer_idx, its in _alike(step))
    return work


def _renew(kept: StepWork, step: LayerStep, spans: NDArray[np.int64]) -> bool:
    """Takes up the work of an earlier step, with the tokens of this one; gives whether that goes."""
    decode = kept.decode
    assert decode is not None, "nothing else is kept"
    if not decode.renew(step.private, spans):
        return False
    for part in kept.in_order:
        if part.entry is not None:
            part.entry.add(step.plan, part.note)
    before = dict(kept.places)
    kept.places.clear()
    for layer_idx, its in _alike(step):
        place = before.get(layer_idx)
        if place is None:
            kept.places[layer_idx] = place_of(kept, its)
            continue
        assert its.private.storages is not None, "_is_alike says so"
        place.move(*its.private.storages)
        kept.places[layer_idx] = place
    return True


def _alike(step: LayerStep) -> Iterator[tuple[int, LayerStep | LayerTokens]]:
    """The layer, and those to come whose tokens are of its kind, by their numbers."""
    layers: dict[int, LayerStep | LayerTokens] = {step.layer_idx: step, **step.plan.to_come}
    return ((layer_idx, its) for layer_idx, its in layers.items() if _is_alike(step, its))


def place_of(work: StepWork, step: LayerStep | LayerTokens) -> Place:
    """Where the tokens of one layer are, for the compiled pass and what runs along with it."""
    assert work.decode is not None
    assert step.private.storages is not None, "unsupported_reasons says so"
    prefixes = [common_keys(step.parts[part.part_idx], part.view) for part in work.along]
    return work.decode.place(*step.private.storages, _segments(work.in_pass, step), prefixes)


def _prefix(part: PartWork) -> Prefix:
    attend = part.attend
    assert attend is not None
    assert attend.compiled is not None, "is_compiled says so"
    assert attend.state is not None
    return Prefix(attend.compiled, GroupStates(*attend.state, part.row_map))


def _segments(in_pass: Sequence[PartWork], step: LayerStep | LayerTokens) -> list[Segment]:
    """What rows read in one layer as if it was their own."""
    return [
        Segment(*common_keys(step.parts[part.part_idx], part.view), part.row_map)
        for part in in_pass
    ]


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
