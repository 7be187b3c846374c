"""Which rows of a batch begin with the same tokens: a trie, read off the sorted rows, and what to keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A node of the trie that more than one row passes.

    Attributes:
        num_tokens: Tokens at the head that the rows have in common; at least 1.
        rows: Every row that begins with them, ascending.
    """

    num_tokens: int
    rows: tuple[int, ...]


def shared_prefixes(rows: Sequence[Ints]) -> list[SharedPrefix]:
    """Finds every prefix that several rows share, as long as it can be for these rows.

    Two prefixes are either nested or over different rows. The work is that of sorting the rows and
    comparing neighbours: no token is looked at in Python.

    Args:
        rows: `[num_tokens]` token ids of each row, of one dtype, pads left out.

    Returns:
        The nodes of the trie at which rows part or end, most rows first, then the longest.
    """
    # rows with a common head lie side by side, whatever order their bytes give
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = np.array([common_head(rows[a], rows[b]) for a, b in pairwise(order)], dtype=np.int64)
    found = []
    runs = [(0, len(rows) - 1)] if len(rows) > 1 else []
    while runs:
        first, last = runs.pop()
        depth = int(common[first:last].min())
        if depth:
            found.append(SharedPrefix(depth, tuple(sorted(order[first : last + 1]))))
        # the rows part, or one of them ends, wherever neighbours have no more than this in common
        cuts = (first + np.flatnonzero(common[first:last] == depth)).tolist()
        starts, ends = [first, *(cut + 1 for cut in cuts)], [*cuts, last]
        runs += [(a, b) for a, b in zip(starts, ends, strict=True) if b > a]
    return sorted(found, key=lambda node: (-len(node.rows), -node.num_tokens, node.rows))


@dataclass(frozen=True, slots=True)
class Level:
    """Tokens that some rows are to share, after those that they share with others.

    Attributes:
        rows: Every row that reads them, ascending.
        start: Position of the first.
        stop: Position after the last.
        parent: Number of the level that ends where this one starts; None for the head of rows.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    parent: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of this level alone."""
        return self.stop - self.start


def worthwhile_levels(
    nodes: Sequence[SharedPrefix], lengths: Sequence[int], pays: Callable[[Level], bool]
) -> list[Level]:
    """Chooses what to store of a trie: from its root on, every level that pays by itself.

    Args:
        nodes: What `shared_prefixes` found.
        lengths: Tokens of each row. Every row computes its last token itself, to have something to
            predict from.
        pays: Whether the rows of a level gain from it.

    Returns:
        Parents before their children.
    """
    levels: list[Level] = []
    last_of: dict[int, int] = {}  # row -> the level it reads last
    for node in nodes:
        parent = last_of.get(node.rows[0])
        start = 0 if parent is None else levels[parent].stop
        stop = min(node.num_tokens, min(lengths[row] for row in node.rows) - 1)
        level = Level(node.rows, start, stop, parent)
        if stop > start and pays(level):
            last_of.update(dict.fromkeys(node.rows, len(levels)))
            levels.append(level)
    return levels


def common_head(a: Ints, b: Ints) -> int:
    """How many ids two rows have in common from the first one on."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
