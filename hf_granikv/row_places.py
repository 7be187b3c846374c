"""Where the rows of a living batch are, and what they hold there."""

from collections.abc import Mapping

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.pools import ColdPool, Prefix
from hf_granikv.state import CacheState


class Row:
    """A row of `LiveRows`; two are the same if they are one object."""

    __slots__ = ("_alone",)

    def __init__(self, alone: AsymmetricPagedCache) -> None:
        # the cache that holds this row and no other; None while it is in the common batch
        self._alone: AsymmetricPagedCache | None = alone


class RowPlaces:
    """Rows in one common batch, and others each in a cache of its own.

    Args:
        common: The cache of the common batch, empty.
    """

    def __init__(self, common: AsymmetricPagedCache) -> None:
        self._common = common
        self._merged: list[Row] = []
        self._alone: list[Row] = []

    @property
    def num_slots_used(self) -> int:
        """Private tokens of all rows."""
        return sum(pool.num_tokens for pool in self.pools)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values; 0 as long as no row has stored any."""
        return max(pool.bytes_per_token for pool in self.pools)

    @property
    def num_bytes(self) -> int:
        """Bytes of what rows hold of their own, free slots and tables included."""
        return sum(rows.private_bytes for rows in self._states)

    @property
    def pools(self) -> list[ColdPool]:
        """Where rows hold their tokens: of the common batch first, then one of each other row."""
        return [rows.cold for rows in self._states]

    def num_tokens(self, row: Row) -> int:
        """Private tokens of a row."""
        state, index = self._place(row)
        return int(state.cold.table.lengths[index]) if state.num_rows else 0

    def lend(self, row: Row, num_tokens: int | None = None) -> ParkedRow:
        """What a row holds, or its first tokens, where they are; valid until some row changes."""
        state, index = self._place(row)
        if state.num_rows:
            return state.lend(index, num_tokens)
        assert state.prefixes.bound is not None
        return ParkedRow.empty(state.prefixes.bound.leaves[0], state.epoch)

    def exchange(self, replaced: Mapping[Prefix, Prefix]) -> None:
        """Lets rows read others in the place of some prefixes: the same ids in other parts."""
        for rows in self._states:
            rows.exchange(replaced)
            rows.prefixes.rebind(replaced)

    def check_integrity(self) -> None:
        """Checks every pool.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        for row in (None, *self._alone):
            self._cache_of(row).check_integrity()

    @property
    def _states(self) -> list[CacheState]:
        return [self._cache_of(row).rows for row in (None, *self._alone)]

    def _cache_of(self, row: Row | None) -> AsymmetricPagedCache:
        return self._common if row is None or row._alone is None else row._alone

    def _place(self, row: Row) -> tuple[CacheState, int]:
        """The rows among which a row is, and its number there."""
        if row._alone is not None:
            return row._alone.rows, 0
        if row not in self._merged:
            raise ValueError("this row has left the batch; start another one.")
        return self._common.rows, self._merged.index(row)
