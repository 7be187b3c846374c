"""Tokens that change their slots, in place."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_granikv.pools.slots import Slots

# on the CPU, tokens that stay side by side are copied as one piece where pieces are that long
MIN_RUN = 96


class SlotMoves:
    """Moves the tokens in the slots `src` to the slots `dst`, by way of a buffer.

    The two may overlap. Whatever can fail for lack of memory does so when this is made. Rows of one
    length that stay apart by one distance are copied as one strided view.

    Args:
        src: `[num_tokens]` distinct slots.
        dst: Likewise.
        tensors: `[num_kv_heads, num_slots, head_dim]` each; all of them move.
    """

    def __init__(self, src: Slots, dst: Slots, tensors: Sequence[Tensor]) -> None:
        self._src, self._dst = src, dst
        self._tensors = tensors
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for t in tensors:
            kind, size = (t.device, t.dtype), t.shape[0] * len(src) * t.shape[2]
            sizes[kind] = max(size, sizes.get(kind, 0))
        self._buffers = {
            (device, dtype): torch.empty(size, dtype=dtype, device=device)
            for (device, dtype), size in sizes.items()
        }
        self._indices = {
            device: tuple(torch.from_numpy(slots).to(device) for slots in (src, dst))
            for device, _ in sizes
        }

    def run(self) -> None:
        """Moves them; if that is interrupted, the slots `src` are as they were."""
        num_taken = num_moved = 0
        try:
            for tensor in self._tensors:
                self._take(tensor, 0)
                num_taken += 1
                self._put(tensor, 1)
                num_moved += 1
        except BaseException:
            if num_taken > num_moved:
                self._put(self._tensors[num_moved], 0)
            for tensor in self._tensors[:num_moved]:
                self._take(tensor, 1)
                self._put(tensor, 0)
            raise

    def _take(self, tensor: Tensor, side: int) -> None:
        """Fills the buffer from the slots `src` (side 0) or `dst` (side 1)."""
        pairs = self._views(tensor, side)
        if pairs is None:
            index = self._indices[tensor.device][side]
            torch.index_select(tensor, 1, index, out=self._buffer(tensor))
        for in_place, in_buffer in pairs or ():
            in_buffer.copy_(in_place)

    def _put(self, tensor: Tensor, side: int) -> None:
        """Writes the buffer to the slots `src` (side 0) or `dst` (side 1)."""
        pairs = self._views(tensor, side)
        if pairs is None:
            tensor.index_copy_(1, self._indices[tensor.device][side], self._buffer(tensor))
        for in_place, in_buffer in pairs or ():
            in_place.copy_(in_buffer)

    def _views(self, tensor: Tensor, side: int) -> list[tuple[Tensor, Tensor]] | None:
        """The same tokens in their slots and in the buffer, piece by piece; None to go by index."""
        buffer, runs = self._buffer(tensor), self._runs
        if self._distances is not None:
            length, distance = runs.lengths[0], self._distances[side]
            whole = distance * (len(runs.lengths) - 1) + length
            rows = tensor.narrow(1, runs.starts[side][0], whole).unfold(1, length, distance)
            return [(rows.transpose(2, 3), buffer.unflatten(1, (-1, length)))]
        if tensor.device.type == "cpu" and len(self._src) >= MIN_RUN * len(runs.lengths):
            pieces = zip(runs.starts[side], buffer.split(runs.lengths, dim=1), strict=True)
            return [(tensor.narrow(1, start, t.shape[1]), t) for start, t in pieces]
        return None

    def _buffer(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape[0], len(self._src), tensor.shape[2]
        flat = self._buffers[tensor.device, tensor.dtype]
        return flat[: shape[0] * shape[1] * shape[2]].view(shape)

    @cached_property
    def _runs(self) -> "_Runs":
        is_cut = (np.diff(self._src) != 1) | (np.diff(self._dst) != 1)
        begins = np.concatenate([[0], np.flatnonzero(is_cut) + 1])
        lengths = np.diff(np.append(begins, len(self._src)))
        return _Runs(lengths.tolist(), (self._src[begins].tolist(), self._dst[begins].tolist()))

    @cached_property
    def _distances(self) -> list[int] | None:
        """How far apart runs start in `src` and in `dst`; None if that or their length differs."""
        if len(set(self._runs.lengths)) > 1:
            return None
        steps = [set(np.diff(starts).tolist()) or {1} for starts in self._runs.starts]
        return (
            [min(each) for each in steps]
            if all(len(s) == 1 and min(s) > 0 for s in steps)
            else None
        )


class _Runs(NamedTuple):
    """Tokens that stay side by side: how many, and the first slot of each in `src` and `dst`."""

    lengths: list[int]
    starts: tuple[list[int], list[int]]
