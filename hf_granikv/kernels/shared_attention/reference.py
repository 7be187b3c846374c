"""Torch implementations of attention to a shared prefix."""

import torch
from torch import Tensor

from hf_granikv.kernels import cpu

# bytes of float32 scores alive at once: a CPU keeps them in its last-level cache
_CPU_TILE_BYTES = 4 << 20
_TILE_BYTES = 64 << 20
_MIN_TILE = 128
_CPU_QUERY_BLOCK = 512


def flash_shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends to a shared prefix with torch's fused kernel on a CPU, with tiled products elsewhere.

    Args:
        query: `[num_kv_heads, num_queries, head_dim]`, every query that reads a kv head, packed.
        keys: `[num_kv_heads, prefix_len, head_dim]`.
        values: `[num_kv_heads, prefix_len, head_dim]`.
        scale: Factor on the scores.

    Returns:
        out `[num_kv_heads, num_queries, head_dim]` and lse `[num_kv_heads, num_queries]` float32,
        natural log; `(0, -inf)` for an empty prefix. On a CPU out has the query's dtype and lse is
        not contiguous.
    """
    if not query.is_cpu or keys.shape[1] == 0:
        return gemm_shared_attention(query, keys, values, scale=scale)
    out, lse = cpu.flash_attention(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=scale
    )
    return out.squeeze(0), lse.squeeze(0)


def gemm_shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attends to a shared prefix by matrix products, tiled over the prefix with a running softmax.

    Source: Online normalizer calculation for softmax, arXiv:1805.02867, algorithm 3.

    Args:
        query: `[num_kv_heads, num_queries, head_dim]`, every query that reads a kv head, packed.
        keys: `[num_kv_heads, prefix_len, head_dim]`.
        values: `[num_kv_heads, prefix_len, head_dim]`.
        scale: Factor on the scores.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.

    Returns:
        out `[num_kv_heads, num_queries, head_dim]` float32 and lse `[num_kv_heads, num_queries]`
        float32, natural log; `(0, -inf)` for an empty prefix.
    """
    if keys.shape[1] == 0:
        out = query.new_zeros(query.shape, dtype=torch.float32)
        return out, out.new_full(out.shape[:2], -torch.inf)
    block, tile_bytes = query.shape[1], _TILE_BYTES
    if query.is_cpu:
        block, tile_bytes = min(block, _CPU_QUERY_BLOCK), _CPU_TILE_BYTES
        if not cpu.has_fast_matmul(query.dtype):
            query = query.float()
    tile = max(_MIN_TILE, tile_bytes // (4 * max(1, query.shape[0] * block)))
    parts = [
        _attend_block(queries, keys, values, scale=scale, softcap=softcap, tile=tile)
        for queries in query.split(max(1, block), dim=1)
    ]
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _attend_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None,
    tile: int,
) -> tuple[Tensor, Tensor]:
    out, total, peak = _attend_tile(query, keys[:, :tile], values[:, :tile], scale, softcap, None)
    for start in range(tile, keys.shape[1], tile):
        stop = start + tile
        tile_out, tile_total, new_peak = _attend_tile(
            query, keys[:, start:stop], values[:, start:stop], scale, softcap, peak
        )
        shrink = peak.sub_(new_peak).exp_()
        total.mul_(shrink).add_(tile_total)
        out.mul_(shrink).add_(tile_out)
        peak = new_peak
    return out.div_(total), peak.add_(total.log_()).squeeze(-1)


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    peak: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the unnormalised output of one tile, its weights' sum and the new running maximum."""
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if query.dtype == torch.float32:
        scores = torch.bmm(query * scale, keys.mT)  # [num_kv_heads, num_queries, tile]
    else:
        scores = _product(query, keys.mT).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    new_peak = scores.amax(-1, keepdim=True)
    if peak is not None:
        new_peak = torch.maximum(peak, new_peak)
    weights = scores.sub_(new_peak).exp_()
    total = weights.sum(-1, keepdim=True)
    return _product(weights.to(values.dtype), values), total, new_peak


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies `[batch, m, k]` by `[batch, k, n]` into float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()
