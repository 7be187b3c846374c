"""Prefixes that live rows have come to share: made of what they hold, and held as long as they are read."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.journal import Journal
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
                ids = token_ids[start : start + level.num_tokens]
                if np.array_equal(ids, level.token_ids.numpy()):
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
        """Makes a level of the first tokens of one, or gives that one if these are all; a copy."""
        if num_tokens == level.num_tokens:
            return level
        return self._part(level, 0, num_tokens, level.parent, level.num_fused)

    def graft(self, level: Prefix, head: Prefix) -> dict[Prefix, Prefix]:
        """Replaces a level that starts with the ids of another one by what comes after that.

        Args:
            level: The level.
            head: A level of the first ids of it, after the same prefix.

        Returns:
            For the level, and for all that extend it, what readers have to read instead: the same
            ids in other parts. They are let go of here.
        """
        replaced: dict[Prefix, Prefix] = {level: head}
        if head.stop < level.stop:
            replaced[level] = self._part(level, head.num_tokens, level.num_tokens, head, 0)
        for below in sorted(self, key=lambda each: each.start):
            if below.parent in replaced:
                parent = replaced[below.parent]
                replaced[below] = self._part(below, 0, below.num_tokens, parent, below.num_fused)
        for old in replaced:
            self._held.let_go(old)
        return replaced

    def keep_only(self, leaves: Iterable[Prefix | None]) -> None:
        """Lets go of every level that is in none of these chains."""
        read = {level for leaf in set(leaves) if leaf is not None for level in leaf.chain}
        for level in set(self) - read:
            self._held.let_go(level)

    def _part(
        self, level: Prefix, start: int, stop: int, parent: Prefix | None, num_fused: int
    ) -> Prefix:
        """Stores some tokens of a level after another prefix; all of them are not copied."""
        pairs = []
        for keys, values, first in zip(level.keys, level.values, level.starts, strict=True):
            # what it keeps of its parents stays with its first part
            own = slice(level.start + start - first if start else 0, level.start + stop - first)
            pairs.append((keys[:, own], values[:, own]))
        part = self._held.hot.seal(
            level.token_ids[start:stop],
            pairs,
            parent=parent,
            salt=level.salt,
            num_fused=num_fused,
            saver=level.saver,
        )
        self._held.take(part)
        return part


def can_be_cut(level: Prefix) -> bool:
    """Whether every layer has stored all tokens of a level, so that it can end earlier."""
    return not level.states and all(first <= level.start for first in level.starts)


def num_between(prefix: Prefix | None, leaf: Prefix | None) -> int:
    """Tokens of a chain after a prefix in it."""
    return (0 if leaf is None else leaf.stop) - (0 if prefix is None else prefix.stop)
