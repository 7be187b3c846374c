"""Which slots of a pool are free, and how many rows hold each of the others."""

import numpy as np
from numpy.typing import NDArray

from hf_granikv.errors import IntegrityError

Slots = NDArray[np.int64]


class SlotAllocator:
    """A free list over token slots, with one hold count per slot.

    ```
    slot    0   1   2   3   4   5   6   7
    holds   1   1   2   2   0   0   1   0      0 = free
            '-------'   '---'   '---'
            row 0       both    free run
    ```

    Freed slots can be handed out again at once. Contiguous runs are preferred, so that a reader
    can view a run in place.
    """

    def __init__(self) -> None:
        self._holds = np.zeros(0, dtype=np.int32)
        self._num_free = 0

    @property
    def num_slots(self) -> int:
        """Slots under management, free ones included."""
        return len(self._holds)

    @property
    def num_free(self) -> int:
        """Slots that no row holds."""
        return self._num_free

    def grow(self, num_slots: int) -> None:
        """Adds free slots at the end until there are `num_slots`."""
        extra = num_slots - self.num_slots
        if extra > 0:
            self._holds = np.concatenate([self._holds, np.zeros(extra, dtype=np.int32)])
            self._num_free += extra

    def shrink(self, num_slots: int) -> None:
        """Drops the slots behind the first `num_slots`, which are free."""
        dropped = self._holds[num_slots:]
        assert not dropped.any(), f"{int((dropped > 0).sum())} slots to drop are held"
        self._num_free -= len(dropped)
        self._holds = self._holds[:num_slots].copy()

    def free_below(self, num_slots: int) -> Slots:
        """The free ones among the first `num_slots`, in order."""
        return np.flatnonzero(self._holds[:num_slots] == 0)

    def move(self, src: Slots, dst: Slots) -> None:
        """Passes the holds of the slots `src` on to the free slots `dst`."""
        self._holds[dst], self._holds[src] = self._holds[src], 0

    def allocate(self, count: int) -> Slots:
        """Takes `count` free slots: the first run that holds them all, else the longest runs.

        Returns:
            `[count]` slots, each now held once.
        """
        assert count <= self._num_free, f"{count} slots asked, {self._num_free} free"
        if count == 0:
            return np.empty(0, dtype=np.int64)
        starts, lengths = self._free_runs()
        fitting = np.flatnonzero(lengths >= count)
        if len(fitting):
            start = starts[fitting[0]]
            slots = np.arange(start, start + count, dtype=np.int64)
        else:
            order = np.argsort(-lengths, kind="stable")
            runs = [np.arange(starts[i], starts[i] + lengths[i], dtype=np.int64) for i in order]
            slots = np.concatenate(runs)[:count]
        self._take(slots)
        return slots

    def try_take(self, slots: Slots) -> bool:
        """Takes exactly these distinct slots if all of them exist and are free."""
        try:
            holds = self._holds[slots]
        except IndexError:
            return False
        # a list is there sooner than a reduction
        if any(holds.tolist()):
            return False
        self._take(slots)
        return True

    def hold(self, slots: Slots) -> None:
        """Adds one hold per occurrence to slots that may be free."""
        is_new = np.unique(slots[self._holds[slots] == 0])
        np.add.at(self._holds, slots, 1)
        self._num_free -= len(is_new)

    def free(self, slots: Slots) -> None:
        """Drops one hold per occurrence; a slot without holds is free at once."""
        np.subtract.at(self._holds, slots, 1)
        touched = np.unique(slots)
        self._num_free += int((self._holds[touched] == 0).sum())

    def check_integrity(self, held: Slots) -> None:
        """Checks the counts against every hold there should be.

        Args:
            held: `[num_holds]` each held slot, as often as it is held.

        Raises:
            IntegrityError: If a slot was lost, doubled or freed while held.
        """
        expected = np.bincount(held, minlength=self.num_slots) if len(held) else self._holds * 0
        if len(expected) != self.num_slots or (expected != self._holds).any():
            raise IntegrityError(
                f"holds sum to {int(self._holds.sum())}, rows hold {len(held)} slots; "
                f"first difference at slot {int(np.argmax(expected[: self.num_slots] != self._holds))}."
            )
        live = int((self._holds > 0).sum())
        if live + self._num_free != self.num_slots:
            raise IntegrityError(f"free {self._num_free} + live {live} != {self.num_slots} slots.")

    def _take(self, slots: Slots) -> None:
        self._holds[slots] = 1
        self._num_free -= len(slots)

    def _free_runs(self) -> tuple[Slots, Slots]:
        is_free = np.concatenate([[False], self._holds == 0, [False]])
        edges = np.flatnonzero(is_free[1:] != is_free[:-1])
        starts, ends = edges[0::2], edges[1::2]
        return starts, ends - starts
