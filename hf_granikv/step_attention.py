"""Attention of one layer in one forward pass: prefixes once per group, suffix per row, merged."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_granikv.backends.per_row import attend_each_row
from hf_granikv.journal import GroupNote
from hf_granikv.kernels.decode_attention import GroupStates, Place
from hf_granikv.kernels.merge_states import merge_states, merged_out
from hf_granikv.kernels.suffix_attention import suffix_attention
from hf_granikv.part_work import PartWork, ScoreRule, common_keys
from hf_granikv.step_work import StepWork, place_of, prepare
from hf_granikv.views import AttentionState, LayerStep, PrefixPart

Result = TypeVar("Result")


class Known(NamedTuple):
    """What a decode step knows of layers that are alike, once the first of them has run.

    Attributes:
        shape: Of the query.
        dtype: Likewise.
        rule: What they do to their scores; without sinks.
        work: What there is to do in each.
    """

    shape: torch.Size
    dtype: torch.dtype
    rule: ScoreRule
    work: StepWork


def step_attention(query: Tensor, step: LayerStep, rule: ScoreRule) -> Tensor:
    """Attends from every row to its prefixes and its private tokens.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]`.
        step: What the layer has stored, and who reads it.
        rule: What the layer does to its scores.

    Returns:
        `[rows, q_len, num_q_heads, head_dim]` in the dtype of the query.
    """
    scratch = step.plan.scratch
    key = (
        query.shape,
        query.dtype,
        step.private.num_kv_heads,
        step.private.storages is None,
        query.device,
        step.window,
        rule.scale,
        rule.softcap,
    )
    work = scratch.get(key)
    if work is None:
        kept = step.plan.kept
        work = scratch[key] = prepare(
            query, step, rule, kept.get(of_steps := (*key, step.plan.dispatch))
        )
        if work.decode is not None and step.window is None:
            kept[of_steps] = work
    if work.decode is not None:
        place = work.places.get(step.layer_idx)
        if place is None:
            place = place_of(work, step)
        if rule.sinks is None and step.plan.alike.get(step.layer_idx) is None:
            known = Known(query.shape, query.dtype, rule, work)
            step.plan.alike.update(dict.fromkeys(work.places, known))
        return _timed_decode(query, step, work, place, rule)
    states = [state for level in work.levels for state in _of_level(query, step, level, rule)]
    own_keys, own_values = step.private.tensors
    if work.suffix_start:
        own_keys, own_values = (
            own_keys[:, :, work.suffix_start :],
            own_values[:, :, work.suffix_start :],
        )
    own = suffix_attention(
        query, own_keys, own_values, scale=rule.scale, mask=work.mask, softcap=rule.softcap
    )
    states.append(own.by_kv_head(own_keys.shape[1]))
    return finished(states, query, rule)


def decoded_as_before(
    query: Tensor,
    step: LayerStep,
    scale: float,
    softcap: float | None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Attends as an earlier layer of the step did, where a decode step has one that is alike.

    Args:
        query: As for `step_attention`.
        step: Likewise; as the cache has it.
        scale: As in `ScoreRule`; there are no sinks.
        softcap: Likewise.
        new: What the rows bring to the layer, where that is not stored yet
            (`DecodeAttention.run_at`).

    Returns:
        As `step_attention`; None if there was none, or its tokens are not known to lie as here, or
        new ones are not to be stored on the way.
    """
    known = step.plan.alike.get(step.layer_idx)
    if known is None or known.shape != query.shape or known.dtype != query.dtype:
        return None
    work, rule = known.work, known.rule
    if rule.scale != scale or rule.softcap != softcap or not query.is_cpu:
        return None
    assert work.decode is not None, "it has decoded"
    if new is not None and not work.decode.stores:
        return None
    return _decoded(query, step, work, work.places[step.layer_idx], rule, new=new)


def _decoded(
    query: Tensor,
    step: LayerStep,
    work: StepWork,
    place: Place,
    rule: ScoreRule,
    *,
    seconds: list[float] | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attends in torch to some prefixes, and in compiled kernels to the others and all the rest.

    Args:
        query: As for `step_attention`, like the step and the rule.
        step: Likewise.
        work: Of its kind of layers.
        place: Of its layer.
        rule: Likewise.
        seconds: Gets what each compiled kernel has taken, one by one.
        new: See `decoded_as_before`.
    """
    assert work.decode is not None
    states = [
        GroupStates(*state, part.row_map)
        for part in work.apart
        for state in _of_part(query, step.parts[part.part_idx], part, rule, in_decode=True)
    ]
    return work.decode.run_at(query, place, states, sinks=rule.sinks, seconds=seconds, new=new)


def _timed_decode(
    query: Tensor, step: LayerStep, work: StepWork, place: Place, rule: ScoreRule
) -> Tensor:
    """Does so, kernel by kernel where the times of some are to be noted."""
    if not any(part.note is not None and part.note.is_due for part in work.in_order):
        return _decoded(query, step, work, place, rule)
    seconds: list[float] = []
    out = _decoded(query, step, work, place, rule, seconds=seconds)
    of_parts = [*zip(work.along, seconds, strict=False)]
    of_parts += [(part, seconds[-1]) for part in work.in_pass]
    for part, taken in of_parts:
        if part.note is not None and part.note.is_due:
            part.note.took(partial(float, taken))
    return out


def _of_level(
    query: Tensor, step: LayerStep, level: list[PartWork], rule: ScoreRule
) -> list[AttentionState]:
    """Attends to the prefixes of one depth, each from the rows that read it."""
    if level[0].rows is None:
        return _pieces(_of_part(query, step.parts[level[0].part_idx], level[0], rule))
    spread: list[AttentionState] = []
    for work in level:
        part = step.parts[work.part_idx]
        states = _of_part(query, part, work, rule)
        for i, (out, lse) in enumerate(_pieces(states)):
            if i == len(spread):
                size = (len(query), *out.shape[1:])
                nothing = query.new_zeros(size, dtype=torch.float32)
                spread.append(AttentionState(nothing, nothing.new_full(size[:-1], -torch.inf)))
            spread[i].out[work.rows] = out.float()
            spread[i].lse[work.rows] = lse
    return spread


def _pieces(states: list[AttentionState]) -> list[AttentionState]:
    """Takes stacked states apart."""
    return [AttentionState(*piece) for stacked in states for piece in zip(*stacked, strict=True)]


def _of_part(
    query: Tensor, part: PrefixPart, work: PartWork, rule: ScoreRule, *, in_decode: bool = False
) -> list[AttentionState]:
    """Attends to one prefix; stacked states by kv head (`PrefixBackend.pieces`).

    Args:
        query: Of the whole batch.
        part: What the layer has stored of it.
        work: What there is to do, in whole or for its fringe.
        rule: What the layer does to its scores.
        in_decode: Whether compiled kernels run along with the pass of a decode step, and not here.
    """
    states = []
    keys, values = common_keys(part, view := work.view)
    if view is not None and work.fringe_mask is not None:
        fringe = slice(view.fringe_start - part.start, view.common_start - part.start)
        of_rows = query if work.rows is None else query[work.rows]
        seen = partial(attend_each_row, of_rows, part.keys[:, fringe], part.values[:, fringe])
        states.append(seen(scale=rule.scale, softcap=rule.softcap, mask=work.fringe_mask))
    if work.attend is not None and not (in_decode and work.is_compiled):
        attend = partial(work.attend, query, keys, values)
        note = work.note
        states.append(attend() if note is None or not note.is_due else _timed(attend, note, query))
    return states


def _timed(run: Callable[[], Result], note: GroupNote, query: Tensor) -> Result:
    if query.is_cpu:
        start = perf_counter()
        result = run()
        note.took(partial(float, perf_counter() - start))
        return result
    before, after = (torch.Event(query.device, enable_timing=True) for _ in range(2))
    before.record()
    result = run()
    after.record()
    note.took(partial(_between_s, before, after))
    return result


def _between_s(before: torch.Event, after: torch.Event) -> float:
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def finished(states: list[AttentionState], query: Tensor, rule: ScoreRule) -> Tensor:
    """Merges, lets the sinks take their share, and gives the layout of transformers."""
    if rule.sinks is None:
        out = merged_out(states).reshape(*query.shape[:3], -1)
    else:
        out, lse = (t.reshape(*query.shape[:3], *t.shape[3:]) for t in merge_states(states))
        sinks = rule.sinks.to(lse.device, torch.float32)[None, :, None]
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous()
