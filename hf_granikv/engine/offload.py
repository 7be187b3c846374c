"""Private tokens of a row that waits, in the memory of the host."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.errors import ColdPoolFullError


@dataclass(frozen=True, slots=True)
class OffloadedRow:
    """A parked row whose tensors lie on the CPU.

    Attributes:
        parked: The row, there.
        devices: Where its tensors were, layer by layer: of tokens, then of states.
    """

    parked: ParkedRow
    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, parked: ParkedRow) -> "OffloadedRow":
        """Moves a parked row to the host."""
        devices = tuple(t.device for t in _tensors(parked))
        return cls(_on(parked, iter([torch.device("cpu")] * len(devices))), devices)

    def restored(self) -> ParkedRow:
        """Moves it back."""
        return _on(self.parked, iter(self.devices))


def _tensors(parked: ParkedRow) -> list[Tensor]:
    of_tokens = [t for pair in parked.tokens if pair is not None for t in pair]
    return [*of_tokens, *(t for layer in parked.states for t in layer.values())]


def _on(parked: ParkedRow, devices: Any) -> ParkedRow:
    tokens = tuple(
        None if pair is None else (pair[0].to(next(devices)), pair[1].to(next(devices)))
        for pair in parked.tokens
    )
    states = tuple({k: t.to(next(devices)) for k, t in each.items()} for each in parked.states)
    return replace(parked, tokens=tokens, states=states)


def is_out_of_memory(error: Exception) -> bool:
    """Whether something did not fit, into a pool or into memory."""
    kinds = (ColdPoolFullError, torch.OutOfMemoryError, MemoryError)
    # torch's allocator on the CPU has no error of its own
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
