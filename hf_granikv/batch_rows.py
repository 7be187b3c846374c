"""The rows of a batch: what they read, what they hold of their own, and in which columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_granikv.errors import IntegrityError, StalePrefixError
from hf_granikv.layouts import Layout
from hf_granikv.pools import ColdPool, Prefix, RowStates
from hf_granikv.pools.row_states import LayerStates
from hf_granikv.pools.storage import KeysAndValues
from hf_granikv.prompt_checks import Bools
from hf_granikv.row_prefixes import NO_ROWS, RowPrefixes


@dataclass(frozen=True, eq=False, slots=True)
class ParkedRow:
    """What a row holds, outside of any batch. Immutable: several rows may go on from one.

    Attributes:
        prefix: The last prefix of the chain that it reads; None for a row that reads none.
        num_seen: Tokens of the chain that it sees.
        num_tokens: Its private tokens.
        tokens: Per layer, their keys and values, `[num_kv_heads, num_tokens, head_dim]` each; those of
            a lent row are read when they are asked for.
        states: Per layer with states, `[1, ...]` each; those of a lent row likewise.
        epoch: That of the rows it was one of.
    """

    prefix: Prefix | None
    num_seen: int
    num_tokens: int
    tokens: Sequence[KeysAndValues | None] = field(repr=False)
    states: Sequence[LayerStates] = field(repr=False)
    epoch: object = field(repr=False)

    @classmethod
    def empty(cls, prefix: Prefix | None, epoch: object) -> "ParkedRow":
        """A row that holds nothing of its own."""
        return cls(prefix, 0 if prefix is None else prefix.stop, 0, (), (), epoch)

    def after(self, prefix: Prefix) -> "ParkedRow":
        """The same row as a reader of a longer chain, or of another one of the same ids.

        Args:
            prefix: The end of that chain, of which the row holds what is not in its own one.
        """
        num_read = min(prefix.stop - self.num_seen, self.num_tokens)
        tokens = self.tokens
        if num_read:
            # a view would keep what it does not show
            tokens = tuple(
                None
                if pair is None
                else (pair[0][:, num_read:].clone(), pair[1][:, num_read:].clone())
                for pair in tokens
            )
        num_tokens = self.num_tokens - num_read
        return replace(
            self, prefix=prefix, num_seen=prefix.stop, num_tokens=num_tokens, tokens=tokens
        )

    @property
    def sees_less(self) -> bool:
        """Whether it does not see all of its chain."""
        return self.prefix is not None and self.num_seen < self.prefix.stop

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held."""
        of_tokens = [t for pair in self.tokens if pair is not None for t in pair]
        of_states = [t for layer in self.states for t in layer.values()]
        return sum(t.untyped_storage().nbytes() for t in (*of_tokens, *of_states))


class BatchRows:
    """Rows of one cache.

    Args:
        num_layers: Layers of the model.
        limit: The most private tokens.

    Attributes:
        cold: The pool of private tokens, this cache's own.
        row_states: What layers keep of the rows that do not keep tokens.
        num_columns: Mask columns since the prefix.
        epoch: Another object after each `invalidate`: rows of one epoch go with each other only.
        recounts_positions: Whether `generate` runs rows that end in pads; it counts their positions
            on from the last column, which is wrong.
        kept: What attention keeps from step to step, as long as the rows read the same: plans, and
            scratch memory of compiled kernels, some hundred kilobytes for each thread.
    """

    def __init__(self, num_layers: int, limit: int | None) -> None:
        self.cold = ColdPool(num_layers, limit=limit)
        self.row_states = RowStates()
        self._reads = NO_ROWS
        self.num_columns = 0
        self.epoch: object = object()
        self.recounts_positions = False
        self.kept: dict[Any, Any] = {}
        self._owned: Bools | None = None

    @property
    def reads(self) -> RowPrefixes:
        """The prefixes that the rows read; of no rows where none are held."""
        return self._reads

    @reads.setter
    def reads(self, reads: RowPrefixes) -> None:
        if reads is not self._reads:
            self._reads, self.kept = reads, {}

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first forward."""
        return self.cold.table.num_rows

    @property
    def private_bytes(self) -> int:
        """Bytes of what rows hold of their own."""
        return self.cold.num_bytes + self.row_states.num_bytes

    def owned_columns(self) -> Bools:
        """`[num_rows, num_columns]` which columns since the prefix hold a token of the row."""
        if self._owned is not None:
            return self._owned
        return np.ones((self.num_rows, self.num_columns), dtype=bool)

    def start_rows(self, num_rows: int, reads: RowPrefixes) -> None:
        """Frees the rows held and starts others, which hold nothing of their own."""
        self.cold.begin(num_rows)
        self.num_columns, self._owned, self.recounts_positions = 0, None, False
        self.reads = reads

    def append_columns(self, layout: Layout) -> None:
        """Adds the columns of a forward behind the others."""
        if self._owned is not None or not layout.is_full:
            self._owned = np.concatenate([self.owned_columns(), layout.owned], axis=1)
        self.num_columns += layout.owned.shape[1]

    def drop_columns(self, num_columns: int) -> int:
        """Takes the last columns away, those of the prefix aside.

        Returns:
            How many there were.
        """
        from_rows = min(num_columns, self.num_columns)
        kept = self.num_columns - from_rows
        if self._owned is None:
            counts = np.full(self.num_rows, from_rows, dtype=np.int64)
        else:
            counts = self._owned[:, kept:].sum(1)
            self._owned = self._owned[:, :kept]
        self.cold.truncate(counts)
        self.num_columns = kept
        return from_rows

    def select_rows(self, indices: np.ndarray) -> None:
        """Makes row i the former row `indices[i]`.

        Raises:
            ValueError: If there is no such row.
        """
        if not self.num_rows:
            return
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_rows):
            raise ValueError(
                f"rows {indices.tolist()} were asked for, the cache holds rows 0 to "
                f"{self.num_rows - 1}."
            )
        self.cold.select(indices)
        self.row_states.select(indices)
        self.reads = self.reads.selected(indices)
        self._owned = None if self._owned is None else self._owned[indices]

    def park(self, row: int) -> ParkedRow:
        """Copies what a row holds; it stays in the batch.

        Raises:
            TornStateError: If a failed forward has changed the states of the rows.
        """
        lent = self.lend(row)
        self.row_states.check_whole()
        states = tuple(self.row_states.take_row(row))
        return replace(lent, tokens=tuple(self.cold.take_row(row)), states=states)

    def lend(self, row: int, num_tokens: int | None = None) -> ParkedRow:
        """What a row holds, or its first tokens, where they are; valid until some row changes."""
        tokens = self.cold.lend_row(row, num_tokens)
        return ParkedRow(
            prefix=self.reads.leaves[row],
            num_seen=int(self.reads.lengths[row]),
            num_tokens=tokens.num_tokens,
            tokens=tokens,
            states=self.row_states.lend_row(row),
            epoch=self.epoch,
        )

    def check_epoch(self, parked: "ParkedRow | BatchRows") -> None:
        """Checks that a row goes with those held here.

        Raises:
            StalePrefixError: If it is older than the last `invalidate`, or of another cache.
        """
        if parked.epoch is not self.epoch:
            raise StalePrefixError(
                "the parked row was computed before invalidate() was called, or by another cache; "
                "compute it again."
            )

    def join(self, parked: ParkedRow) -> None:
        """Adds a row behind the others that holds what a parked one does.

        Raises:
            ColdPoolFullError: Before anything is changed.
            StalePrefixError: If the row is older than the last `invalidate`.
        """
        self.check_epoch(parked)
        self.cold.add_row(parked.tokens, parked.num_tokens)
        try:
            self.row_states.add_row(parked.states)
        except BaseException:
            self.cold.remove_row(self.cold.table.num_rows - 1)
            raise
        self.reads = self.reads.joined(parked.prefix, parked.num_seen)
        self._align()

    def leave(self, row: int) -> None:
        """Frees what a row holds; the last row takes its place."""
        order = np.arange(self.num_rows - 1)
        if row < len(order):
            order[row] = self.num_rows - 1
        self.cold.remove_row(row)
        self.row_states.remove_row(row)
        self.reads = self.reads.selected(order)
        self._align()

    def tidy(self) -> None:
        """Gives back what rows that left have freed; see `ColdPool.tidy`."""
        self.cold.tidy()
        self.row_states.trim()

    def exchange(self, replaced: Mapping[Prefix, Prefix]) -> None:
        """Lets rows read others in the place of some prefixes: the same ids in other parts."""
        self.reads = self.reads.exchanged(replaced)

    def copy_rows(self, other: "BatchRows") -> None:
        """Holds the rows of another cache, as copies; the states are the layers' to copy."""
        self.cold = other.cold.copy()
        self.reads, self.num_columns = other.reads, other.num_columns
        self.recounts_positions = other.recounts_positions
        self._owned = None if other._owned is None else other._owned.copy()

    def check_integrity(self) -> None:
        """Checks that everything that is known of rows is known of the same number of them.

        Raises:
            IntegrityError: With the numbers.
        """
        self.cold.check_integrity()
        self.row_states.check_integrity(self.num_rows)
        if (self.reads.num_rows, len(self.owned_columns())) != (self.num_rows, self.num_rows):
            raise IntegrityError(
                f"{self.num_rows} rows hold tokens, {self.reads.num_rows} read prefixes, and "
                f"{len(self.owned_columns())} have columns."
            )

    def _align(self) -> None:
        """Lays rows out anew, pads first, in no more columns than the longest row has tokens."""
        lengths = self.cold.table.lengths
        self.num_columns = self.cold.table.max_length
        columns = np.arange(self.num_columns) >= (self.num_columns - lengths)[:, None]
        self._owned = None if columns.all() else columns
