"""Gradients of attention: what a forward works out by parts and in place, its backward does anew.

Pools hold constants. The tokens of the forward under way are the exception: they keep their graph,
so that a training step over a stored prefix moves the weights that made them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_granikv.errors import CutGraphError
from hf_granikv.views import LayerStep, StepPlan


class SeenPart(NamedTuple):
    """Keys and values that some queries see.

    Attributes:
        keys: `[num_rows or 1, num_kv_heads, num_tokens, head_dim]`.
        values: `[num_rows or 1, num_kv_heads, num_tokens, value_dim]`.
        mask: `[num_rows or 1, 1, q_len, num_tokens]` bool, True where a query sees a token; None =
            everything is seen.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether a backward may come that reaches one of these tensors, of any shapes."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def with_graph(
    held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], plan: StepPlan, *, is_cut: bool
) -> tuple[Tensor, Tensor]:
    """Puts the tokens of a forward, with their graph, in the places of their copies in the pool.

    Args:
        held: `[num_rows, num_kv_heads, max_suffix_len, head_dim]` keys and values from the pool.
        new: `[num_rows, num_kv_heads, q_len, head_dim]` those of this forward.
        plan: The forward.
        is_cut: Whether tokens of earlier forwards had a graph, which is lost; a backward that
            would need it then raises a `CutGraphError`.

    Returns:
        Keys and values in the shape of `held`.
    """
    width = held[0].shape[2]
    index = np.tile(np.arange(width), (plan.num_rows, 1))
    rows, columns = np.nonzero(plan.is_token)
    index[rows, plan.positions[rows, columns] - plan.prefix_lens[rows]] = width + columns
    places = torch.from_numpy(index)[:, None, :, None]
    joined = []
    for old, own in zip(held, new, strict=True):
        at = places.to(own.device).expand(-1, old.shape[1], -1, old.shape[3])
        joined.append(torch.cat([old, own], dim=2).gather(2, at))
        if is_cut and joined[-1].requires_grad:
            joined[-1].register_hook(_refuse)
    return joined[0], joined[1]


def parts_seen(step: LayerStep, q_len: int) -> list[SeenPart]:
    """What the last `q_len` queries of each row see of each part, prefixes first."""
    plan = step.plan if q_len == step.plan.q_len else step.plan.of_last_queries(q_len)
    (keys, values), seen = step.private.tensors, []
    device = keys.device
    first = None if step.window is None else step.window.first_seen(plan.positions)[:, :, None]
    for part in step.parts:
        mask = np.ones((plan.num_rows, 1, 1), dtype=bool)
        if part.group.rows is not None:
            mask = np.isin(np.arange(plan.num_rows), part.group.rows)[:, None, None]
        if first is not None:
            mask = mask & (part.start + np.arange(part.keys.shape[1]) >= first)
        seen.append(SeenPart(part.keys[None], part.values[None], _on(device, mask)))
    own = None if plan.suffix_mask is None else plan.suffix_mask.to(device)
    if first is not None:
        places = plan.prefix_lens[:, None] + np.arange(keys.shape[2])
        of_window = _on(device, places[:, None] >= first)
        own = of_window if own is None else own & of_window
    return [*seen, SeenPart(keys, values, own)]


def with_gradients(
    run: Callable[[], Tensor],
    query: Tensor,
    parts: Sequence[SeenPart],
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Runs attention whose backward attends once more, plainly, in memory of all scores.

    Args:
        run: Attends; its own operations need no gradients.
        query: `[num_rows, num_q_heads, q_len, head_dim]`.
        parts: What the queries see.
        scale: Factor on the scores.
        softcap: Bound of the scores, or None.
        sinks: `[num_q_heads]` logits of attention sinks, or None.

    Returns:
        `[num_rows, q_len, num_q_heads, value_dim]`, what `run` gives.
    """
    masks = [part.mask for part in parts]
    # a pool that is written to by the next forward would take the backward of this one with it
    held = [t if t.requires_grad else t.clone() for t in parts[-1][:2]]
    pairs = [t for part in parts[:-1] for t in part[:2]]
    attend = partial(_attend, masks, scale, softcap)
    out: Tensor = _Recomputed.apply(run, attend, query, sinks, *pairs, *held)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, attend: Any, *tensors: Tensor | None) -> Tensor:
        ctx.attend = attend
        ctx.save_for_backward(*tensors)
        out: Tensor = run()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            tensors = [
                None if t is None else t.detach().requires_grad_(is_needed)
                for t, is_needed in zip(ctx.saved_tensors, needed, strict=True)
            ]
            out = ctx.attend(*tensors)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad_out))
        return (None, None, *(next(found) if is_needed else None for is_needed in needed))


def _attend(
    masks: Sequence[Tensor | None],
    scale: float,
    softcap: float | None,
    query: Tensor,
    sinks: Tensor | None,
    *keys_and_values: Tensor,
) -> Tensor:
    """Attends with plain operations; a query that sees nothing gets 0."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    all_keys, all_values = keys_and_values[::2], keys_and_values[1::2]
    num_kv_heads = all_keys[0].shape[1]
    # [num_rows, num_kv_heads, gqa_ratio, q_len, head_dim]
    grouped = query.to(dtype).unflatten(1, (num_kv_heads, -1)) * scale
    scores = []
    for keys, mask in zip(all_keys, masks, strict=True):
        of_part = grouped @ keys.to(dtype).mT.unsqueeze(2)
        of_part = of_part if softcap is None else softcap * torch.tanh(of_part / softcap)
        if mask is not None:
            of_part = of_part.masked_fill(~mask.unsqueeze(2), torch.finfo(dtype).min)
        scores.append(of_part)
    sizes = [part.shape[-1] for part in scores]
    if sinks is not None:
        of_sinks = sinks.to(dtype).view(1, num_kv_heads, -1, 1, 1)
        scores.append(of_sinks.expand(*scores[0].shape[:-1], 1))
    weights = torch.cat(scores, dim=-1).softmax(-1)[..., : sum(sizes)].split(sizes, dim=-1)
    out = torch.zeros((), dtype=dtype, device=query.device)
    for of_part, values, mask in zip(weights, all_values, masks, strict=True):
        seen = of_part if mask is None else of_part.masked_fill(~mask.unsqueeze(2), 0)
        out = out + seen @ values.to(dtype).unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2).to(query.dtype)


def _on(device: torch.device, mask: np.ndarray) -> Tensor:
    return torch.from_numpy(mask[:, None]).to(device)


def _refuse(gradient: Tensor) -> None:
    raise CutGraphError
