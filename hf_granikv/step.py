"""A forward pass under way, and what its layers are going to give."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_granikv.pools.cold_write import ColdWrite, Places
from hf_granikv.views import LayerStep, StepPlan


class ReadyLayer(NamedTuple):
    """What a layer is about to do, made before it has run.

    Attributes:
        key_shape: `[num_rows, num_kv_heads, q_len, head_dim]` of the keys to come.
        value_shape: Likewise.
        dtype: Of both.
        of_layer: What its attention reads, those to come included.
        places: Where they go. None where rows are no runs of equal length, or in a graph.
        given: What `update` gives: all keys and values of the layer, lazy. None in a graph, where
            it is made if a layer asks for it after all.
    """

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: torch.dtype
    of_layer: LayerStep
    places: Places | None
    given: tuple[Tensor, Tensor] | None

    def fits(self, keys: Tensor, values: Tensor) -> bool:
        """Whether these are the keys and values to come."""
        return (
            keys.shape == self.key_shape
            and values.shape == self.value_shape
            and keys.dtype == values.dtype == self.dtype
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The forward pass under way.

    Attributes:
        plan: What its layers read.
        write: Where they write.
        max_length: Private tokens of the longest row, those of this forward included.
        ready: Layers to come that need not work out for themselves what they give.
    """

    plan: StepPlan
    write: ColdWrite
    max_length: int
    ready: dict[int, ReadyLayer] = field(default_factory=dict)

    def take_ready(self, layer_idx: int) -> ReadyLayer | None:
        """What a layer gives, once; None if it has to work that out."""
        # whoever keeps the step would keep what is put together of its tokens
        self.plan.to_come.pop(layer_idx, None)
        return self.ready.pop(layer_idx, None)

    def end(self) -> None:
        """Forgets layers that have not run and will not: a forward may leave some out, or fail."""
        self.plan.to_come.clear()
        self.ready.clear()
