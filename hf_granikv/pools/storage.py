"""Storages of slots: `[num_kv_heads, num_slots, head_dim]`."""

import torch
from torch import Tensor


def slots_like(states: Tensor, num_slots: int) -> Tensor:
    """Empty slots for one layer's `[num_rows, num_kv_heads, q_len, head_dim]` states."""
    return zeros(states, (states.shape[1], num_slots, states.shape[3]))


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a shape, in the dtype and on the device of `like`."""
    # zeros, not empty: masked slots are multiplied by zero weights and must be finite;
    # never an inference tensor, or a later call outside inference mode could not write to it
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def moved(storage: Tensor | None, num_slots: int, src: Tensor, dst: Tensor) -> Tensor | None:
    """A storage of `num_slots` with slots `src` of the old one at `dst`; None for None."""
    if storage is None:
        return None
    moved = zeros(storage, (storage.shape[0], num_slots, storage.shape[2]))
    return moved.index_copy_(
        1, dst.to(storage.device), storage.index_select(1, src.to(storage.device))
    )


def clone(storage: Tensor | None) -> Tensor | None:
    """An independent copy; None for None."""
    return None if storage is None else zeros(storage, tuple(storage.shape)).copy_(storage)
