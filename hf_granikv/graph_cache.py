"""The part of a cache that a compiler traces."""

import sys
from typing import Any

import torch
from torch import Tensor

from hf_granikv.graphs import DeferredKeyValue, DeferredUpdate, number_of
from hf_granikv.in_process import InProcessCache
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.packable import why_not_packable
from hf_granikv.state import CacheState


class GraphCache(InProcessCache):
    """A cache that gives a compiler what is the same in every forward pass.

    Attributes:
        number: By which graphs know this cache.
        goes_straight: Whether the forward under way may be traced: every layer is known to hand
            what it gets to attention as it is, which needs no mask.
    """

    _state: CacheState
    _served: ServedModel

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.number = number_of(self)
        self.goes_straight = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Stores the new tokens of a layer (`AsymmetricPagedLayer.update`); in a graph, notes them."""
        if not self._is_traced:
            layer: Any = self.layers[layer_idx]
            keys, values = layer.update(key_states, value_states)
            return keys, values
        update = DeferredUpdate(self, layer_idx, key_states, value_states)
        return DeferredKeyValue(update, is_value=False), DeferredKeyValue(update, is_value=True)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns before the queries of a mask; 0 in a graph, which has no mask."""
        offset: int = 0 if self._is_traced else super().get_query_offset(layer_idx)
        return offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask; no column in a graph."""
        if self._is_traced:
            return 0, 0
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile its decode steps.

        It may if it is told how, by a `compile_config`, rows read a prefix, and nothing is known of the model
        that would keep steps from being graphs.
        """
        if torch.compiler.is_dynamo_compiling():
            return False
        asking = sys._getframe(1)
        if asking.f_code.co_name != "_valid_auto_compile_criteria":
            # those who ask for masks with a column for every token to come
            return False
        if asking.f_locals["generation_config"].compile_config is None:
            return False
        model = asking.f_locals["self"]
        return self._state.reads_inputs and why_not_packable(model, self._served) is None

    @property
    def _is_traced(self) -> bool:
        return torch.compiler.is_dynamo_compiling() and self.goes_straight
