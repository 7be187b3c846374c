"""The transformers `Cache` contract over the two pools."""

import sys
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_granikv.accounting import stats_of
from hf_granikv.announce import attach_hook, forward_parameters, transformers_model
from hf_granikv.config import CacheOptions
from hf_granikv.inputs import read_forward, read_generation
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.recording import record
from hf_granikv.recurrent import build_layers
from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats

_ID_DTYPES = (torch.int32, torch.int64)


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
        self._served = ServedModel.from_config(config)
        self._models: WeakSet[nn.Module] = WeakSet()
        self._adopt(CacheState(self._served.layers, options, HotPool()))

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
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.dtype not in _ID_DTYPES:
            raise ValueError(
                f"input_ids of a prefix is {tuple(ids.shape)} {ids.dtype}; give one row of token "
                "ids, [1, prefix_len], without padding."
            )
        if state.prefix is not None or state.num_rows:
            held = f"{state.num_rows} rows already; call cache.reset() first"
            if state.prefix is not None:
                held = "a prefix already; call cache.release(prefix) first"
            raise ValueError(f"the cache holds {held}, or build another cache.")
        inner = self.attach(model)
        if inner.training and _has_dropout(inner):
            raise ValueError(
                f"{type(inner).__name__} is in training mode and has dropout, which would be stored "
                "with the prefix; call model.eval() first."
            )
        self._served.check_length(ids.shape[1], ids.shape[1])
        ids = ids.to(next(inner.get_input_embeddings().parameters()).device)
        prefix = state.hot.seal(ids[0], *record(inner, ids, self._served.layers))
        state.hold(prefix)
        state.release_rows()
        return prefix

    def attach(self, model: nn.Module) -> PreTrainedModel:
        """Lets another object with the weights of the prefix use the cache.

        `prefill` does this for the model it is given.

        Returns:
            The transformers model inside `model`.

        Raises:
            ValueError: If the model does not go with the config of the cache.
        """
        inner = transformers_model(model)
        takes_dynamic = getattr(inner, "_supports_default_dynamic_cache", None)
        if takes_dynamic is not None and not takes_dynamic():
            raise ValueError(
                f"{type(inner).__name__} keeps a cache of its own kind; it cannot be served."
            )
        for known in self._models:
            if known is not inner and (inner in known.modules() or known in inner.modules()):
                raise ValueError(
                    f"{type(inner).__name__} and {type(known).__name__}, which this cache knows, "
                    "contain each other; use the one that was attached first."
                )
        self._served.check_same(ServedModel.from_config(inner.config), type(inner).__name__)
        attach_hook(inner)
        self._models.add(inner)
        return inner

    def release(self, prefix: Prefix) -> None:
        """Drops the caller's hold of a prefix, and the rows that start from it.

        Raises:
            ValueError: If the cache does not hold this prefix.
        """
        state = self._state
        if prefix is not state.prefix:
            raise ValueError(f"this cache does not hold {prefix}; release a prefix it prefilled.")
        state.let_go()

    def fork(self) -> "AsymmetricPagedCache":
        """An independent cache in the same state that shares every byte of the prefix."""
        twin = type(self).__new__(type(self))
        twin._served, twin._models = self._served, WeakSet(self._models)
        twin._adopt(self._state.fork())
        twin._state.row_states.copy_from(self._state.row_states)
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
        if prefix is None or module not in self._models:
            return None
        state.settle()
        takes_positions = "position_ids" in forward_parameters(module)
        # a call that generate gave up before its first forward leaves its mark; generate always
        # counts positions
        is_generation = state.is_generation_pending and (
            not takes_positions or kwargs.get("position_ids") is not None
        )
        state.is_generation_pending = False
        if kwargs.get("use_cache") is False:
            raise ValueError(
                "use_cache=False was given together with a cache that holds a prefix; leave one of "
                "them out."
            )
        held = state.held_rows()
        if is_generation:
            embeds = None
            if kwargs.get("inputs_embeds") is not None:
                embed: Any = module.get_input_embeddings()  # type: ignore[operator]
                device = kwargs["inputs_embeds"].device
                embeds = embed(prefix.token_ids.to(device)).detach()
            layout, kwargs = read_generation(
                kwargs, prefix.token_ids.numpy(), held, embeds, starts=prefix.states
            )
        else:
            layout, kwargs = read_forward(kwargs, held)
        positions = kwargs.get("position_ids")
        if positions is not None and self._served.rope_type is not None:
            self._served.check_length(prefix.num_tokens, int(positions.max()) + 1)
        if not takes_positions:
            kwargs.pop("position_ids", None)
        if layout.dense_reason is None:
            mask = kwargs.get("attention_mask")
            self._served.check_padding(mask, takes_positions=takes_positions)
        self._served.check_reach(prefix, layout.shared_len)
        state.stage(layout)
        return kwargs

    def settle(self, *, is_complete: bool = False) -> None:
        """Undoes what is left of a forward pass that broke off; called by the hook on the model."""
        self._state.settle(is_complete=is_complete)

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
        if self._state.is_generation_pending and _is_asked_by_generate():
            return 0
        return super().get_seq_length(layer_idx)

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
            ValueError: If it is positive, or the rest needs tokens of the prefix that no window
                could see when it was stored, or some layer keeps a state that has read them.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding may hand over a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not possible; give minus the number of tokens to "
                "remove."
            )
        if tokens_to_remove:
            self._served.check_can_take_back(f"crop({tokens_to_remove})")
        state = self._state
        if state.prefix is not None:
            kept = state.shared_len + min(0, state.num_columns + tokens_to_remove)
            self._served.check_reach(state.prefix, kept)
        state.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Asked by assisted decoding, which will crop; refused where that is not possible."""
        self._served.check_can_take_back("assisted decoding")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i the former row `beam_idx[i]`; slots are shared, nothing is copied."""
        self._state.select_rows(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (or those marked True), in that order."""
        chosen, num_rows = torch.as_tensor(indices).cpu(), self._state.num_rows
        if chosen.dtype == torch.bool:
            if num_rows and len(chosen) != num_rows:
                raise ValueError(f"{len(chosen)} rows were marked, the cache holds {num_rows}.")
            chosen = chosen.nonzero()[:, 0]
        self._state.select_rows(chosen.numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row; the copies share their slots."""
        self._state.select_rows(np.repeat(np.arange(self._state.num_rows), repeats))

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return self._state.num_rows or -1

    def stats(self) -> CacheStats:
        """What is held now, in tokens and in bytes of real storages."""
        return stats_of(self._state)

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
        self._state.row_states.check_integrity(self._state.num_rows)

    def _adopt(self, state: CacheState) -> None:
        self._state = state
        super().__init__(layers=build_layers(state))


def _has_dropout(model: nn.Module) -> bool:
    named = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    in_attention = any(getattr(model.config, name, 0) for name in named)
    return bool(in_attention) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def _is_asked_by_generate() -> bool:
    # transformers may still refuse the call it has marked the cache for; then nobody but generate
    # may be told that the cache is empty
    return sys._getframe(2).f_globals.get("__name__") == "transformers.generation.utils"
