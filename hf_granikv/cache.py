"""The transformers `Cache` contract over the two pools."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
)

from hf_granikv.announce import attach_hook, forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.config import CacheOptions
from hf_granikv.inputs import read_forward, read_generation
from hf_granikv.lazy import LazyKeyValue
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats, LayerStep


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
        prefix = state.prefix
        if prefix is not None:
            _check_same_kind(key_states, prefix.keys[layer_idx], "keys", layer_idx)
            _check_same_kind(value_states, prefix.values[layer_idx], "values", layer_idx)
        is_first = state.is_staged or self._step_id == state.step_id
        step = state.begin_step(key_states) if is_first else state.current_step()
        self._step_id = state.step_id
        state.write(layer_idx, key_states, value_states)
        if prefix is None:
            if state.num_columns == step.plan.q_len:
                return key_states, value_states
            return state.cold.read(layer_idx)
        keys, values = prefix.keys[layer_idx], prefix.values[layer_idx]
        if state.shared_len < prefix.num_tokens:
            keys, values = keys[:, : state.shared_len], values[:, : state.shared_len]
        layer_step = LayerStep(layer_idx, step.plan, keys, values, *state.cold.read(layer_idx))
        return LazyKeyValue(layer_step, is_value=False), LazyKeyValue(layer_step, is_value=True)

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


class AsymmetricPagedCache(Cache):
    """A cache whose prefix is stored once for all rows, and whose private tokens one by one.

    ```
    HOT   [ prefix, read by every row            ]
    COLD      row 0 [ suffix ]   row 1 [ suffix ......]   row 2 [ . ]
    ```

    With a prefix (`prefill`), each `generate` call starts every row from it and first releases the
    rows of the call before, unless its mask takes them for granted. Without one it is a drop-in for
    `DynamicCache`. Keys and values are detached: nothing flows back through the cache.

    Source: our reading of GraniKV's HOT/COLD storage (its abstract is public, no more).

    Args:
        config: The model's config.
        dispatch: `"auto"`, or the backend that must run the prefix part: `"cascade"`,
            `"batched_gemm"`, `"per_row"`.
        cold_slots: The most private tokens the cache may hold, over all rows; None = no limit.

    Raises:
        ValueError: If an option is unknown, or the model has layers that cannot be served.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dispatch: str = "auto",
        cold_slots: int | None = None,
    ) -> None:
        options = CacheOptions(dispatch=dispatch, cold_slots=cold_slots)
        num_layers = _num_servable_layers(config)
        self._column_window = _column_window(config)
        self._adopt(CacheState(num_layers, options, HotPool()), num_layers)

    def prefill(self, model: nn.Module, input_ids: Tensor) -> Prefix:
        """Computes a prefix and stores it for all rows to come.

        Args:
            model: The model that will generate.
            input_ids: `[1, prefix_len]` token ids; `[prefix_len]` is taken as well.

        Raises:
            ValueError: If the ids are not one row of at least one token, the model does not go with
                the config of the cache, or the cache holds a prefix or rows already.
        """
        state, ids = self._state, torch.as_tensor(input_ids)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.is_floating_point():
            raise ValueError(
                f"input_ids of a prefix is {tuple(ids.shape)} {ids.dtype}; give one row of token "
                "ids, [1, prefix_len], without padding."
            )
        if state.prefix is not None or state.num_rows:
            held = "a prefix" if state.prefix is not None else f"{state.num_rows} rows"
            raise ValueError(
                f"the cache holds {held} already; call cache.release(prefix) or cache.reset() "
                "first, or build another cache."
            )
        inner = self.attach(model)
        ids = ids.to(inner.get_input_embeddings().weight.device)
        recorder = DynamicCache(config=inner.config.get_text_config(decoder=True))
        with torch.no_grad():
            inner.base_model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: recorder})
        if recorder.get_seq_length() != ids.shape[1]:
            raise ValueError(
                f"{type(inner).__name__} does not keep its keys and values in the cache it is "
                "given; it cannot be served."
            )
        pairs = [(layer.keys[0], layer.values[0]) for layer in recorder.layers]
        state.prefix = state.hot.seal(ids[0], pairs)
        state.release_rows()
        return state.prefix

    def attach(self, model: nn.Module) -> PreTrainedModel:
        """Lets another object with the weights of the prefix use the cache.

        `prefill` does this for the model it is given.

        Returns:
            The transformers model inside `model`.

        Raises:
            ValueError: If the model does not go with the config of the cache.
        """
        inner = attach_hook(model)
        num_layers = inner.config.get_text_config(decoder=True).num_hidden_layers
        if num_layers != len(self.layers):
            raise ValueError(
                f"{type(inner).__name__} has {num_layers} layers, the cache was built for "
                f"{len(self.layers)}; build the cache from model.config."
            )
        return inner

    def release(self, prefix: Prefix) -> None:
        """Drops the caller's hold of a prefix, and the rows that start from it.

        Raises:
            ValueError: If the cache does not hold this prefix.
        """
        state = self._state
        if prefix is not state.prefix:
            raise ValueError(f"this cache does not hold {prefix}; release a prefix it prefilled.")
        state.prefix = None
        state.release_rows()
        state.hot.release(prefix)

    def fork(self) -> "AsymmetricPagedCache":
        """An independent cache in the same state that shares every byte of the prefix."""
        twin = type(self).__new__(type(self))
        twin._column_window = self._column_window
        twin._adopt(self._state.fork(), len(self.layers))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "AsymmetricPagedCache":
        return self.fork()

    def announce(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Reads the arguments of a coming forward pass; called by the hook on the model.

        Args:
            module: The model.
            kwargs: The arguments of its forward.

        Returns:
            The arguments to run with; None to leave them alone.

        Raises:
            ValueError: If they mean nothing right; the cache is as it was.
        """
        state, prefix = self._state, self._state.prefix
        if prefix is None:
            return None
        is_generation, state.is_generation_pending = state.is_generation_pending, False
        if kwargs.get("use_cache") is False:
            raise ValueError(
                "use_cache=False was given together with a cache that holds a prefix; leave one of "
                "them out."
            )
        held = state.held_rows()
        if is_generation:
            layout, kwargs = read_generation(kwargs, prefix.token_ids.numpy(), held)
        else:
            layout, kwargs = read_forward(kwargs, held)
        if "position_ids" not in forward_parameters(type(module)):
            kwargs.pop("position_ids", None)
        mask = kwargs.get("attention_mask")
        if self._column_window is not None and mask is not None:
            if mask.shape[-1] > self._column_window:
                raise ValueError(
                    f"the local attention of this model counts {self._column_window} mask columns, "
                    f"pads among them; {mask.shape[-1]} padded columns cannot be right. Run rows "
                    "of equal length, or one at a time."
                )
        state.stage(layout)
        return kwargs

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # generate marks every cache it is handed, right before it runs: from here to its first
        # forward the cache looks empty, so that prompts arrive whole and can be checked
        self._state.is_generation_pending = self._state.prefix is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held: of the prefix and since."""
        if self._state.is_generation_pending:
            return 0
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def reset(self) -> None:
        """Releases all rows and their memory; a prefix stays."""
        self._state.release_rows()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns of every row away.

        A crop into the prefix shortens what the rows of this cache see of it, until the next
        `reset` or `generate`; the stored prefix and its other readers are not touched.

        Args:
            tokens_to_remove: 0 or negative: minus the number of columns.

        Raises:
            ValueError: If it is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not possible; give minus the number of tokens to "
                "remove."
            )
        self._state.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i the former row `beam_idx[i]`; slots are shared, nothing is copied."""
        self._state.select_rows(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (or those marked True), in that order."""
        chosen = torch.as_tensor(indices).cpu()
        self._state.select_rows(
            (chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen).numpy()
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row; the copies share their slots."""
        self._state.select_rows(np.repeat(np.arange(self._state.num_rows), repeats))

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return self._state.num_rows or -1

    def stats(self) -> CacheStats:
        """What is held now, in tokens and in bytes of real storages."""
        return self._state.stats()

    def explain(self) -> str:
        """Which path ran how often, on what reckoning, and why others were refused."""
        state = self._state
        shared = "no prefix" if state.prefix is None else f"a prefix of {state.shared_len} tokens"
        head = f"{state.num_rows} rows over {shared}, dispatch={state.options.dispatch!r}"
        return "\n".join([head, *state.journal.lines()])

    def check_integrity(self) -> None:
        """Checks both pools.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        self._state.hot.check_integrity()
        self._state.cold.check_integrity()

    def _adopt(self, state: CacheState, num_layers: int) -> None:
        self._state = state
        super().__init__(layers=[AsymmetricPagedLayer(i, state) for i in range(num_layers)])


def _check_same_kind(states: Tensor, stored: Tensor, what: str, layer_idx: int) -> None:
    got = (states.shape[1], states.shape[3], states.dtype)
    want = (stored.shape[0], stored.shape[2], stored.dtype)
    if got != want:
        raise ValueError(
            f"layer {layer_idx} brings {what} of {got[0]} heads x {got[1]} in {got[2]}, the prefix "
            f"has {want[0]} heads x {want[1]} in {want[2]}; use the model that prefilled the cache."
        )


def _num_servable_layers(config: PreTrainedConfig) -> int:
    if config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not served; use EncoderDecoderCache.")
    decoder_config = config.get_text_config(decoder=True)
    layers = DynamicCache(config=decoder_config).layers
    for layer_idx, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {layer_idx} of {decoder_config.model_type} is of kind "
                f"{_layer_kind(decoder_config, layer_idx, layer)}; this cache serves full_attention "
                "layers only. Use DynamicCache for this model."
            )
    return len(layers)


def _layer_kind(config: PreTrainedConfig, layer_idx: int, layer: object) -> str:
    named = getattr(config, "layer_types", None)
    if named:
        return str(named[layer_idx])
    kinds = [kind for kind, cls in DYNAMIC_LAYER_TYPE_MAPPING.items() if cls is type(layer)]
    return " or ".join(kinds) or type(layer).__name__


def _column_window(config: PreTrainedConfig) -> int | None:
    # GPT-Neo's local layers mask by column, inside the model
    has_local = "local" in (getattr(config, "attention_layers", None) or [])
    return config.window_size if has_local else None
