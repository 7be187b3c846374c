"""Prefixes that live rows have come to share: made of what they hold, and held as long as they are read."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.journal import Journal
from hf_granikv.level_cuts import follow, graft, head_of
from hf_granikv.level_merges import merge
from hf_granikv.pools import Prefix


class LiveLevels:
    """Levels that nobody has asked for, after the prefixes of a cache.

    ```
    the caller's    [ text ]
    made here               [ history of three ][ of two of them ]
                                                [ of the third and a fourth ]
    ```

    The caller does not see them: his cache binds no rows to them, and may let go of what is his.

    Args:
        cache: Holds the caller's prefixes.
        journal: Takes what is decided.
    """

    def __init__(self, cache: AsymmetricPagedCache, journal: Journal) -> None:
        self.journal = journal
        self._cache = cache
        self._held = HeldPrefixes(cache.rows.hot)
        self._epoch = cache.rows.epoch

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in tuple(self)

    def __iter__(self) -> Iterator[Prefix]:
        # what the caller's cache has dropped as stale is stale here
        if self._epoch is not self._cache.rows.epoch:
            self._held.let_all_go()
            self._epoch = self._cache.rows.epoch
        return iter(self._held.all)

    @property
    def num_tokens(self) -> int:
        """Tokens of all levels."""
        return sum(level.num_tokens for level in self)

    @property
    def num_bytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.num_bytes for level in self)

    def longest(self, prefix: Prefix | None, token_ids: Sequence[int]) -> Prefix | None:
        """The end of the longest chain of levels after a prefix that some ids start with.

        Args:
            prefix: Where they start.
            token_ids: After those of the prefix.
        """
        longest, found = prefix, [prefix]
        while found:
            parent = found.pop()
            if num_between(prefix, parent) > num_between(prefix, longest):
                longest = parent
            start = num_between(prefix, parent)
            for level in (each for each in self if each.parent is parent):
                ids, wanted = token_ids[start : start + level.num_tokens], level.token_ids.numpy()
                if len(ids) == len(wanted) and ids[0] == wanted[0] and np.array_equal(ids, wanted):
                    found.append(level)
        return longest

    def promote(self, parked: ParkedRow, token_ids: Sequence[int]) -> Prefix:
        """Makes a level of the first private tokens of a row; see `AsymmetricPagedCache.promote`."""
        maker = self._cache.reading_alone(None)
        maker.rows.journal = self.journal
        of_maker, parent = maker.rows.prefixes, parked.prefix
        try:
            if parent is not None and parent in self:
                of_maker.hot.acquire(parent)
                of_maker.take(parent)
            level = maker.promote(parked, torch.tensor(token_ids))
            if level not in self:
                of_maker.hot.acquire(level)
                self._held.take(level)
        finally:
            of_maker.let_all_go()
        return level

    def head_of(self, level: Prefix, num_tokens: int) -> Prefix:
        """See `level_cuts.head_of`; a copy, since the rest may go before it does."""
        return head_of(self._held, level, num_tokens, copies=True)

    def graft(self, level: Prefix, head: Prefix) -> dict[Prefix, Prefix]:
        """See `level_cuts.graft`."""
        return graft(self._held, level, head, copies=True)

    def follow(self, replaced: dict[Prefix, Prefix]) -> dict[Prefix, Prefix]:
        """See `level_cuts.follow`."""
        return follow(self._held, replaced)

    def extended_once(self, leaves: Iterable[Prefix | None]) -> list[tuple[Prefix, Prefix]]:
        """The levels that nobody reads alone, each with the only one that extends it.

        Args:
            leaves: Where readers' chains end.
        """
        ends, held = set(leaves), tuple(self)
        num_children = Counter(level.parent for level in held)
        return [
            (level.parent, level)
            for level in held
            if level.parent in held and level.parent not in ends and num_children[level.parent] == 1
        ]

    def merge(self, level: Prefix, child: Prefix) -> dict[Prefix, Prefix]:
        """See `level_merges.merge`."""
        return merge(self._held, level, child, self._cache.rows.layers)

    def keep_only(self, leaves: Iterable[Prefix | None]) -> None:
        """Lets go of every level that is in none of these chains."""
        read = {level for leaf in set(leaves) if leaf is not None for level in leaf.chain}
        for level in set(self) - read:
            self._held.let_go(level)


def num_between(prefix: Prefix | None, leaf: Prefix | None) -> int:
    """Tokens of a chain after a prefix in it."""
    return (0 if leaf is None else leaf.stop) - (0 if prefix is None else prefix.stop)
