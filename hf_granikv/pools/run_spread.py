"""Runs that move further apart, into a larger storage."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunSpread:
    """Rows that lie as runs at one distance, and are to lie at a larger one.

    ```
    |row 0 ..|row 1 ..|row 2 ..|   ->   |row 0 ..  |row 1 ..  |row 2 ..  |
    ```

    Attributes:
        num_rows: Rows.
        length: Tokens of the longest; at most `before`.
        before: The distance, in slots.
        after: The distance to come, no less.
    """

    num_rows: int
    length: int
    before: int
    after: int

    def copy(self, storage: Tensor, larger: Tensor) -> None:
        """Copies the rows from `[num_kv_heads, num_slots, head_dim]` to one with room for them.

        All the rest of that one becomes zero; it need not be.
        """
        runs = self._runs(larger, self.after)
        runs.narrow(2, 0, self.length).copy_(
            self._runs(storage, self.before).narrow(2, 0, self.length)
        )
        runs.narrow(2, self.length, self.after - self.length).zero_()
        whole = self.num_rows * self.after
        larger.narrow(1, whole, larger.shape[1] - whole).zero_()

    def undo(self, larger: Tensor) -> None:
        """Moves the rows back to where they were, in place; nothing is allocated."""
        for row in range(1, self.num_rows):
            distance = row * (self.after - self.before)
            # pieces as long as the way, so that none overlaps with where it goes
            for start in range(0, self.length if distance else 0, max(1, distance)):
                num_tokens = min(distance, self.length - start)
                source = larger.narrow(1, row * self.after + start, num_tokens)
                larger.narrow(1, row * self.before + start, num_tokens).copy_(source)

    def _runs(self, storage: Tensor, distance: int) -> Tensor:
        whole = storage.narrow(1, 0, self.num_rows * distance)
        return whole.unflatten(1, (self.num_rows, distance))
