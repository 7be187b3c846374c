"""Storages of slots: `[num_kv_heads, num_slots, head_dim]`, two for each layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

# keys and values of one layer; None before its first write
KeysAndValues = tuple[Tensor, Tensor]


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a shape, in the dtype and on the device of `like`."""
    # zeros, not empty: masked slots are multiplied by zero weights and must be finite;
    # never an inference tensor, or a later call outside inference mode could not write to it
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


class SlotStorage:
    """Keys and values of every layer that has stored any, by slot.

    Args:
        num_layers: Layers that may store tokens.

    Attributes:
        num_slots: Slots of each layer.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 0
        self._layers: list[KeysAndValues | None] = [None] * num_layers

    def __len__(self) -> int:
        return len(self._layers)

    def layer(self, layer_idx: int) -> KeysAndValues | None:
        """Keys and values of one layer; None before its first write."""
        return self._layers[layer_idx]

    def written(self, layer_idx: int) -> KeysAndValues:
        """Keys and values of a layer that has written."""
        held = self._layers[layer_idx]
        assert held is not None
        return held

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that have stored any."""
        return sum(t.shape[0] * t.shape[2] * t.element_size() for t in self._tensors())

    def open(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Makes room for a layer that writes for the first time.

        Args:
            layer_idx: The layer.
            keys: `[..., num_kv_heads, any, head_dim]` of the kind to come.
            values: Likewise.
        """
        if self._layers[layer_idx] is None:
            made = [zeros(t, (t.shape[-3], self.num_slots, t.shape[-1])) for t in (keys, values)]
            self._layers[layer_idx] = made[0], made[1]

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
        held = self._layers[layer_idx]
        if held is None:
            return None
        keys, values = (t.index_select(1, slots.to(t.device)) for t in held)
        return keys, values

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copies slots `src` to the slots `dst`, which are others."""
        for layer_idx in range(len(self._layers)):
            tokens = self.take(layer_idx, src)
            if tokens is not None:
                self.put(layer_idx, dst, tokens)

    def resize(self, num_slots: int, src: Tensor, dst: Tensor) -> None:
        """Makes it `num_slots` large, with the former slots `src` at `dst` and nothing else."""
        # nothing is changed if there is no memory for all of it
        moved: list[KeysAndValues | None] = [
            None
            if held is None
            else (_moved(held[0], num_slots, src, dst), _moved(held[1], num_slots, src, dst))
            for held in self._layers
        ]
        self.num_slots, self._layers = num_slots, moved

    def release(self) -> None:
        """Gives all memory back."""
        self.num_slots = 0
        self._layers = [None] * len(self._layers)

    def copy(self) -> "SlotStorage":
        """An independent copy."""
        twin = SlotStorage(len(self._layers))
        twin.num_slots = self.num_slots
        for layer_idx, held in enumerate(self._layers):
            if held is not None:
                keys, values = (zeros(t, tuple(t.shape)).copy_(t) for t in held)
                twin._layers[layer_idx] = keys, values
        return twin

    def _tensors(self) -> list[Tensor]:
        return [tensor for held in self._layers if held is not None for tensor in held]


def _moved(storage: Tensor, num_slots: int, src: Tensor, dst: Tensor) -> Tensor:
    moved = zeros(storage, (storage.shape[0], num_slots, storage.shape[2]))
    return moved.index_copy_(
        1, dst.to(storage.device), storage.index_select(1, src.to(storage.device))
    )
