"""The transformers `Cache` contract over the two pools."""

import sys
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_granikv.accounting import stats_of
from hf_granikv.announce import attach_hook, forward_parameters, transformers_model
from hf_granikv.config import CacheOptions
from hf_granikv.cut_prompts import CutPrompt, is_asked_by_generate
from hf_granikv.in_process import InProcessCache
from hf_granikv.inputs import read_forward, read_generation
from hf_granikv.known_models import KnownModels
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.prefix_inputs import (
    check_chunk_size,
    check_is_deterministic,
    embedded,
    one_row_of_ids,
)
from hf_granikv.recording import record
from hf_granikv.recurrent import build_layers
from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats


class AsymmetricPagedCache(InProcessCache):
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

    _cut_prompt: CutPrompt | None

    def __init__(
        self, config: PreTrainedConfig, *, dispatch: str = "auto", cold_slots: int | None = None
    ) -> None:
        options = CacheOptions(dispatch=dispatch, cold_slots=cold_slots)
        self._served = ServedModel.from_config(config)
        self._models = KnownModels()
        self._adopt(CacheState(self._served.layers, options, HotPool()))

    def prefill(
        self, model: nn.Module, input_ids: Tensor, *, chunk_size: int | None = None
    ) -> Prefix:
        """Computes a prefix and stores it for all rows to come.

        Args:
            model: The model that will generate.
            input_ids: `[1, prefix_len]` token ids; `[prefix_len]` is taken as well.
            chunk_size: The most tokens of one forward pass, which bounds the memory that activations
                take; None computes the prefix in one piece.

        Raises:
            ValueError: If the ids are not one row of at least one token, the model does not go with
                the config of the cache, the cache holds a prefix or rows already, or `chunk_size`
                is no positive number.
        """
        state, ids = self._state, one_row_of_ids(input_ids)
        check_chunk_size(chunk_size)
        state.check_takes_prefix()
        inner = self.attach(model)
        check_is_deterministic(inner)
        self._served.check_length(ids.shape[1], ids.shape[1])
        self._models.start(inner)
        prefix = state.hot.seal(ids[0], *record(inner, ids, self._served.layers, chunk_size))
        state.hold(prefix)
        state.release_rows()
        return prefix

    def attach(self, model: nn.Module) -> PreTrainedModel:
        """Lets another object with the weights of the prefix use the cache.

        Every element is compared with the model that computed the prefix. `prefill` needs no
        comparison for the model it is given, and forgets all others.

        Returns:
            The transformers model inside `model`.

        Raises:
            ValueError: If the model does not go with the config of the cache.
            StalePrefixError: If anything in it differs from the model of the prefix, or that one is
                gone or has changed.
        """
        inner = transformers_model(model)
        self._served.check_same(ServedModel.from_config(inner.config), type(inner).__name__)
        if self._state.prefix is not None:
            self._models.admit(inner)
        attach_hook(inner)
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

    def invalidate(self) -> None:
        """Drops the prefix, if any, and all rows; right after, `prefill` may be called.

        For loops that change weights between generations. Costs nothing but the release of memory;
        forks keep what they hold.
        """
        if self._state.prefix is not None:
            self._state.let_go()
        self._state.release_rows()

    def fork(self) -> "AsymmetricPagedCache":
        """An independent cache in the same state that shares every byte of the prefix."""
        twin = type(self).__new__(type(self))
        twin._served, twin._models = self._served, self._models.copy()
        twin._adopt(self._state.fork())
        twin._state.row_states.copy_from(self._state.row_states)
        return twin

    def announce(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Reads the arguments of a coming forward pass; called by the hook on the model.

        Args:
            module: The model.
            kwargs: The arguments of its forward.

        Returns:
            The arguments to run with; None to leave them alone.

        Raises:
            ValueError: If they mean nothing right; the cache is as it was.
            StalePrefixError: If the model has changed since it computed the prefix; likewise.
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
        held, cut, self._cut_prompt = state.held_rows(), self._cut_prompt, None
        if cut is not None and not cut.is_continued_by(kwargs, held, is_generation):
            cut = None
        if cut is not None:
            layout, kwargs = cut.send(kwargs, held)
        elif is_generation:
            embeds = embedded(module, prefix.token_ids, like=kwargs.get("inputs_embeds"))
            layout, kwargs = read_generation(kwargs, prefix.token_ids.numpy(), held, embeds)
        else:
            layout, kwargs = read_forward(kwargs, held)
        if is_generation or layout.starts_batch:
            self._models.check(module)
        positions = kwargs.get("position_ids")
        if positions is not None and self._served.has_length_limit:
            self._served.check_length(prefix.num_tokens, int(positions.max()) + 1)
        if not takes_positions:
            kwargs.pop("position_ids", None)
        if layout.dense_reason is None and (mask := kwargs.get("attention_mask")) is not None:
            self._served.check_padding(mask.shape[-1], takes_positions=takes_positions)
        self._served.check_reach(prefix, layout.shared_len)
        state.stage(layout)
        self._cut_prompt = cut
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
        if self._state.is_generation_pending:
            caller = sys._getframe(1)
            if is_asked_by_generate(caller):
                return self._first_column(caller)
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

    def _first_column(self, caller: FrameType) -> int:
        # 0, so that prompts arrive whole; where they are cut, the columns that need not be sent
        cut, state = self._cut_prompt, self._state
        if cut is not None and cut.note_chunks(caller):
            return cut.first_column
        self._cut_prompt = None
        model: Any = caller.f_locals.get("self")
        if state.prefix is None or model not in self._models:
            return 0
        cut = CutPrompt.read(caller, state.prefix.token_ids.numpy(), state.held_rows())
        if cut is None:
            return 0
        # later chunks must not fail on what is known now
        self._served.check_length(state.prefix.num_tokens, cut.seq_len)
        state.cold.check_room(int(cut.layout.owned.sum()), replacing=cut.layout.starts_batch)
        self._cut_prompt = cut
        return cut.first_column

    def _adopt(self, state: CacheState) -> None:
        self._state = state
        self._cut_prompt = None
        super().__init__(layers=build_layers(state))
