"""Every tensor that private tokens are in, and the most bytes that these ever were."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_granikv.pools import storage
from hf_granikv.pools.slot_moves import SlotMoves
from hf_granikv.pools.storage import SlotStorage


class TokenBytes:
    """Watches storages, what is copied out of them, and the buffers of tokens that move.

    Attributes:
        peak: The most bytes alive at a time since `start`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._alive: list[weakref.ref[Tensor]] = []
        self.peak = 0
        empty, take, moves = storage.empty, SlotStorage.take, SlotMoves.__init__

        def watched_empty(*args: Any) -> Tensor:
            return self._note(empty(*args))

        def watched_take(self_: SlotStorage, *args: Any) -> Any:
            taken = take(self_, *args)
            return None if taken is None else tuple(map(self._note, taken))

        def watched_moves(self_: SlotMoves, *args: Any) -> None:
            moves(self_, *args)
            for buffer in self_._buffers.values():
                self._note(buffer)

        monkeypatch.setattr(storage, "empty", watched_empty)
        monkeypatch.setattr(SlotStorage, "take", watched_take)
        monkeypatch.setattr(SlotMoves, "__init__", watched_moves)

    @property
    def now(self) -> int:
        """Bytes alive now, each storage once."""
        tensors = [t for ref in self._alive if (t := ref()) is not None]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(sizes.values())

    def start(self) -> None:
        """Counts the peak from here on."""
        self.peak = self.now

    def _note(self, tensor: Tensor) -> Tensor:
        self._alive = [ref for ref in self._alive if ref() is not None]
        self._alive.append(weakref.ref(tensor))
        self.peak = max(self.peak, self.now)
        return tensor


def tensor_bytes(*shape: int) -> int:
    return torch.Size(shape).numel() * 4
