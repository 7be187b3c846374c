"""Which slot holds the j-th private token of each row."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hf_granikv.pools.slots import Slots


class TokenTable:
    """Logical to physical map of the rows of one batch.

    ```
              token 0   1   2   3         lengths
    row 0   [      12  13  14   -  ]         3
    row 1   [      12  13  20  21  ]         4      beams share slots 12 and 13
    ```

    Only tokens that a row owns are listed; pads and tokens of the prefix never are.

    Attributes:
        lengths: `[num_rows]` private tokens of each row.
    """

    def __init__(self, num_rows: int) -> None:
        self.lengths: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._slots: NDArray[np.int64] = np.full((num_rows, 0), -1, dtype=np.int64)
        self._stride: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Private tokens of the longest row."""
        return max(self.lengths.tolist(), default=0)

    @property
    def stride(self) -> int | None:
        """Distance in slots between the starts of rows, if row i is the run from `i * stride`.

        None if some row is not such a run; then readers gather.
        """
        return self._stride

    @property
    def run_length(self) -> int | None:
        """Tokens of each row, if rows are runs of equal length; else None."""
        lengths = set(self.lengths.tolist())
        return lengths.pop() if self._stride is not None and len(lengths) == 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes of the table itself."""
        return self._slots.nbytes + self.lengths.nbytes

    @property
    def slots(self) -> Slots:
        """`[num_rows, at least max_length]` slots; beyond a row's length they mean nothing."""
        return self._slots

    def nbytes_for(self, num_rows: int, length: int) -> int:
        """Bytes of the table once it has so many rows, the longest of `length` tokens."""
        return (self._width_for(length) + 1) * num_rows * self._slots.itemsize

    def row(self, row: int) -> Slots:
        """`[length]` slots of one row, in the order of its tokens."""
        return self._slots[row, : self.lengths[row]]

    def flat(self) -> Slots:
        """`[num_holds]` slots of all rows, row after row, shared ones once per row."""
        return self._slots[self._owned()]

    def padded(self) -> Slots:
        """`[num_rows, max_length]` slots, -1 beyond a row's length."""
        width = self.max_length
        return np.where(self._owned()[:, :width], self._slots[:, :width], -1)

    def append(self, counts: NDArray[np.int64], slots: Slots) -> None:
        """Gives `counts[i]` more slots to each row, taken from `slots` in row order."""
        new_lengths = self.lengths + counts
        self._widen(int(new_lengths.max(initial=0)))
        columns = np.arange(self._slots.shape[1])
        is_new = (columns >= self.lengths[:, None]) & (columns < new_lengths[:, None])
        self._slots[is_new] = slots
        self.lengths = new_lengths

    def next_in_place(self, counts: NDArray[np.int64]) -> Slots | None:
        """The slots that would continue every row's run, or None if rows are not runs."""
        if self._stride is None or int((self.lengths + counts).max(initial=0)) > self._stride:
            return None
        starts = np.arange(self.num_rows) * self._stride + self.lengths
        if (counts == 1).all():
            return starts
        return np.concatenate(
            [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
            or [np.empty(0, dtype=np.int64)]
        ).astype(np.int64)

    def next_of_runs(self, num_new: int) -> Slots | None:
        """The next slots of every row, if rows are runs of equal length, not empty, with room for them.

        Returns:
            `[num_rows, num_new]`; None if they are not.
        """
        length, stride = self.run_length, self._stride
        if not length or not num_new or stride is None or length + num_new > stride:
            return None
        return self._slots[:, length - 1 : length] + _counted(num_new)

    def append_to_runs(self, slots: Slots) -> None:
        """Gives each row its slots of `next_of_runs`."""
        num_new, length = slots.shape[1], self.max_length
        self._widen(length + num_new)
        self._slots[:, length : length + num_new] = slots
        self.lengths = self.lengths + _counted(num_new)[-1:]

    def laid_out(self, stride: int) -> Slots:
        """`[num_rows, width]` the slots if row i was the run from `i * stride`; -1 beyond a row."""
        runs = np.arange(self.num_rows)[:, None] * stride + np.arange(self._slots.shape[1])
        return np.where(self._owned(), runs, -1)

    def lay_out(self, laid_out: Slots, stride: int) -> None:
        """Renames every slot to what `laid_out` gave for this stride; nothing is allocated."""
        self._slots, self._stride = laid_out, stride

    def rename(self, src: Slots, dst: Slots) -> None:
        """Lists `dst[i]` wherever `src[i]` was listed; rows are scattered then."""
        owned, names = self._owned(), np.arange(max(self._slots.max(initial=0), 0) + 1)
        names[src] = dst
        self._slots[owned] = names[self._slots[owned]]
        self._stride = None

    def scatter(self) -> None:
        """Declares that rows are no longer runs at a regular distance."""
        self._stride = None

    def truncate(self, counts: NDArray[np.int64]) -> Slots:
        """Takes the last `counts[i]` tokens of each row away.

        Returns:
            `[counts.sum()]` the slots the rows no longer hold.
        """
        kept = self.lengths - counts
        columns = np.arange(self._slots.shape[1])
        is_dropped = (columns >= kept[:, None]) & (columns < self.lengths[:, None])
        dropped = self._slots[is_dropped]
        self.lengths = kept
        return dropped

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes row i the former row `indices[i]`; rows may repeat or vanish."""
        order = np.asarray(indices, dtype=np.int64)
        if self._stride is not None and not np.array_equal(order, np.arange(self.num_rows)):
            self._stride = None
        self._slots = self._slots[order]
        self.lengths = self.lengths[order]

    def add_row(self) -> None:
        """Adds an empty row behind the others."""
        self.lengths = np.append(self.lengths, 0)
        nothing = np.full((1, self._slots.shape[1]), -1, dtype=np.int64)
        self._slots = np.concatenate([self._slots, nothing])

    def move_last(self, row: int, slots: Slots) -> None:
        """Lets the last row take the place of another, holding `slots` there."""
        self._slots[row], self.lengths[row] = -1, len(slots)
        self._slots[row, : len(slots)] = slots
        self._slots, self.lengths = self._slots[:-1], self.lengths[:-1]

    def copy(self) -> "TokenTable":
        """An independent table with the same content."""
        twin = TokenTable(self.num_rows)
        twin.lengths = self.lengths.copy()
        twin._slots = self._slots.copy()
        twin._stride = self._stride
        return twin

    def _owned(self) -> NDArray[np.bool_]:
        return np.arange(self._slots.shape[1]) < self.lengths[:, None]

    def _widen(self, length: int) -> None:
        missing = self._width_for(length) - self._slots.shape[1]
        if missing:
            pad = np.full((self.num_rows, missing), -1, dtype=np.int64)
            self._slots = np.concatenate([self._slots, pad], axis=1)

    def _width_for(self, length: int) -> int:
        width = self._slots.shape[1]
        return width if length <= width else max(length, width + width // 8)


@lru_cache(maxsize=8)
def _counted(num_new: int) -> NDArray[np.int64]:
    """1 to `num_new`."""
    counted = np.arange(1, num_new + 1)
    counted.setflags(write=False)
    return counted
