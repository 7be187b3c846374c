"""Sees to it that the pools of several batches stay within a number of bytes together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools import ColdPool
from hf_granikv.pools.budget import Need, PoolBudget, shared_out


class Coming(NamedTuple):
    """What is about to come into a pool.

    Attributes:
        pool: The pool.
        num_tokens: Tokens, of all its rows together.
        num_rows: Rows that it does not have yet.
        longest: Tokens of its longest row afterwards.
    """

    pool: ColdPool
    num_tokens: int
    num_rows: int
    longest: int

    @classmethod
    def step(cls, pool: ColdPool, num_rows: int, q_len: int) -> "Coming":
        """A step of all its rows."""
        longest = pool.table.max_length + q_len
        return cls(pool, num_rows * q_len, num_rows - pool.table.num_rows, longest)

    @classmethod
    def row(cls, pool: ColdPool, length: int) -> "Coming":
        """A row that holds tokens already."""
        return cls(pool, length, 1, max(length, pool.table.max_length))


class RowBudget:
    """Makes room in some pools at the expense of what is free in others.

    Args:
        sizes: What there is, and what tokens and rows take of it.
        idle_bytes: Gives the bytes that rows outside of all pools hold now.
    """

    def __init__(self, sizes: PoolBudget, idle_bytes: Callable[[], int]) -> None:
        self.sizes = sizes
        self._idle_bytes = idle_bytes

    def make_room(
        self,
        pools: Sequence[ColdPool],
        num_rows: int,
        coming: Sequence[Coming],
        num_copied: int = 0,
        bytes_beside: int = 0,
    ) -> None:
        """Gives every pool a limit under which it can take what comes.

        To be called before anything grows, and while no forward pass runs: slots may move.

        Args:
            pools: All that hold something.
            num_rows: Rows in them.
            coming: What comes, each into another pool; it may be one that is new.
            num_copied: Tokens that are about to be copied to outside of all pools.
            bytes_beside: What else is held outside of them now, idle rows aside.

        Raises:
            ColdPoolFullError: If there is no room; nothing has changed.
        """
        sizes, comes = self.sizes, {each.pool: each for each in coming}
        is_new = [pool for pool in comes if pool not in pools]
        beside = bytes_beside + self._idle_bytes() + (num_rows + len(is_new)) * sizes.bytes_per_row
        needs = []
        for pool in (*pools, *is_new):
            table, its = pool.table, comes.get(pool, Coming(pool, 0, 0, 0))
            longest = max(table.max_length, its.longest)
            beside += table.nbytes_for(table.num_rows + its.num_rows, longest)
            needs.append(Need(pool.num_slots, pool.num_tokens + its.num_tokens))
        left = max(0, sizes.room_bytes - beside) // sizes.bytes_per_token - num_copied
        for pool, grant in zip((*pools, *is_new), shared_out(left, needs), strict=True):
            pool.limit = grant.limit
            pool.shrink(grant.num_kept)


def check_slots(limit: int | None, num_used: int, num_new: int) -> None:
    """Checks that new tokens are within the `cold_slots` of a cache.

    Raises:
        ColdPoolFullError: With the numbers and the remedy.
    """
    if limit is not None and num_used + num_new > limit:
        raise ColdPoolFullError(
            f"{limit - num_used} free slots of cold_slots={limit}, {num_new} needed; raise "
            "cold_slots, run fewer rows, or generate fewer tokens."
        )
