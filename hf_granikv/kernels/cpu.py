"""Torch's fused CPU attention, and how its work is cut for threads."""

from math import gcd

import torch
from torch import Tensor

# the fewest keys that are worth a merge, and a call of the fused kernel
_MIN_PIECE = 1024


def num_pieces(num_heads: int, kv_len: int, min_piece: int = _MIN_PIECE) -> int:
    """In how many pieces keys are best cut so that every thread gets as much of them to do.

    Kernels give whole heads, or pieces of them, to threads: with three heads, one of two threads
    would idle for a third of the time.
    """
    threads = torch.get_num_threads()
    return max(1, min(threads // gcd(num_heads, threads), kv_len // min_piece))


def in_pieces(tokens: Tensor, num: int) -> tuple[Tensor, int]:
    """Cuts tokens into overlapping pieces of one length, without a copy.

    Args:
        tokens: `[num_heads, num_tokens, head_dim]`.
        num: Pieces, at most `num_tokens`.

    Returns:
        `[num, num_heads, length, head_dim]`, and how many of the last tokens of each piece but the
        last are the first of the next: fewer than `num`.
    """
    (num_heads, num_tokens, head_dim), (of_head, of_token, of_dim) = tokens.shape, tokens.stride()
    step, overlap = divmod(num_tokens, num)
    sizes, strides = (num, num_heads, step + overlap, head_dim), (step * of_token, of_head)
    return tokens.as_strided(sizes, (*strides, of_token, of_dim)), overlap


def flash_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attends with torch's fused CPU kernel, non-causal, to at least one key.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`, any strides.
        keys: `[batch, num_kv_heads, kv_len, head_dim]`, any strides.
        values: `[batch, num_kv_heads, kv_len, head_dim]`.
        scale: Factor on the scores.
        bias: `[batch or 1, num_q_heads or 1, q_len or 1, kv_len]` added to the scores.

    Returns:
        out `[batch, num_q_heads, q_len, head_dim]` in the query's dtype and lse
        `[batch, num_q_heads, q_len]` float32, natural log, not contiguous. A query that sees no key
        gets 0 for both, which the caller has to mend.
    """
    # with no keys at all the kernel divides by zero and takes the process with it
    assert keys.shape[2] > 0, "the fused CPU kernel needs at least one key"
    q_len = query.shape[2]
    # one half-precision query per head misses the matrix product: two are three times faster
    is_doubled = q_len == 1 and query.dtype != torch.float32
    if is_doubled:
        query = query.expand(-1, -1, 2, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scale
    )
    return (out[:, :, :1], lse[:, :, :1]) if is_doubled else (out, lse)
