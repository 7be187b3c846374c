"""Rows that come and go between forward passes, each taking as many tokens as it likes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_granikv.announce import device_of_ids, forward_parameters
from hf_granikv.batch_rows import ParkedRow
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.errors import ColdPoolFullError, NotPackableError
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.packed import PackedCache, Segment, why_not_packable
from hf_granikv.pools import Prefix

logger = logging.getLogger(__name__)


class Row:
    """A row of `LiveRows`; two are the same if they are one object."""

    __slots__ = ("_alone",)

    def __init__(self, alone: AsymmetricPagedCache) -> None:
        # the cache that holds this row and no other; None while it is in the common batch
        self._alone: AsymmetricPagedCache | None = alone


class LiveRows:
    """The rows of a living batch, over the prefixes of one cache.

    ```
    common batch   row 0, row 1, row 2 ...    one token each, in one cache: prefixes are read once
    by itself      row 7                      a newcomer with a chunk of its prompt
    ```

    A step is one forward over the new tokens of all, side by side, without pads. Models that cannot
    run so (`why_not_packed`) get one for the common batch and one for each other row, or for each row.

    Args:
        model: The model; its prefixes were computed with it.
        cache: Holds the prefixes. Its own rows are not touched.
        max_slots: The most private tokens, where that is less than the `cold_slots` of the cache.

    Raises:
        StalePrefixError: If the model is not that of the prefixes.

    Attributes:
        num_slots_limit: The most private tokens; None for no limit.
        why_not_packed: Why steps take several forwards; None if they take one.
    """

    def __init__(
        self, model: nn.Module, cache: AsymmetricPagedCache, *, max_slots: int | None = None
    ) -> None:
        self._model: Any = cache.attach(model)
        self._prefixes = cache
        served = ServedModel.from_config(self._model.config)
        self.why_not_packed = why_not_packable(self._model, served)
        self._has_states = served.has_states
        self._needs_rows_apart = served.has_states or served.rope_type is not None
        self._merged: list[Row] = []
        self._alone: list[Row] = []
        # rows know what they read; the caller's holds are not this batch's
        self._common = cache.reading_alone(None)
        self._common.rows.prefixes.let_all_go()
        limits = [n for n in (max_slots, cache.rows.options.cold_slots) if n is not None]
        self.num_slots_limit = min(limits, default=None)
        self._open(self._common)

    @property
    def num_slots_used(self) -> int:
        """Private tokens of all rows."""
        return sum(self._cache_of(row).rows.cold.num_tokens for row in (*self._alone, None))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values; 0 as long as no row has stored any."""
        return max(self._cache_of(row).rows.cold.bytes_per_token for row in (*self._alone, None))

    @property
    def num_bytes(self) -> int:
        """Bytes of what rows hold of their own, free slots and tables included."""
        return sum(self._cache_of(row).rows.private_bytes for row in (*self._alone, None))

    @property
    def backend_steps(self) -> dict[str, int]:
        """How many steps of a batch each backend has run."""
        return dict(self._common.rows.journal.backend_steps)

    def num_tokens(self, row: Row) -> int:
        """Private tokens of a row."""
        state, index = self._place(row)
        return int(state.cold.table.lengths[index]) if state.num_rows else 0

    def start(self, prefix: Prefix | None, parked: ParkedRow | None = None) -> Row:
        """Adds a row.

        Args:
            prefix: The last prefix of the chain that it reads.
            parked: What it holds already, from `park`; it reads the chain that this row read.

        Raises:
            ColdPoolFullError: If there is no room for what it holds; nothing has changed.
            ValueError: If the prefix is not held, or is not the one of the parked row.
            StalePrefixError: If the model has changed since, or the row is older than `invalidate`.
        """
        if prefix is not None and prefix not in self._prefixes.rows.prefixes.levels:
            raise ValueError(f"{prefix} is not held; prefill it in the cache of these rows first.")
        if parked is not None and parked.prefix is not prefix:
            raise ValueError(f"the parked row reads {parked.prefix}, {prefix} was given.")
        alone = self._open(self._prefixes.reading_alone(prefix))
        if parked is not None and (parked.num_tokens or parked.sees_less):
            self._check_room(parked.num_tokens)
            # what it holds was computed by the model as it was then
            self._prefixes.attach(self._model)
            alone.rows.join(parked)
        row = Row(alone)
        self._alone.append(row)
        return row

    def forward(self, feeds: Mapping[Row, Sequence[int]]) -> dict[Row, Tensor]:
        """Runs one step: each row given takes its tokens, others are left alone.

        Args:
            feeds: Token ids per row, at least one each; by preference one for rows that decode.

        Returns:
            Per row, `[vocab_size]` logits after its last token.

        Raises:
            ColdPoolFullError: If there is no room for the tokens; nothing has changed.
            ValueError: If a row is given no token.
            TornStateError: If a forward failed before that had changed states of a row; drop it. Any
                other error of the model leaves rows without states as they were.
        """
        if empty := [row for row, ids in feeds.items() if not len(ids)]:
            raise ValueError(f"{len(empty)} rows were given no token; leave them out.")
        self._check_room(sum(map(len, feeds.values())))
        while True:
            batches = self._arranged(feeds)
            segments = [
                Segment(self._cache_of(rows[0]), self._ids(rows, feeds)) for rows in batches
            ]
            try:
                logits = self._run(segments)
            except NotPackableError as error:
                if self.why_not_packed is not None:
                    raise
                self._stop_packing(str(error))
            else:
                rows = [row for batch in batches for row in batch]
                return dict(zip(rows, torch.cat(logits), strict=True))

    def crop(self, row: Row, num_tokens: int) -> None:
        """Takes the last private tokens of a row away.

        Raises:
            ValueError: If it has fewer, or some layer keeps a state that has read them.
        """
        if not num_tokens:
            return
        if num_tokens > self.num_tokens(row):
            raise ValueError(f"{num_tokens} tokens to take away, {self.num_tokens(row)} are held.")
        self._set_apart(row)
        self._cache_of(row).crop(-num_tokens)

    def park(self, row: Row) -> ParkedRow:
        """Takes a row out of the batch, with what it holds."""
        state, index = self._place(row)
        parked = (
            state.park(index)
            if state.num_rows
            else ParkedRow.empty(state.prefixes.bound.leaves[0], state.epoch)
        )
        self.drop(row)
        return parked

    def drop(self, row: Row) -> None:
        """Takes a row out of the batch; what it held is freed at once."""
        if row._alone is None:
            self._leave_common(row)
        else:
            self._alone.remove(row)
        row._alone = None

    def check_integrity(self) -> None:
        """Checks every pool.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        for row in (*self._alone, None):
            self._cache_of(row).check_integrity()

    def _open(self, cache: AsymmetricPagedCache) -> AsymmetricPagedCache:
        """Makes a cache one of this batch."""
        state = cache.rows
        state.is_live, state.needs_mask = True, self.why_not_packed is not None
        state.cold.limit = self.num_slots_limit
        if cache is not self._common:
            state.journal = self._common.rows.journal
        return cache

    def _arranged(self, feeds: Mapping[Row, Sequence[int]]) -> list[list[Row]]:
        """Lets those be the common batch that take one token each; gives the batches that are fed."""
        for row in list(self._merged):
            if len(feeds.get(row, ())) != 1:
                self._set_apart(row)
        for row in list(self._alone):
            has_one = len(feeds.get(row, ())) == 1
            if self._may_merge and has_one and self._cache_of(row).rows.num_rows:
                if not self._merged:
                    self._common.rows.epoch = self._prefixes.rows.epoch
                self._common.rows.join(self._cache_of(row).rows.park(0))
                self._alone.remove(row)
                self._merged.append(row)
                row._alone = None
        self._common.rows.cold.tidy()
        alone = [[row] for row in self._alone if row in feeds]
        return [list(self._merged), *alone] if self._merged else alone

    @property
    def _may_merge(self) -> bool:
        return self.why_not_packed is None or not self._needs_rows_apart

    def _ids(self, rows: Sequence[Row], feeds: Mapping[Row, Sequence[int]]) -> Tensor:
        return torch.tensor([list(feeds[row]) for row in rows], device=device_of_ids(self._model))

    def _set_apart(self, row: Row) -> None:
        if row._alone is not None:
            return
        state, index = self._place(row)
        parked = state.park(index)
        alone = self._open(self._prefixes.reading_alone(parked.prefix))
        alone.rows.join(parked)
        self._leave_common(row)
        row._alone = alone
        self._alone.append(row)

    def _stop_packing(self, reason: str) -> None:
        logger.info("steps take one forward for each batch: %s.", reason)
        self.why_not_packed = reason
        for row in (*self._alone, None):
            self._cache_of(row).rows.needs_mask = True
        if self._has_states:
            for row in list(self._merged):
                self._set_apart(row)

    def _leave_common(self, row: Row) -> None:
        index = self._merged.index(row)
        self._common.rows.leave(index)
        self._merged[index] = self._merged[-1]
        self._merged.pop()
        if not self._merged:
            self._common.reset()

    def _run(self, segments: list[Segment]) -> list[Tensor]:
        if len(segments) > 1 and self.why_not_packed is None:
            return self._run_packed(segments)
        logits: list[Tensor] = []
        try:
            for segment in segments:
                logits.append(self._run_alone(segment))
        except BaseException:
            self._take_back(segments[: len(logits)])
            raise
        return logits

    def _take_back(self, segments: list[Segment]) -> None:
        for cache, ids in segments:
            if self._has_states:
                cache.rows.row_states.tear()
            else:
                cache.crop(-ids.shape[1])

    def _run_packed(self, segments: list[Segment]) -> list[Tensor]:
        packed = PackedCache(segments)
        counts = [ids.shape[1] for _, ids in segments for _ in ids]
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = self._forward(packed.packed_ids, packed, ends)[0]
        return list(logits.split([len(ids) for _, ids in segments]))

    def _run_alone(self, segment: Segment) -> Tensor:
        cache, ids = segment
        last = torch.tensor([ids.shape[1] - 1])
        return self._forward(ids, cache, last)[:, 0]

    def _forward(self, ids: Tensor, cache: Any, kept: Tensor) -> Tensor:
        """Gives `[num_rows, len(kept), vocab_size]` logits of the columns `kept`."""
        kept = kept.to(ids.device)
        takes = "logits_to_keep" in forward_parameters(self._model)
        options: dict[str, Any] = {"logits_to_keep": kept} if takes else {}
        with torch.no_grad():
            out = self._model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options)
        logits: Tensor = out.logits
        return logits if takes else logits.index_select(1, kept)

    def _check_room(self, num_new: int) -> None:
        limit, used = self.num_slots_limit, self.num_slots_used
        if limit is not None and used + num_new > limit:
            raise ColdPoolFullError(
                f"{limit - used} free slots of cold_slots={limit}, {num_new} needed; raise "
                "cold_slots, run fewer rows, or generate fewer tokens."
            )

    def _cache_of(self, row: Row | None) -> AsymmetricPagedCache:
        alone = None if row is None else row._alone
        return self._common if alone is None else alone

    def _place(self, row: Row) -> tuple[Any, int]:
        """The rows among which a row is, and its number there."""
        if row._alone is not None:
            return row._alone.rows, 0
        if row not in self._merged:
            raise ValueError("this row has left the batch; start another one.")
        return self._common.rows, self._merged.index(row)
