"""Attention of one layer in one forward pass: prefixes once per group, suffix per row, merged."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.backends import BACKENDS, PrefixBackend
from hf_granikv.dispatch import Decision, Dispatcher
from hf_granikv.kernels.merge_states import merge_states, merged_out
from hf_granikv.kernels.suffix_attention import SuffixMask, prepare_mask, suffix_attention
from hf_granikv.views import AttentionState, GroupShape, LayerStep, PrefixPart
from hf_granikv.windows import PrefixView, prefix_view, suffix_view


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
class _PartWork:
    """What attention works out of one part of the prefixes."""

    part_idx: int
    rows: slice | Tensor | None
    backend: PrefixBackend | None
    view: PrefixView | None
    fringe_mask: SuffixMask | None


@dataclass(frozen=True, slots=True)
class _StepWork:
    """What attention works out at the first layer of a kind and keeps for the others of a step."""

    levels: list[list[_PartWork]]
    suffix_start: int
    mask: SuffixMask | None


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
        step.suffix_keys.shape[1],
        query.device,
        step.window,
        rule.softcap is not None,
    )
    work = scratch.get(key)
    if work is None:
        work = scratch[key] = _prepare(query, step, rule)
    states = [state for level in work.levels for state in _of_level(query, step, level, rule)]
    own_keys, own_values = step.suffix_keys, step.suffix_values
    if work.suffix_start:
        own_keys, own_values = (
            own_keys[:, :, work.suffix_start :],
            own_values[:, :, work.suffix_start :],
        )
    states.append(
        suffix_attention(
            query, own_keys, own_values, scale=rule.scale, mask=work.mask, softcap=rule.softcap
        )
    )
    return finished(states, query, rule)


def _of_level(
    query: Tensor, step: LayerStep, level: list[_PartWork], rule: ScoreRule
) -> list[AttentionState]:
    """Attends to the prefixes of one depth, each from the rows that read it."""
    if level[0].rows is None:
        return _of_part(query, step.parts[level[0].part_idx], level[0], rule)
    spread: list[AttentionState] = []
    for work in level:
        part = step.parts[work.part_idx]
        for i, state in enumerate(_of_part(query[work.rows], part, work, rule)):
            if i == len(spread):
                out = query.new_zeros(
                    (*query.shape[:-1], part.values.shape[-1]), dtype=torch.float32
                )
                spread.append(AttentionState(out, out.new_full(out.shape[:-1], -torch.inf)))
            spread[i].out[work.rows] = state.out.float()
            spread[i].lse[work.rows] = state.lse
    return spread


def _of_part(
    query: Tensor, part: PrefixPart, work: _PartWork, rule: ScoreRule
) -> list[AttentionState]:
    states, keys, values = [], part.keys, part.values
    if (view := work.view) is not None:
        start, common = part.start, view.common_start - part.start
        if work.fringe_mask is not None:
            fringe = slice(view.fringe_start - start, common)
            states.append(_of_fringe(query, keys[:, fringe], values[:, fringe], work, rule))
        keys, values = keys[:, common:], values[:, common:]
    if work.backend is not None:
        states.append(work.backend.run(query, keys, values, scale=rule.scale, softcap=rule.softcap))
    return states


def _of_fringe(
    query: Tensor, keys: Tensor, values: Tensor, work: _PartWork, rule: ScoreRule
) -> AttentionState:
    """Attends to the prefix tokens that the windows of some rows have left, each row by itself."""
    num_rows = query.shape[0]
    return suffix_attention(
        query,
        keys.expand(num_rows, -1, -1, -1),
        values.expand(num_rows, -1, -1, -1),
        scale=rule.scale,
        mask=work.fringe_mask,
        softcap=rule.softcap,
    )


def finished(states: list[AttentionState], query: Tensor, rule: ScoreRule) -> Tensor:
    """Merges, lets the sinks take their share, and gives the layout of transformers."""
    if rule.sinks is None:
        out = merged_out(states)
    else:
        out, lse = merge_states(states)
        sinks = rule.sinks.to(lse.device, torch.float32)[None, :, None]
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _prepare(query: Tensor, step: LayerStep, rule: ScoreRule) -> _StepWork:
    if query.shape[2] != step.plan.q_len:
        step = replace(step, plan=step.plan.of_last_queries(query.shape[2]))
    plan, window = step.plan, step.window
    levels: dict[int, list[_PartWork]] = {}
    for part_idx, part in enumerate(step.parts):
        work = _prepare_part(query, step, part_idx, rule)
        if work.backend is not None or work.fringe_mask is not None:
            levels.setdefault(part.group.depth, []).append(work)
    mask, start = plan.suffix_mask, 0
    if window is not None:
        own = suffix_view(plan, window, step.suffix_keys.shape[2])
        mask, start = own.mask, own.start
    return _StepWork(list(levels.values()), start, _ready(mask, query))


def _prepare_part(query: Tensor, step: LayerStep, part_idx: int, rule: ScoreRule) -> _PartWork:
    part, plan, view, backend = step.parts[part_idx], step.plan, None, None
    group, common_start = part.group, part.start
    if step.window is not None:
        view = prefix_view(part, plan, step.window)
        common_start = view.common_start
    num_rows = len(query) if group.rows is None else len(group.rows)
    if group.stop > common_start:
        shape = _group_shape(query, part, num_rows, group.stop - common_start, rule)
        decision = _dispatcher(plan.dispatch).choose(shape, query.device.type)
        _note(step, decision.backend_name, _described(shape, decision))
        backend = BACKENDS[decision.backend_name]
    fringe_mask = None if view is None else _ready(view.fringe_mask, query)
    if view is not None and fringe_mask is not None:
        num_tokens = common_start - view.fringe_start
        shape = _group_shape(query, part, num_rows, num_tokens, rule)
        _note(step, "per_row", f"{_sized(shape)} that only some rows still see")
    return _PartWork(part_idx, _index(group.rows, query.device), backend, view, fringe_mask)


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
    )


def _note(step: LayerStep, backend_name: str, described: str) -> None:
    """Counts a backend once per forward pass, whatever the number of layers and kinds."""
    noted = step.plan.scratch.setdefault("noted backends", set())
    if backend_name not in noted:
        noted.add(backend_name)
        step.plan.journal.note_backend(backend_name, described)


@cache
def _dispatcher(choice: str) -> Dispatcher:
    return Dispatcher(choice, backends=BACKENDS)


def _described(shape: GroupShape, decision: Decision) -> str:
    predicted = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in decision.predicted_s.items())
    refused = "".join(
        f"; {name} refused: {', '.join(why)}" for name, why in decision.refused.items()
    )
    return f"{_sized(shape)}, {decision.regime}-bound, predicted per layer: {predicted}{refused}"


def _sized(shape: GroupShape) -> str:
    return f"{shape.num_rows} rows x {shape.q_len} tokens over {shape.prefix_len}"
