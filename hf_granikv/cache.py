"""The transformers `Cache` contract over the two pools."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_granikv.accounting import CacheStats, described, stats_of
from hf_granikv.batch_rows import ParkedRow
from hf_granikv.config import CacheOptions
from hf_granikv.cut_prompts import counts_positions_itself, is_asked_by_generate
from hf_granikv.engine_use import EngineUse, between_steps
from hf_granikv.forward_reader import ForwardReader
from hf_granikv.known_models import KnownModels
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.lookup import PrefixLookup
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.prefix_inputs import (
    check_chunk_size,
    check_extends,
    check_in_vocabulary,
    check_is_deterministic,
    check_salt,
    one_row_of_ids,
    rows_of_ids,
    salts_of,
)
from hf_granikv.prefix_making import check_is_kept, recording_of, sealed
from hf_granikv.recording import Recording, record
from hf_granikv.recurrent import build_layers
from hf_granikv.saved_prefixes import LoadingCache
from hf_granikv.state import CacheState


class AsymmetricPagedCache(LoadingCache):
    """A cache whose prefix is stored once for all rows, and whose private tokens one by one.

    ```
    HOT   [ prefix, read by every row            ]
    COLD      row 0 [ suffix ]   row 1 [ suffix ......]   row 2 [ . ]
    ```

    With a prefix (`prefill`), each `generate` call starts every row from it and first releases the
    rows of the call before, unless its mask takes them for granted. Without one it is a drop-in for
    `DynamicCache`. What is stored is constant: a backward reaches the tokens of its own forward alone.

    Prefixes and models may come and go on any thread while an engine runs over the cache, between its
    steps. Forward passes with the cache itself are refused then, but inside `Engine.paused`.

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
        self, config: PreTrainedConfig, *, dispatch: str = "auto", cold_slots: int | None = None
    ) -> None:
        options = CacheOptions(dispatch=dispatch, cold_slots=cold_slots)
        self._served = ServedModel.from_config(config)
        self._models = KnownModels()
        self._adopt(CacheState(self._served.layers, options, HotPool()))

    @between_steps
    def prefill(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        parent: Prefix | None = None,
        salt: str | None = None,
        chunk_size: int | None = None,
    ) -> Prefix:
        """Computes a prefix and stores it for all rows to come.

        A cache with one prefix serves every row from it; with several, `bind` says who reads which.
        The same ids are computed and stored once: a second call holds what is there.

        Args:
            model: The model that will generate.
            input_ids: `[1, prefix_len]` token ids; `[prefix_len]` is taken as well.
            parent: A prefix of this cache that the ids come after; it is read, not copied.
            salt: A word that keeps equal prefixes apart, of two tenants, say: only rows bound under
                it find the prefix. A parent's goes for its children.
            chunk_size: The most tokens of one forward pass, which bounds the memory that activations
                take; None computes the prefix in one piece.

        Raises:
            ValueError: If the ids are not one row of at least one token that the model knows, it does not go with
                the config of the cache or, as the first prefix, with an engine that runs over it,
                the cache does not hold the parent, it holds rows that started without any prefix,
                or `chunk_size` is no positive number.
            StalePrefixError: If the cache holds prefixes that another model has computed.
        """
        state, ids = self._state, one_row_of_ids(input_ids)
        check_chunk_size(chunk_size)
        check_extends(parent, state.prefixes.levels, ids.shape[1])
        salt = check_salt(salt, parent)
        state.prefixes.check_takes(state.num_rows)
        inner = self.attach(model)
        check_in_vocabulary(ids, inner)
        check_is_deterministic(inner)
        start = 0 if parent is None else parent.stop
        self._served.check_length(start + ids.shape[1], start + ids.shape[1])
        found = PrefixLookup(state.prefixes.all).get(parent, salt, ids[0].cpu().numpy())
        if found is not None:
            state.hot.acquire(found)
        else:
            extended = None if parent is None else self.reading_alone(parent)
            recording = record(inner, ids, self._served.layers, chunk_size, extended, start)
            found = self._sealed(ids[0], recording, parent, salt)
        state.prefixes.take(found)
        return found

    @between_steps
    def promote(self, parked: ParkedRow, token_ids: Tensor) -> Prefix:
        """Makes the first private tokens of a row a prefix that others can read; computes nothing.

        Args:
            parked: The row, from `LiveRows.park` or `cache.rows.park`.
            token_ids: `[num_tokens]` the ids of those tokens; the cache has no way to check them.

        Raises:
            ValueError: If the row has fewer tokens, does not see its whole prefix, the cache does not
                hold that one or has other heads or another dtype, no model is attached to it, or
                layers keep states.
            StalePrefixError: If the row is older than the last `invalidate`.
        """
        ids, state = one_row_of_ids(token_ids), self._state
        state.prefixes.check_takes(state.num_rows)
        check_extends(parked.prefix, state.prefixes.levels, ids.shape[1])
        check_is_kept(parked, state, knows_a_model=any(True for _ in self._models))
        salt = check_salt(None, parked.prefix)
        found = PrefixLookup(state.prefixes.all).get(parked.prefix, salt, ids[0].cpu().numpy())
        if found is not None:
            state.hot.acquire(found)
        else:
            kept = recording_of(parked, ids.shape[1], state.layers)
            found = self._sealed(ids[0], kept, parked.prefix, salt)
        state.prefixes.take(found)
        return found

    @between_steps
    def bind(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        salt: str | Sequence[str | None] | None = None,
    ) -> "AsymmetricPagedCache":
        """Says which prefixes the rows of the next batches read: each the longest it starts with.

        A row that starts with none stays private. Samples and beams of a row read what it reads. The
        binding goes for every batch until the next `bind`.

        Args:
            input_ids: `[num_rows, num_columns]` whole prompts, as `generate` will get them.
            attention_mask: `[num_rows, num_columns]`, 0 for pads; None if there are none.
            salt: The salt of the prefixes that may be read, of all rows or of each.

        Returns:
            This cache, for `model.generate(**prompts, cache=cache.bind(**prompts))`.

        Raises:
            ValueError: If the shapes differ, no prefix is held, or rows of layers with states would not all
                read the same.
        """
        rows = rows_of_ids(input_ids, attention_mask)
        salts = salts_of(salt, len(rows))
        if not self._state.prefixes:
            raise ValueError(
                "the cache holds no prefix that rows could be bound to; call cache.prefill first. Without "
                "prefixes there is nothing to bind: leave it out, and rows go on as over a DynamicCache."
            )
        lookup = PrefixLookup(self._state.prefixes.all)
        leaves = lookup.leaves(rows, salts)
        self._served.check_together(leaves)
        self._state.prefixes.bind(leaves)
        if not self._state.journal.has_warned and (why := lookup.why_less(rows, salts, leaves)):
            self._state.journal.warn_unshared(why)
        return self

    @between_steps
    def release(self, prefix: Prefix) -> None:
        """Drops the caller's hold of a prefix, and the rows that read what is gone then.

        A prefix stays as long as another one extends it.

        Raises:
            ValueError: If the cache does not hold this prefix.
        """
        self._state.let_go(prefix)

    @between_steps
    def invalidate(self) -> None:
        """Drops all prefixes and all rows, for loops that change weights between generations.

        Costs nothing but the release of memory; right after, `prefill` may be called. Forks keep what
        they hold. None of these prefixes can be saved any more.
        """
        self._models.doubt()
        self._state.let_all_go()

    @between_steps
    def fork(self) -> "AsymmetricPagedCache":
        """An independent cache in the same state that shares every byte of the prefix."""
        twin = self._twin(self._state.fork())
        twin.rows.row_states.copy_from(self._state.row_states)
        return twin

    def announce(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Reads the arguments of a coming forward pass (`ForwardReader`); called by the model's hook."""
        self.engines.check_is_paused()
        try:
            return self._reader.read(module, kwargs)
        finally:
            self.goes_straight = self._reader.goes_straight

    def settle(self, *, is_complete: bool = False) -> None:
        """Undoes what is left of a forward pass that broke off; called by the hook on the model."""
        if self._reader.owner.leave():
            self._state.settle(is_complete=is_complete)

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # generate marks the cache right before it runs: until its first forward that looks empty, so
        # that prompts arrive whole and can be checked
        self._state.is_generation_pending = bool(self._state.prefixes)
        self._reader.owner.mark()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held: of the prefix and since."""
        caller = sys._getframe(1)
        if self._state.prefixes and counts_positions_itself(caller):
            return 0
        if self._state.is_generation_pending and is_asked_by_generate(caller):
            return self._reader.first_column(caller)
        return super().get_seq_length(layer_idx)

    @property
    def rows(self) -> CacheState:
        """The rows that are held; see `LiveRows` for rows that come and go."""
        return self._state

    def stats(self) -> CacheStats:
        """What is held now, in tokens and in bytes of real storages."""
        return stats_of(self._state)

    def explain(self) -> str:
        """Which path ran how often, on what reckoning, and why others were refused."""
        head = f"{described(self._state)}, dispatch={self._state.options.dispatch!r}"
        return "\n".join([head, *self._state.journal.lines()])

    def time_groups(self, is_wanted: bool = True) -> None:
        """Lets `explain` show measured times on accelerators too: two events per group and step.

        On a CPU groups are always timed, in the first layer of each step.
        """
        self._state.journal.times_accelerators = is_wanted

    def check_integrity(self) -> None:
        """Checks both pools.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        self._state.hot.check_integrity()
        self._state.check_integrity()

    def _sealed(
        self, ids: Tensor, recording: Recording, parent: Prefix | None, salt: str | None
    ) -> Prefix:
        state, heads = self._state, self._served.num_q_heads
        return sealed(
            state, ids, recording, parent=parent, salt=salt, saver=self._saver, num_q_heads=heads
        )

    def reading_alone(self, prefix: Prefix | None) -> "AsymmetricPagedCache":
        """A cache of one row that is about to go on from a prefix; nothing limits its tokens."""
        twin = self._twin(self._state.fork(keeps_rows=False))
        twin._state.prefixes.bind([prefix])
        twin._state.cold.limit = None
        return twin

    def _twin(self, state: CacheState) -> "AsymmetricPagedCache":
        twin = type(self).__new__(type(self))
        twin._served, twin._models = self._served, self._models.copy()
        twin._adopt(state)
        return twin

    def _adopt(self, state: CacheState) -> None:
        self._state, self.engines = state, EngineUse()
        state.returns_contiguous = self._served.views_keys
        self._reader = ForwardReader(state, self._served, self._models)
        super().__init__(layers=build_layers(state))
