"""Torch implementations of attention to a shared prefix."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_granikv.kernels import cpu
from hf_granikv.processor import has_fast_matmul

# bytes of float32 scores alive at once: a CPU keeps them in its last-level cache
_CPU_TILE_BYTES = 4 << 20
_TILE_BYTES = 64 << 20
_MIN_TILE = 128
_CPU_QUERY_BLOCK = 512


class PackedStates(NamedTuple):
    """The attention of packed queries to the keys, in pieces that are yet to be merged.

    Attributes:
        out: `[num_pieces, num_kv_heads, num_queries, value_dim]`, of at least one piece.
        lse: `[num_pieces, num_kv_heads, num_queries]` float32, natural log; `(0, -inf)` where there
            is no key.
    """

    out: Tensor
    lse: Tensor


def flash_shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float
) -> PackedStates:
    """Attends to a shared prefix with torch's fused kernel on a CPU, with tiled products elsewhere.

    The fused kernel wants values as wide as keys; others go to the tiled products too. It is given
    the prefix in as many pieces as keep all threads busy.

    Args:
        query: `[num_kv_heads, num_queries, head_dim]`, every query that reads a kv head, packed.
        keys: `[num_kv_heads, prefix_len, head_dim]`.
        values: `[num_kv_heads, prefix_len, value_dim]`.
        scale: Factor on the scores.

    Returns:
        The attention. On a CPU out has the query's dtype and lse is not contiguous.
    """
    if not query.is_cpu or keys.shape[1] == 0 or keys.shape[2] != values.shape[2]:
        return gemm_shared_attention(query, keys, values, scale=scale)
    num, bias = cpu.num_pieces(*keys.shape[:2]), None
    (keys, overlap), (values, _) = cpu.in_pieces(keys, num), cpu.in_pieces(values, num)
    if overlap:
        bias = query.new_zeros(num, 1, 1, keys.shape[2])
        bias[:-1, ..., -overlap:] = -torch.inf
    query = query.expand(num, -1, -1, -1)
    return PackedStates(*cpu.flash_attention(query, keys, values, scale=scale, bias=bias))


def gemm_shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None = None
) -> PackedStates:
    """Attends to a shared prefix by matrix products, tiled over the prefix with a running softmax.

    Source: Online normalizer calculation for softmax, arXiv:1805.02867, algorithm 3.

    Args:
        query: `[num_kv_heads, num_queries, head_dim]`, every query that reads a kv head, packed.
        keys: `[num_kv_heads, prefix_len, head_dim]`.
        values: `[num_kv_heads, prefix_len, value_dim]`.
        scale: Factor on the scores.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.

    Returns:
        The attention in one piece, out in float32.
    """
    if keys.shape[1] == 0:
        out = query.new_zeros((*query.shape[:2], values.shape[2]), dtype=torch.float32)
        return PackedStates(out[None], out.new_full((1, *out.shape[:2]), -torch.inf))
    block, tile_bytes = query.shape[1], _TILE_BYTES
    if query.is_cpu:
        block, tile_bytes = min(block, _CPU_QUERY_BLOCK), _CPU_TILE_BYTES
        if not has_fast_matmul(query.dtype):
            query = query.float()
    tile = max(_MIN_TILE, tile_bytes // (4 * max(1, query.shape[0] * block)))
    parts = [
        _attend_block(queries, keys, values, scale=scale, softcap=softcap, tile=tile)
        for queries in query.split(max(1, block), dim=1)
    ]
    if len(parts) == 1:
        return PackedStates(parts[0][0][None], parts[0][1][None])
    outs, lses = zip(*parts, strict=True)
    return PackedStates(torch.cat(outs, dim=1)[None], torch.cat(lses, dim=1)[None])


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
