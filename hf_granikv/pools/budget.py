"""How several pools share a number of bytes: arithmetic, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools.layout import SCATTERED_GROWTH

# one number for each token of a row, an eighth more where the table has just grown
TABLE_BYTES_PER_TOKEN = 9


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes for the private tokens of several pools.

    ```
    max_bytes   [ slots, tables, states: room_bytes              | one tensor of every pool ]
    ```

    A pool that changes its size holds one tensor twice for a moment. As much is set aside, so
    `max_bytes` are not exceeded then either.

    Attributes:
        max_bytes: All of them.
        bytes_per_token: Of its keys and values in all layers.
        largest_bytes_per_token: Those in the largest tensor.
        bytes_per_row: What a row holds beside its tokens: states.
    """

    max_bytes: int
    bytes_per_token: int
    largest_bytes_per_token: int
    bytes_per_row: int = 0

    @property
    def room_bytes(self) -> int:
        """What may be held while no pool changes its size."""
        twice = self.bytes_per_token + self.largest_bytes_per_token
        return self.max_bytes * self.bytes_per_token // twice

    @property
    def num_tokens(self) -> int:
        """Private tokens that fit, those that `tokens_per_row` stands for included."""
        return self.room_bytes // (self.bytes_per_token + TABLE_BYTES_PER_TOKEN)

    def bytes_for(self, num_tokens: int) -> int:
        """The least `max_bytes` in which so many tokens would fit."""
        held = num_tokens * (self.bytes_per_token + TABLE_BYTES_PER_TOKEN)
        return -(
            -held * (self.bytes_per_token + self.largest_bytes_per_token) // self.bytes_per_token
        )

    @property
    def tokens_per_row(self) -> int:
        """How many tokens take as much as a row does beside its own, rounded up."""
        return -(-self.bytes_per_row // self.bytes_per_token)


class Need(NamedTuple):
    """What a pool has, and what will be in it.

    Attributes:
        num_slots: Slots that it has.
        num_tokens: Tokens that it must be able to hold.
    """

    num_slots: int
    num_tokens: int


class Grant(NamedTuple):
    """What a pool gets.

    Attributes:
        num_kept: Slots that it may keep of those it has, before any pool grows.
        limit: Slots that it may have.
    """

    num_kept: int
    limit: int


def shared_out(num_slots: int, needs: Sequence[Need]) -> list[Grant]:
    """Lets every pool have what it needs; what is left over is there for growth.

    Free slots are taken away only where others need them: down to a little room first, all of them
    if that does not do.

    Args:
        num_slots: Slots of all pools together.
        needs: One for each pool.

    Raises:
        ColdPoolFullError: If that is less than they need.
    """
    num_needed = sum(need.num_tokens for need in needs)
    if num_needed > num_slots:
        raise ColdPoolFullError(
            f"{num_needed} private tokens are to be held, {num_slots} fit in what the budget leaves; "
            "raise max_bytes, run fewer rows, or generate fewer tokens."
        )
    kept = [max(need) for need in needs]
    for keeps_room in (True, False):
        # whoever has most to spare gives first
        for i in sorted(range(len(needs)), key=lambda i: needs[i].num_tokens - kept[i]):
            if sum(kept) <= num_slots:
                break
            num_tokens = needs[i].num_tokens
            kept[i] = min(kept[i], int(num_tokens * SCATTERED_GROWTH) if keeps_room else num_tokens)
    spare = num_slots - sum(kept)
    return [
        Grant(
            min(num_kept, need.num_slots), num_kept + spare * need.num_tokens // max(1, num_needed)
        )
        for num_kept, need in zip(kept, needs, strict=True)
    ]
