"""Layers that keep recurrent or convolution states, instead of tokens or beside them."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from hf_granikv.compat import DummyLayer
from hf_granikv.layer import AsymmetricPagedLayer
from hf_granikv.pools import RowStates
from hf_granikv.pools.row_states import LayerStates, StateKey
from hf_granikv.state import CacheState
from hf_granikv.views import LayerKind

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

    def __init__(self, layer_idx: int, state: CacheState, kind: LayerKind) -> None:
        AsymmetricPagedLayer.__init__(self, layer_idx, state)
        RecurrentLayer.__init__(self, kind.num_states)


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


def build_layers(state: CacheState) -> list[Any]:
    """One layer of ours for each of the model, and `state.row_states` over those with states."""
    layers = [_layer(layer_idx, kind, state) for layer_idx, kind in enumerate(state.layers)]
    state.row_states = RowStates([layer for layer in layers if isinstance(layer, RecurrentLayer)])
    return layers


def _layer(layer_idx: int, kind: LayerKind, state: CacheState) -> Any:
    if kind.num_states and kind.stores:
        return MixedLayer(layer_idx, state, kind)
    if kind.num_states:
        return RecurrentLayer(kind.num_states)
    if kind.stores:
        return AsymmetricPagedLayer(layer_idx, state)
    return DummyLayer()
