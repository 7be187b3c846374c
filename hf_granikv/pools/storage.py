"""Storages of slots: `[num_kv_heads, num_slots, head_dim]`, two for each layer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_granikv.pools.run_spread import RunSpread
from hf_granikv.pools.slot_moves import SlotMoves
from hf_granikv.pools.slots import Slots

# keys and values of one layer; None before its first write
KeysAndValues = tuple[Tensor, Tensor]


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a shape, in the dtype and on the device of `like`."""
    # zeros, not empty: masked slots are multiplied by zero weights and must be finite
    return empty(like, shape).zero_()


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of a shape, in the dtype and on the device of `like`, that has yet to be written."""
    # never an inference tensor, or a later call outside inference mode could not write to it
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class SlotStorage:
    """Keys and values of every layer that has stored any, by slot.

    It changes its size tensor by tensor, so that one of them at a time is there twice. A change that
    breaks off for lack of memory leaves the slots as they were; some tensors may be larger then.

    Args:
        num_layers: Layers that may store tokens.

    Attributes:
        num_slots: Slots of each layer.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 0
        # the keys of all layers, then their values
        self._sides: tuple[list[Tensor | None], list[Tensor | None]]
        self._sides = [None] * num_layers, [None] * num_layers

    def __len__(self) -> int:
        return len(self._sides[0])

    def layer(self, layer_idx: int) -> KeysAndValues | None:
        """Keys and values of one layer; None before its first write."""
        of_keys, of_values = self._sides
        keys, values = of_keys[layer_idx], of_values[layer_idx]
        return None if keys is None or values is None else (keys, values)

    def written(self, layer_idx: int) -> KeysAndValues:
        """Keys and values of a layer that has written."""
        held = self.layer(layer_idx)
        assert held is not None
        return held

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that have stored any."""
        return sum(map(_bytes_per_token, self._tensors()))

    @property
    def largest_bytes_per_token(self) -> int:
        """Bytes of one token in the largest of the tensors."""
        return max(map(_bytes_per_token, self._tensors()), default=0)

    def open(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Makes room for a layer that writes for the first time.

        Args:
            layer_idx: The layer.
            keys: `[..., num_kv_heads, any, head_dim]` of the kind to come.
            values: Likewise.
        """
        if self.layer(layer_idx) is None:
            made = [zeros(t, (t.shape[-3], self.num_slots, t.shape[-1])) for t in (keys, values)]
            for side, tensor in zip(self._sides, made, strict=True):
                side[layer_idx] = tensor

    def put(
        self, layer_idx: int, slots: Tensor, tokens: Sequence[Tensor], source: Tensor | None = None
    ) -> None:
        """Writes tokens into slots.

        Args:
            layer_idx: The layer; `open` was called for it.
            slots: `[num_new]`.
            tokens: Keys and values, `[num_kv_heads, num_given, head_dim]` each.
            source: `[num_new]` which of the given go there; None for all.
        """
        for storage, given in zip(self.written(layer_idx), tokens, strict=True):
            chosen = given if source is None else given.index_select(1, source)
            storage.index_copy_(1, slots.to(storage.device), chosen)

    def take(self, layer_idx: int, slots: Tensor) -> KeysAndValues | None:
        """Copies of the tokens in some slots, `[num_kv_heads, len(slots), head_dim]` each."""
        held = self.layer(layer_idx)
        if held is None:
            return None
        keys, values = (t.index_select(1, slots.to(t.device)) for t in held)
        return keys, values

    def lend(self, layer_idx: int, slots: Slots) -> KeysAndValues | None:
        """The tokens in some slots: views where these are a run, else copies."""
        held, num_tokens = self.layer(layer_idx), len(slots)
        if held is None or not num_tokens or (np.diff(slots) != 1).any():
            return self.take(layer_idx, torch.from_numpy(slots))
        keys, values = (t.narrow(1, int(slots[0]), num_tokens) for t in held)
        return keys, values

    def move(self, src: Slots, dst: Slots) -> None:
        """Moves the tokens in the slots `src` to the slots `dst`; the two may overlap."""
        if len(src):
            SlotMoves(src, dst, self._tensors()).run()

    def spread(self, runs: RunSpread, num_slots: int) -> None:
        """Makes it `num_slots` large, no less than it is, and moves runs apart on the way."""
        done: list[Tensor] = []
        try:
            for side in self._sides:
                for layer_idx, storage in enumerate(side):
                    if storage is not None:
                        larger = empty(storage, (storage.shape[0], num_slots, storage.shape[2]))
                        runs.copy(storage, larger)
                        done.append(larger)
                        side[layer_idx] = larger
        except BaseException:
            for larger in done:
                runs.undo(larger)
            raise
        self.num_slots = num_slots

    def resize(self, num_slots: int) -> None:
        """Makes it `num_slots` large; the first slots keep what they hold."""
        # broken off, no tensor is smaller than is said
        self.num_slots = min(num_slots, self.num_slots)
        for side in self._sides:
            for layer_idx in range(len(side)):
                side[layer_idx] = _resized(side[layer_idx], num_slots)
        self.num_slots = num_slots

    def release(self) -> None:
        """Gives all memory back."""
        self.num_slots = 0
        self._sides = [None] * len(self), [None] * len(self)

    def copy(self) -> "SlotStorage":
        """An independent copy."""
        twin = SlotStorage(len(self))
        twin.num_slots = self.num_slots
        for own, other in zip(twin._sides, self._sides, strict=True):
            own[:] = [None if t is None else zeros(t, tuple(t.shape)).copy_(t) for t in other]
        return twin

    def _tensors(self) -> list[Tensor]:
        return [tensor for side in self._sides for tensor in side if tensor is not None]


def _bytes_per_token(storage: Tensor) -> int:
    return storage.shape[0] * storage.shape[2] * storage.element_size()


def _resized(storage: Tensor | None, num_slots: int) -> Tensor | None:
    if storage is None or storage.shape[1] == num_slots:
        return storage
    num_kept = min(num_slots, storage.shape[1])
    resized = zeros(storage, (storage.shape[0], num_slots, storage.shape[2]))
    resized[:, :num_kept].copy_(storage[:, :num_kept])
    return resized
