"""Layers that keep recurrent or convolution states, instead of tokens or beside them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from hf_granikv.hybrids import StateSpec
from hf_granikv.layer import AsymmetricPagedLayer
from hf_granikv.pools import RowStates
from hf_granikv.pools.row_states import LayerStates, StateKey
from hf_granikv.state import CacheState

_KINDS = ("conv_states", "recurrent_states")


class RecurrentLayer(LinearAttentionLayer):
    """The working states of the rows in one layer; what rows start from lies in HOT.

    Models write over these tensors, in place and past the cache, which is why every row has its
    own and why nothing can be taken back.
    """

    is_croppable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Makes states of rows that start empty."""
        # an inference tensor could not be written to by a later forward outside inference mode
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def states(self) -> dict[StateKey, Tensor]:
        """The states now, `[num_rows, ...]` each; none before the first token."""
        return states_of(self)

    def load(self, states: LayerStates) -> None:
        """Takes these tensors for its states; none is as before the first token."""
        LinearAttentionLayer.__init__(self, self.number_of_states)
        for (kind, state_idx), state in states.items():
            getattr(self, kind)[state_idx] = state
            getattr(self, f"is_{kind}_initialized")[state_idx] = True
            self.has_previous_state[state_idx] = True
            if kind == "conv_states":
                self.conv_kernel_size[state_idx] = state.shape[-1]

    def activate_past_recording(self) -> None:
        """Refuses: the cache says why."""
        raise NotImplementedError("states cannot be taken back; ask the cache.")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses: all layers share their rows."""
        raise NotImplementedError("all layers share their rows; call crop on the cache.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuses likewise."""
        raise NotImplementedError("all layers share their rows; call reorder_cache on the cache.")

    def reset(self) -> None:
        """Refuses likewise."""
        raise NotImplementedError("all layers share their rows; call reset on the cache.")


class MixedLayer(RecurrentLayer, AsymmetricPagedLayer):
    """A layer with states and with keys and values."""

    is_compileable = False

    def __init__(self, layer_idx: int, state: CacheState, num_states: int) -> None:
        AsymmetricPagedLayer.__init__(self, layer_idx, state)
        RecurrentLayer.__init__(self, num_states)


def states_of(layer: object) -> dict[StateKey, Tensor]:
    """The states of any layer of transformers; none if it has none, or no token yet."""
    if not isinstance(layer, LinearAttentionLayer):
        return {}
    return {
        StateKey(kind, state_idx): state
        for kind in _KINDS
        for state_idx, state in getattr(layer, kind).items()
        if state is not None and layer.has_previous_state[state_idx]
    }


def put_states(layers: list[Any], specs: Mapping[int, StateSpec], state: CacheState) -> RowStates:
    """Replaces the layers of a cache that keep more, or less, than keys and values.

    Args:
        layers: One for each layer of the model; changed in place.
        specs: Layer index -> what it keeps, if not keys and values alone.
        state: What the layers share.

    Returns:
        The states of the rows in these layers.
    """
    for layer_idx, spec in specs.items():
        if not spec.num_states:
            layers[layer_idx] = cache_utils.DummyLayer()
        elif spec.has_attention:
            layers[layer_idx] = MixedLayer(layer_idx, state, spec.num_states)
        else:
            layers[layer_idx] = RecurrentLayer(spec.num_states)
    return RowStates([layers[i] for i, spec in specs.items() if spec.num_states])
