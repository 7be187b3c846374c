"""Attention in float64, and the rule by which a result counts as right."""

from typing import NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """A float64 result and the errors that plain torch attention in the tested dtype makes on it."""

    out: Tensor  # [rows, num_q_heads, q_len, head_dim]
    lse: Tensor  # [rows, num_q_heads, q_len]
    out_budget: float
    lse_budget: float


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attends by the textbook, with kv heads repeated and all scores alive.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]`.
        keys: `[rows or 1, num_kv_heads, kv_len, head_dim]`.
        values: `[rows or 1, num_kv_heads, kv_len, head_dim]`.
        scale: Factor on the scores.
        mask: `[rows or 1, 1, q_len, kv_len]` bool, True where visible.
        softcap: Bound of the scores.
        dtype: In which the products run.
    """
    gqa_ratio = query.shape[1] // keys.shape[1]
    q = query.to(dtype)
    k = keys.to(dtype).repeat_interleave(gqa_ratio, 1)
    v = values.to(dtype).repeat_interleave(gqa_ratio, 1)
    scores = (q @ k.mT).to(torch.promote_types(dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights.to(dtype) @ v), scores.logsumexp(-1)


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Reference:
    """Gives the float64 result and twice the error of plain attention in the inputs' dtype."""
    options = {"scale": scale, "mask": mask, "softcap": softcap}
    out, lse = dense_attention(query, keys, values, **options)
    plain_out, plain_lse = dense_attention(query, keys, values, **options, dtype=query.dtype)
    return Reference(
        out, lse, 2 * max_error(plain_out, out) + 1e-6, 2 * max_error(plain_lse, lse) + 1e-6
    )


def max_error(got: Tensor, ref: Tensor) -> float:
    """Gives the largest absolute difference; equal infinities differ by 0, a NaN by infinity."""
    difference = (got.double() - ref.double()).abs().masked_fill(got.double() == ref.double(), 0.0)
    return difference.nan_to_num(torch.inf).max().item() if difference.numel() else 0.0


def assert_close(name: str, got: Tensor, ref: Tensor, budget: float) -> None:
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(ref.shape)}"
    error = max_error(got, ref)
    assert error <= budget, f"{name}: error {error:.3g} exceeds {budget:.3g}"
