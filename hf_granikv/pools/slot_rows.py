"""Rows of tokens in slots: where they lie, and how many slots there are for them."""

import numpy as np
from numpy.typing import NDArray

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools.layout import MIN_HEADROOM, grown, is_mostly_idle, roomy, run_stride
from hf_granikv.pools.run_spread import RunSpread
from hf_granikv.pools.slots import SlotAllocator
from hf_granikv.pools.storage import SlotStorage
from hf_granikv.pools.token_table import TokenTable


class SlotRows:
    """The slots of a pool, and the rows that lie in them: as runs at a regular distance, or scattered.

    ```
    runs        |row 0 ......|    |row 1 ..|      |row 2 ........|  |      `stride` slots apart
    scattered   |row 0|row 1|row 2|row 0|row 2|row 0|                      no slot need be free
    ```

    Args:
        num_layers: Layers that store tokens.
        limit: The most slots there may ever be; None for no limit.

    Attributes:
        limit: The most slots it may have from now on; it never shrinks by itself.
        table: Who owns which slot.
        peak_bytes: The largest number of bytes held before a batch ended, or slots were given back,
            since `release`.
    """

    def __init__(self, num_layers: int, *, limit: int | None = None) -> None:
        self.limit = limit
        self.table = TokenTable(0)
        self.peak_bytes = 0
        self._allocator = SlotAllocator()
        self._storage = SlotStorage(num_layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that have stored any."""
        return self._storage.bytes_per_token

    @property
    def largest_bytes_per_token(self) -> int:
        """Those in the largest tensor, which is there twice while the pool changes its size."""
        return self._storage.largest_bytes_per_token

    @property
    def num_slots(self) -> int:
        """Slots in storage, free ones included."""
        return self._allocator.num_slots

    @property
    def num_tokens(self) -> int:
        """Slots that some row owns."""
        return self._allocator.num_slots - self._allocator.num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held and of the table."""
        return self._storage.num_bytes + self.table.nbytes

    def check_room(self, num_new: int, *, replacing: bool) -> None:
        """Checks that `num_new` tokens will fit, if need be once the rows held now are gone.

        Raises:
            ColdPoolFullError: With the numbers and the remedy.
        """
        if self.limit is None:
            return
        live = 0 if replacing else self.num_tokens
        if live + num_new > self.limit:
            raise ColdPoolFullError(
                f"ColdPool has {self.limit - live} free slots of cold_slots={self.limit}, "
                f"{num_new} needed; raise cold_slots, run fewer rows, or generate fewer tokens."
            )

    def tidy(self) -> None:
        """Gives back slots that rows have left, and makes rows that moved runs again."""
        num_tokens, num_rows = self.num_tokens, self.table.num_rows
        if is_mostly_idle(self.num_slots, num_tokens, num_rows):
            self.shrink(roomy(num_tokens, num_rows))
        if self.table.stride is None and num_tokens and not self._has_shared_slots:
            # without room to grow they would be scattered again by the next token
            self._lay_out(np.zeros(num_rows, dtype=np.int64), 1 / 8, min_headroom=MIN_HEADROOM)

    def shrink(self, num_slots: int) -> None:
        """Gives free slots back until there are `num_slots`, or none is free.

        Rows stay runs where these fit in, and are scattered otherwise.
        """
        num_slots, table = max(num_slots, self.num_tokens), self.table
        if num_slots >= self.num_slots:
            return
        self._note_peak()
        self._forget_views()
        fits = table.stride is not None and table.num_rows * table.stride <= num_slots
        if not fits and not self._lays_out_within(num_slots):
            held = np.unique(table.flat())
            src = held[held >= num_slots]
            dst = self._allocator.free_below(num_slots)[: len(src)]
            self._storage.move(src, dst)
            self._allocator.move(src, dst)
            table.rename(src, dst)
        self._allocator.shrink(num_slots)
        self._storage.resize(self.num_slots)

    def check_integrity(self) -> None:
        """Checks that every slot is free or owned by exactly the rows that list it.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        self._allocator.check_integrity(self.table.flat())

    def _lay_out(
        self,
        counts: NDArray[np.int64],
        spare: float,
        *,
        limit: int | None = None,
        min_headroom: int = 0,
    ) -> bool:
        """Makes rows runs with room for `counts` more tokens each, if that may be."""
        table, limit = self.table, self.limit if limit is None else limit
        lengths = table.lengths + counts
        stride = run_stride(lengths, spare, limit, min_headroom=min_headroom)
        self._forget_views()
        if stride is None:
            return False
        old_slots, num_slots = table.flat(), table.num_rows * stride
        laid_out = table.laid_out(stride)
        new_slots = laid_out[laid_out >= 0]
        is_moved = len(old_slots) > 0 or num_slots > self.num_slots
        if is_moved:
            # nothing can fail between the move and the table that says where rows are
            allocator = SlotAllocator()
            allocator.grow(num_slots)
            allocator.hold(new_slots)
            largest = max(num_slots, self._storage.num_slots)
            if (runs := self._spread_to(stride)) is not None:
                self._storage.spread(runs, largest)
            else:
                self._storage.resize(largest)
                self._storage.move(old_slots, new_slots)
            self._allocator = allocator
        table.lay_out(laid_out, stride)
        if is_moved:
            self._storage.resize(num_slots)
        return True

    def _spread_to(self, stride: int) -> RunSpread | None:
        """How rows that are runs move apart; None if they are none, or would move together."""
        num_rows, before = self.table.num_rows, self.table.stride
        # the run of a row that has just come may lie behind the last slot
        if before is None or stride < before or num_rows * before > self.num_slots:
            return None
        return RunSpread(num_rows, self.table.max_length, before, stride)

    def _lays_out_within(self, num_slots: int) -> bool:
        """Makes rows runs within so many slots, if that may be."""
        nothing = np.zeros(self.table.num_rows, dtype=np.int64)
        return not self._has_shared_slots and self._lay_out(nothing, 1 / 8, limit=num_slots)

    @property
    def _has_shared_slots(self) -> bool:
        held = self.table.flat()
        return len(np.unique(held)) < len(held)

    def _grow(self, num_needed: int) -> None:
        if num_needed <= self.num_slots:
            return
        num_slots = grown(num_needed, self.num_slots, self.limit)
        self._forget_views()
        self._storage.resize(num_slots)
        self._allocator.grow(num_slots)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def _forget_views(self) -> None:
        """Called before slots change their places."""
