"""Where the new tokens of one forward go."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.pools.slots import Slots


@dataclass(frozen=True, slots=True)
class ColdWrite:
    """Where the new tokens of one forward go; the same for every layer.

    Attributes:
        slots: `[num_new]` the slots of the new tokens, row after row.
        source: `[num_new]` their places among the `num_rows * q_len` tokens of the forward;
            None if every one of those is stored.
        start: The private length of all rows before, if rows are runs of equal length that all
            store all `q_len` tokens; else None.
    """

    slots: Slots
    source: NDArray[np.int64] | None
    start: int | None
    _moved: dict[torch.device, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Slots and source as tensors on the device of a layer."""
        if device not in self._moved:
            source = None if self.source is None else torch.from_numpy(self.source).to(device)
            self._moved[device] = torch.from_numpy(self.slots).to(device), source
        return self._moved[device]


class Places(NamedTuple):
    """Where the new tokens of one layer go, if they lie side by side.

    Attributes:
        keys: `[num_rows, num_kv_heads, q_len, head_dim]` a view of the pool.
        values: Likewise.
    """

    keys: Tensor
    values: Tensor

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Writes tokens of these shapes."""
        self.keys.copy_(keys)
        self.values.copy_(values)
