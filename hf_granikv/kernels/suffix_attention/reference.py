"""Torch implementation of `suffix_attention`: fused on a CPU, plain products elsewhere."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_granikv.kernels import cpu
from hf_granikv.views import AttentionState

_LOWEST = torch.finfo(torch.float32).min
# float32 scores alive at once in the path that is not fused: 64 MiB
_MAX_SCORES = 16 << 20


class SuffixMask(NamedTuple):
    """A bool mask made ready for the kernels, once for all layers of a step.

    Attributes:
        bias: `[rows or 1, 1, q_len, kv_len]` in the query's dtype, 0 where visible, else -inf.
        sees_nothing: `[rows or 1, 1, q_len]` bool, True for a query to which every key is hidden.
    """

    bias: Tensor
    sees_nothing: Tensor


def prepare_mask(mask: Tensor, dtype: torch.dtype) -> SuffixMask:
    """Makes a bool mask ready for `suffix_attention`.

    Args:
        mask: `[rows or 1, 1, q_len, kv_len]` bool, True where a query sees a key.
        dtype: The query's.
    """
    hidden = ~mask
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return SuffixMask(bias.masked_fill_(hidden, -torch.inf), hidden.all(-1))


def suffix_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | SuffixMask | None,
    softcap: float | None = None,
) -> AttentionState:
    """Attends from each row's queries to that row's own keys.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]`, any strides.
        keys: `[rows, num_kv_heads, kv_len, head_dim]`, any strides, stride 0 over rows included;
            never copied on a CPU, unless a hidden one is no number. On other devices those have to be
            numbers.
        values: `[rows, num_kv_heads, kv_len, value_dim]`; not fused unless as wide as keys.
        scale: Factor on the scores.
        mask: `[rows or 1, 1, q_len, kv_len]` bool, True where a query sees a key, or what
            `prepare_mask` made of it; None = everything is seen.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`; not fused on a CPU.

    Returns:
        out `[rows, num_q_heads, q_len, value_dim]` and lse `[rows, num_q_heads, q_len]`, any
        strides; `(0, -inf)` for a query that sees no key.
    """
    if keys.shape[2] == 0:
        out = query.new_zeros((*query.shape[:-1], values.shape[-1]), dtype=torch.float32)
        return AttentionState(out, out.new_full(out.shape[:3], -torch.inf))
    if isinstance(mask, Tensor):
        mask = prepare_mask(mask, query.dtype)
    state = _attend_suffix(query, keys, values, scale, mask, softcap)
    # of other kinds of tensors, such as fake ones, there may be no numbers to look at
    if mask is None or not query.is_cpu or type(state.out) is not Tensor:
        return state
    if not bool(state.out.isnan().any()):
        return state
    # the weight of a hidden key is 0, but not its share where the key or value is no number
    hidden = mask.bias.isneginf().all(2, keepdim=True).mT
    keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    return _attend_suffix(query, keys, values, scale, mask, softcap)


def _attend_suffix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: SuffixMask | None,
    softcap: float | None,
) -> AttentionState:
    num_q_heads, q_len = query.shape[1:3]
    num_kv_heads = keys.shape[1]
    bias = None if mask is None else mask.bias
    gqa_ratio = num_q_heads // num_kv_heads
    is_fused = query.is_cpu and softcap is None and query.shape[-1] == values.shape[-1]
    if not is_fused or _packing_pays(gqa_ratio, q_len, query.dtype):
        packed = query.reshape(-1, num_kv_heads, gqa_ratio * q_len, query.shape[-1])
        if bias is not None and q_len > 1:
            bias = bias.repeat(1, 1, gqa_ratio, 1)
        if is_fused:
            out, lse = cpu.flash_attention(packed, keys, values, scale=scale, bias=bias)
        else:
            out, lse = matmul_attention(
                packed, keys, values, scale=scale, bias=bias, softcap=softcap
            )
        lse = lse.reshape(query.shape[:3])
        out = out.reshape(*query.shape[:3], values.shape[-1])
    else:
        out, lse = cpu.flash_attention(query, keys, values, scale=scale, bias=bias)
    if mask is not None:
        lse.masked_fill_(mask.sees_nothing, -torch.inf)
    return AttentionState(out, lse)


def matmul_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Does what `cpu.flash_attention` does, on any device, for as many query as kv heads."""
    num_scores = query.shape[0] * query.shape[1] * keys.shape[2]
    block = max(1, _MAX_SCORES // max(1, num_scores))
    if block >= query.shape[2]:
        return _attend(query, keys, values, bias, scale, softcap)
    biases = [bias] * query.shape[2] if bias is None or bias.shape[2] == 1 else bias.split(block, 2)
    parts = [
        _attend(queries, keys, values, its_bias, scale, softcap)
        for queries, its_bias in zip(query.split(block, 2), biases, strict=False)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, keys.mT).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    # a query that sees nothing would subtract -inf from -inf
    peak = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.to(values.dtype), values).float()
    return out.div_(total.clamp_min(1.0)), peak.add_(total.log_()).squeeze(-1)


def _packing_pays(gqa_ratio: int, q_len: int, dtype: torch.dtype) -> bool:
    """Tells whether the query heads of one kv head should share one product on a CPU.

    Measured with AVX2: float32 vector-matrix products beat thin matrix products up to three rows,
    half-precision ones never do, and from 16 queries per head on packing only costs its copies.
    """
    if q_len >= 16 or gqa_ratio == 1:
        return False
    return q_len > 1 or gqa_ratio > 3 or dtype != torch.float32
