"""Rows that come and go between forward passes, each taking as many tokens as it likes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_granikv.announce import device_of_ids
from hf_granikv.batch_rows import ParkedRow
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.errors import ColdPoolFullError, NotPackableError
from hf_granikv.journal import Journal
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.live_levels import LiveLevels
from hf_granikv.packed import Segment
from hf_granikv.pools import Prefix
from hf_granikv.row_budget import Coming, RowBudget, check_slots
from hf_granikv.row_places import Row, RowPlaces
from hf_granikv.segment_runs import SegmentRuns
from hf_granikv.wording import counted


class LiveRows(RowPlaces):
    """The rows of a living batch, over the prefixes of one cache.

    ```
    common batch   row 0, row 1, row 2 ...    one token each, in one cache: prefixes are read once
    by itself      row 7                      a newcomer with a chunk of its prompt
    ```

    A step is one forward over the new tokens of all, side by side, without pads. Models that cannot
    run so (`why_not_packed`) get one for the common batch and one for each other row; one for each
    row where RoPE depends on the length.

    Args:
        model: The model; its prefixes were computed with it.
        cache: Holds the prefixes. Its own rows are not touched.
        budget: Bytes that rows may take, beside the `cold_slots` of the cache; None for no limit.

    Raises:
        StalePrefixError: If the model is not that of the prefixes.

    Attributes:
        has_states: Whether layers keep states, which are known after the last token of a row only.
        levels: What rows have come to share.
    """

    def __init__(
        self, model: nn.Module, cache: AsymmetricPagedCache, *, budget: RowBudget | None = None
    ) -> None:
        self._model: Any = cache.attach(model)
        self._prefixes = cache
        self._budget = budget
        served = ServedModel.from_config(self._model.config)
        self._runs = SegmentRuns(self._model, served)
        self.has_states = served.has_states
        self._needs_rows_apart = served.rope_type is not None
        self._cold_slots = cache.rows.options.cold_slots
        self._journal = Journal()
        super().__init__(self._open_common())
        self.levels = LiveLevels(cache, self._journal)

    @property
    def why_not_packed(self) -> str | None:
        """Why steps take several forwards; None if they take one."""
        return self._runs.why_not_packed

    @property
    def backend_steps(self) -> dict[str, int]:
        """How many steps of a batch each backend has run."""
        return dict(self._journal.backend_steps)

    def holds(self, prefix: Prefix) -> bool:
        """Whether rows can start from a prefix."""
        return prefix in self._prefixes.rows.prefixes.levels or prefix in self.levels

    def start(
        self, prefix: Prefix | None, parked: ParkedRow | None = None, *, num_copied: int = 0
    ) -> Row:
        """Adds a row.

        Args:
            prefix: The last prefix of the chain that it reads.
            parked: What it holds already, from `park`; it reads the chain that this row read.
            num_copied: Tokens of copies that are there meanwhile, and that nobody else counts.

        Raises:
            ColdPoolFullError: If there is no room for what it holds; nothing has changed.
            ValueError: If the prefix is not held, or is not the one of the parked row.
            StalePrefixError: If the model has changed since, or the row is older than `invalidate`.
        """
        if prefix is not None and not self.holds(prefix):
            raise ValueError(f"{prefix} is not held; prefill it in the cache of these rows first.")
        if parked is not None and parked.prefix is not prefix:
            raise ValueError(f"the parked row reads {parked.prefix}, {prefix} was given.")
        alone = self._open(self._prefixes.reading_alone(prefix))
        if parked is not None and (parked.num_tokens or parked.sees_less):
            check_slots(self._cold_slots, self.num_slots_used, parked.num_tokens)
            # what it holds was computed by the model as it was then
            self._prefixes.attach(self._model)
            self._join(alone, parked, num_copied)
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
            TornStateError: If a forward failed before that had changed states of a row; drop it. Nothing
                has changed. Any other error of the model leaves rows without states as they were.
        """
        if empty := [row for row, ids in feeds.items() if not len(ids)]:
            raise ValueError(f"{counted(len(empty), 'row')} brought no token; leave such rows out.")
        check_slots(self._cold_slots, self.num_slots_used, sum(map(len, feeds.values())))
        while True:
            self._check_whole(feeds)
            batches = self._arranged(feeds)
            segments = [
                Segment(self._cache_of(rows[0]), self._ids(rows, feeds)) for rows in batches
            ]
            self.make_room([Coming.step(cache.rows.cold, *ids.shape) for cache, ids in segments])
            try:
                logits = self._runs.run(segments)
            except NotPackableError as error:
                if self._runs.needs_mask:
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
        if not self.has_states:
            self._set_apart(row)
        self._cache_of(row).crop(-num_tokens)

    def park(self, row: Row) -> ParkedRow:
        """Takes a row out of the batch, with what it holds.

        Raises:
            ColdPoolFullError: If the budget has no room for a copy; nothing has changed.
            TornStateError: As in `forward`.
        """
        state, index = self._place(row)
        if state.num_rows:
            # its states are there twice as well
            self.make_room([], self.num_tokens(row) + self._num_beside)
            parked = state.park(index)
        else:
            parked = self.lend(row)
        self.drop(row)
        return parked

    def drop(self, row: Row) -> None:
        """Takes a row out of the batch; what it held is freed at once, states before the next step."""
        if row._alone is None:
            self._leave_common(row)
        else:
            self._alone.remove(row)
            row._alone.reset()
        row._alone = None

    def _open(self, cache: AsymmetricPagedCache) -> AsymmetricPagedCache:
        """Makes a cache one of this batch."""
        state = cache.rows
        state.is_live, state.forwards.needs_mask = True, self._runs.needs_mask
        state.cold.limit, state.journal = self._cold_slots, self._journal
        return cache

    def _open_common(self) -> AsymmetricPagedCache:
        cache = self._open(self._prefixes.reading_alone(None))
        # rows know what they read; the caller's holds are not this batch's
        cache.rows.prefixes.let_all_go()
        return cache

    def _arranged(self, feeds: Mapping[Row, Sequence[int]]) -> list[list[Row]]:
        """Lets those be the common batch that take one token each; gives the batches that are fed."""
        for row in list(self._merged):
            if len(feeds.get(row, ())) != 1:
                self._set_apart(row)
        if not self._needs_rows_apart:
            self._merge([row for row in self._alone if len(feeds.get(row, ())) == 1])
        self._common.rows.tidy()
        alone = [[row] for row in self._alone if row in feeds]
        return [list(self._merged), *alone] if self._merged else alone

    def _merge(self, rows: Sequence[Row]) -> None:
        """Moves rows that hold something into the common batch."""
        rows = [row for row in rows if self._cache_of(row).rows.num_rows]
        if self.has_states and self._journal.dense_reads and not self._runs.needs_mask:
            # found out here, since a forward that finds it out costs rows their states
            self._stop_packing("its attention reads keys and values in one piece")
        for row in rows:
            self._prefixes.rows.check_epoch(self._cache_of(row).rows)
        if rows and not self._merged:
            first, *rows = rows
            self._common = self._cache_of(first)
            self._common.rows.prefixes.let_all_go()
            self._note_merged(first)
        for num_done, row in enumerate(rows):
            self._merge_one(row, len(rows) - num_done)

    def _merge_one(self, row: Row, num_to_come: int) -> None:
        """Moves a row into the common batch; without room for it to be there twice it stays."""
        alone = self._cache_of(row)
        if self._budget is None:
            # one copy of what is there for all that come
            self._common.rows.row_states.reserve(len(self._merged) + num_to_come)
        try:
            self._join(self._common, alone.rows.lend(0), self._num_beside)
        except ColdPoolFullError:
            return
        alone.reset()
        self._note_merged(row)

    def _note_merged(self, row: Row) -> None:
        self._alone.remove(row)
        self._merged.append(row)
        row._alone = None

    @property
    def _num_beside(self) -> int:
        """Tokens that take as much as the states of a row do, where that is counted."""
        return 0 if self._budget is None else self._budget.sizes.tokens_per_row

    def _check_whole(self, rows: Iterable[Row]) -> None:
        for state in self._states:
            # an interrupt may have left something of a forward
            state.settle()
        for state in {self._cache_of(row).rows for row in rows} if self.has_states else ():
            state.row_states.check_whole()

    def _ids(self, rows: Sequence[Row], feeds: Mapping[Row, Sequence[int]]) -> Tensor:
        return torch.tensor([list(feeds[row]) for row in rows], device=device_of_ids(self._model))

    def _set_apart(self, row: Row) -> None:
        if row._alone is not None:
            return
        state, index = self._place(row)
        if self._merged == [row]:
            alone, self._common, self._merged = self._common, self._open_common(), []
        else:
            lent = state.lend(index)
            alone = self._open(self._prefixes.reading_alone(lent.prefix))
            self._join(alone, lent)
            if state.row_states.is_torn:
                alone.rows.row_states.tear()
            self._leave_common(row)
        row._alone = alone
        self._alone.append(row)

    def _stop_packing(self, reason: str) -> None:
        self._runs.stop_packing(reason)
        for rows in self._states:
            rows.forwards.needs_mask = True

    def _leave_common(self, row: Row) -> None:
        index = self._merged.index(row)
        self._common.rows.leave(index)
        self._merged[index] = self._merged[-1]
        self._merged.pop()
        if not self._merged:
            self._common.reset()

    def _join(self, cache: AsymmetricPagedCache, parked: ParkedRow, num_copied: int = 0) -> None:
        """Adds a row to those of a cache."""
        self.make_room([Coming.row(cache.rows.cold, parked.num_tokens)], num_copied)
        cache.rows.join(parked)

    def make_room(self, coming: Sequence[Coming], num_copied: int = 0) -> None:
        """Makes room for what comes into pools, and for copies outside; see `RowBudget.make_room`."""
        if self._budget is not None:
            for rows in self._states:
                rows.row_states.trim()
            num_rows, beside = len(self._merged) + len(self._alone), self.levels.num_bytes
            self._budget.make_room(self.pools, num_rows, coming, num_copied, beside)
