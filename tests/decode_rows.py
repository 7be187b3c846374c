"""Rows of a decode step with scattered slots, and the oracle for what they see."""

import numpy as np
import torch
from oracle import assert_close, reference
from torch import Tensor

from hf_granikv.kernels.decode_attention import (
    DecodeAttention,
    GroupStates,
    Segment,
    unsupported_reasons,
)
from hf_granikv.kernels.suffix_attention import suffix_attention
from hf_granikv.views import PrivateTokens

NUM_SLOTS = 800


class Rows:
    """Rows with scattered slots, over prefixes that some of them read."""

    def __init__(self, dtype, *, lengths=(5, 1, 33, 0, 17), kv=2, gqa=3, dim=64, value_dim=None):
        generator = torch.Generator().manual_seed(dim + gqa)
        self.generator, self.dtype, self.kv, self.gqa = generator, dtype, kv, gqa
        self.lengths, num_rows = np.array(lengths), len(lengths)
        self.query = self.draw(num_rows, 1, kv * gqa, dim).transpose(1, 2)
        self.storages = self.draw(kv, NUM_SLOTS, dim), self.draw(kv, NUM_SLOTS, value_dim or dim)
        self.slots = np.full((num_rows, max(lengths) + 3), -1)
        order = torch.randperm(NUM_SLOTS, generator=generator).numpy()
        taken = 0
        for row, length in enumerate(lengths):
            self.slots[row, :length] = order[taken : taken + length]
            taken += length
        self.spans = np.stack([np.zeros_like(self.lengths), self.lengths], 1)
        self.prefixes: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def draw(self, *size):
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def add_prefix(self, rows, prefix_len, num_pieces=1) -> GroupStates:
        keys, values = (
            self.draw(self.kv, prefix_len, storage.shape[2]) for storage in self.storages
        )
        rows = np.array(rows)
        self.prefixes.append((rows, keys, values))
        states = []
        for its_keys, its_values in zip(
            keys.chunk(num_pieces, 1), values.chunk(num_pieces, 1), strict=True
        ):
            expanded = (t.expand(len(rows), -1, -1, -1) for t in (its_keys, its_values))
            state = suffix_attention(self.query[rows], *expanded, scale=0.1, mask=None)
            states.append(state.by_kv_head(self.kv))
        row_map = np.full(len(self.lengths), -1)
        row_map[rows] = np.arange(len(rows))
        out, lse = map(torch.stack, zip(*states, strict=True))
        return GroupStates(out, lse, None if len(rows) == len(self.lengths) else row_map)

    def add_segment(self, rows, num_tokens) -> Segment:
        """A prefix that these rows read each by itself, a view of something larger."""
        keys, values = (
            self.draw(self.kv, num_tokens + 7, storage.shape[2])[:, 3:-4]
            for storage in self.storages
        )
        rows = np.array(rows)
        self.prefixes.append((rows, keys, values))
        row_map = np.full(len(self.lengths), -1)
        row_map[rows] = np.arange(len(rows))
        return Segment(keys, values, None if len(rows) == len(self.lengths) else row_map)

    def private(self, new_slots: np.ndarray | None = None) -> PrivateTokens:
        longest = max(self.lengths)
        return PrivateTokens(self.storages, self.slots, longest, lambda: self.storages, new_slots)

    def attend(self, *states: GroupStates, segments=(), sinks: Tensor | None = None) -> Tensor:
        assert unsupported_reasons(self.query, self.private()) == []
        lengths = [segment.keys.shape[1] for segment in segments]
        attention = DecodeAttention(
            self.query, self.private(), self.spans, scale=0.1, num_segment_tokens=lengths
        )
        kwargs = {"segments": segments, "sinks": sinks}
        # the first layer has other keys
        attention.run(self.query, *(t.flip(1) for t in self.storages), states, **kwargs)
        return attention.run(self.query, *self.storages, states, **kwargs)

    def check(self, out: Tensor, row: int, sinks: Tensor | None = None) -> None:
        start, stop = self.spans[row]
        slots = torch.from_numpy(self.slots[row, start:stop].copy())
        parts = [tuple(t[:, slots] for t in self.storages)]
        parts += [(k, v) for rows, k, v in self.prefixes if row in rows]
        keys, values = (torch.cat(side, 1)[None] for side in zip(*parts, strict=True))
        ref = reference(self.query[row : row + 1], keys, values, scale=0.1)
        want = ref.out
        if sinks is not None:
            share = torch.sigmoid(ref.lse - sinks.double()[None, :, None])
            want = want * share.unsqueeze(-1)
        # the parts are rounded to the dtype before they are merged
        assert_close(f"row {row}", out[row].transpose(0, 1)[None], want, 2 * ref.out_budget)
