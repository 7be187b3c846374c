"""Torch implementation of `decode_attention`, a row after the other: what the compiled one is to do."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels.decode_attention.states import GroupStates, Segment
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.suffix_attention import suffix_attention
from hf_granikv.views import AttentionState


def decode_attention(
    query: Tensor,
    storages: tuple[Tensor, Tensor],
    slots: NDArray[np.int64],
    spans: NDArray[np.int64],
    states: Sequence[GroupStates],
    *,
    segments: Sequence[Segment] = (),
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends from one query per row to the row's own tokens, and merges what its prefixes gave.

    Args:
        query: `[num_rows, num_q_heads, 1, head_dim]`.
        storages: Keys and values, `[num_kv_heads, num_slots, head_dim]` each.
        slots: `[num_rows, width]` which slot holds the j-th token of each row.
        spans: `[num_rows, 2]` the own tokens that each row sees: from the first, up to the second.
        states: Parts with other keys, that some or all rows see.
        segments: Tokens that some or all rows see as if they were their own.
        scale: Factor on the scores.
        sinks: `[num_q_heads]` logits of attention sinks, which enter the denominator once.

    Returns:
        `[num_rows, 1, num_q_heads, value_dim]` in the dtype of the query, 0 for a row that sees
        nothing.
    """
    num_kv_heads, outs = storages[0].shape[0], []
    for row, (start, stop) in enumerate(spans):
        its_slots = torch.from_numpy(slots[row, start:stop].copy())
        seen = [tuple(t[:, its_slots] for t in storages)]
        seen += [(s.keys, s.values) for s in segments if s.rows is None or s.rows[row] >= 0]
        keys, values = (torch.cat(side, 1)[None] for side in zip(*seen, strict=True))
        own = suffix_attention(query[row : row + 1], keys, values, scale=scale, mask=None)
        # float64 ones too are merged in float32
        parts = [AttentionState(*(t.float() for t in own.by_kv_head(num_kv_heads)))]
        for state in states:
            at = row if state.rows is None else int(state.rows[row])
            pieces = zip(state.out, state.lse, strict=True) if at >= 0 else ()
            parts += [AttentionState(out[at : at + 1], lse[at : at + 1]) for out, lse in pieces]
        out, lse = merge_states(parts)
        if sinks is not None:
            out = out * torch.sigmoid(lse - sinks.view(1, num_kv_heads, -1)).unsqueeze(-1)
        outs.append(out.reshape(1, 1, -1, out.shape[-1]))
    return torch.cat(outs).to(query.dtype)
