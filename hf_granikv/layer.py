"""One layer's face to transformers."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_granikv.compat import outside_graphs
from hf_granikv.gradients import needs_gradients, with_graph
from hf_granikv.lazy import lazy_pair
from hf_granikv.ready_layers import layer_step, make_ready, own_tokens
from hf_granikv.state import CacheState
from hf_granikv.step import ReadyLayer
from hf_granikv.views import PrivateTokens


class AsymmetricPagedLayer(CacheLayerMixin):
    """One layer's face to transformers; what it holds lies in the pools that all layers share."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, layer_idx: int, state: CacheState) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._state = state
        self._step_id = state.step_id

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pools allocate when the first tokens are written."""

    # its bookkeeping is no matter of tensors, which a compiler would trace into
    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of this layer.

        Args:
            key_states: `[num_rows, num_kv_heads, q_len, head_dim]`.
            value_states: Likewise.
            args: Ignored; transformers versions pass different extras.
            kwargs: Ignored likewise.

        Returns:
            All keys and values, `[num_rows, num_kv_heads, kv_len, head_dim]`: lazy ones if there
            is a prefix, else views of the pool that are valid until the next forward.

        Raises:
            ValueError: If heads, dtype or rows differ from what the cache holds.
            ColdPoolFullError: If the pool may not grow; nothing has been written then.
        """
        state, layer_idx = self._state, self.layer_idx
        is_first = state.is_staged or self._step_id == state.step_id
        if not is_first and (ready := self.made_ready(key_states, value_states)) is not None:
            self.put(ready, key_states, value_states)
            return lazy_pair(ready.of_layer) if ready.given is None else ready.given
        stored, by_parts = state.prefixes.any, state.reads_inputs
        if stored is not None:
            state.is_generation_pending = False
            check_same_kind(key_states, stored.keys[layer_idx], "keys", layer_idx)
            check_same_kind(value_states, stored.values[layer_idx], "values", layer_idx)
        if stored is None and is_first:
            self._check_same_as_held(key_states, value_states)
        step = state.begin_step(key_states) if is_first else state.current_step()
        self._step_id = state.step_id
        state.cold.write(layer_idx, step.write, key_states, value_states)
        has_graph = needs_gradients(key_states, value_states)
        is_cut = has_graph and state.note_graph()
        if not by_parts and state.num_columns == step.plan.q_len:
            return key_states, value_states
        if has_graph:
            new = key_states, value_states
            keys, values = with_graph(self.private(), new, step.plan, is_cut=is_cut)
        elif not by_parts:
            keys, values = self.private()
        if not by_parts:
            if state.returns_contiguous:
                keys, values = keys.contiguous(), values.contiguous()
            return keys, values
        own = (
            PrivateTokens.of_tensors(keys, values)
            if has_graph
            else own_tokens(state, step, layer_idx)
        )
        of_layer = layer_step(state, step, layer_idx, own)
        if is_first and not torch.is_grad_enabled():
            make_ready(state, step, layer_idx)
        return lazy_pair(of_layer)

    def given(self) -> tuple[Tensor, Tensor]:
        """What `update` has given in the forward under way, if that goes by parts."""
        state, layer_idx = self._state, self.layer_idx
        step = state.current_step()
        return lazy_pair(layer_step(state, step, layer_idx, own_tokens(state, step, layer_idx)))

    def private(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows after their prefixes, `[num_rows, num_kv_heads, n, head_dim]`."""
        return self._state.cold.read(self.layer_idx)

    def made_ready(self, keys: Tensor, values: Tensor) -> ReadyLayer | None:
        """What was made ready for new tokens, once; whoever takes it stores them.

        Args:
            keys: As for `update`.
            values: Likewise.

        Returns:
            None if nothing was, as for the first layer of a forward, or not for these, or gradients are
            asked for: then `update` has to see to it.
        """
        state = self._state
        ready = state.ready_layer(self.layer_idx)
        if ready is None or torch.is_grad_enabled() or not ready.fits(keys, values):
            return None
        self._step_id = state.step_id
        return ready

    def put(self, ready: ReadyLayer, keys: Tensor, values: Tensor) -> None:
        """Stores the new tokens that a layer was made ready for."""
        if ready.places is None:
            state = self._state
            state.cold.write(self.layer_idx, state.current_step().write, keys, values)
        else:
            ready.places.put(keys, values)

    def _check_same_as_held(self, key_states: Tensor, value_states: Tensor) -> None:
        held = self._state.cold.storage(self.layer_idx)
        if held is not None:
            check_same_kind(key_states, held[0], "keys", self.layer_idx)
            check_same_kind(value_states, held[1], "values", self.layer_idx)

    def get_seq_length(self) -> int:
        """Columns held: of the prefix and since."""
        return self._state.seq_length(self._step_id)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the attention mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuses: all layers share their rows."""
        raise NotImplementedError("all layers share their rows; call reorder_cache on the cache.")

    def reset(self) -> None:
        """Refuses likewise."""
        raise NotImplementedError("all layers share their rows; call reset on the cache.")


def check_same_kind(states: Tensor, stored: Tensor, what: str, layer_idx: int) -> None:
    """Checks that new keys or values of a layer go with those in store.

    Args:
        states: `[num_rows, num_kv_heads, q_len, head_dim]`.
        stored: `[num_kv_heads, any, head_dim]`.
        what: Their name.
        layer_idx: The layer.

    Raises:
        ValueError: If heads or dtype differ.
    """
    got = (states.shape[1], states.shape[3], states.dtype)
    want = (stored.shape[0], stored.shape[2], stored.dtype)
    if got != want:
        raise ValueError(
            f"layer {layer_idx} brings {what} of {got[0]} heads x {got[1]} in {got[2]}, the cache "
            f"has {want[0]} heads x {want[1]} in {want[2]}; use the model that filled the cache."
        )
