"""Which stored prefix each row of a batch reads, and which rows read the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_granikv.pools import Prefix
from hf_granikv.pools.row_states import LayerStates
from hf_granikv.views import PrefixGroup, PrefixPart
from hf_granikv.wording import counted

Ints = NDArray[np.int64]


class Reading(NamedTuple):
    """Rows that read the same tokens of one stored prefix."""

    group: PrefixGroup
    prefix: Prefix


@dataclass(frozen=True, eq=False)
class RowPrefixes:
    """The chain of prefixes that each row reads. Immutable, so what it tells is worked out once.

    ```
    row 0   [ system ][ document A      ]
    row 1   [ system ][ document A      ]      groups: system 0-3, document A 0-1, document B 2
    row 2   [ system ][ document B  ]
    row 3   [ system ]
    ```

    Attributes:
        leaves: The last prefix of each row's chain; None for a row that reads none.
        lengths: `[num_rows]` tokens of the chain that the row sees: all, or the first ones.
    """

    leaves: tuple[Prefix | None, ...]
    lengths: Ints
    _parts: dict[int, tuple[PrefixPart, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, leaves: Sequence[Prefix | None]) -> "RowPrefixes":
        """Rows that see all of their chains."""
        lengths = [0 if leaf is None else leaf.stop for leaf in leaves]
        return cls(tuple(leaves), np.array(lengths, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.leaves)

    @cached_property
    def longest(self) -> int:
        """Prefix tokens of the row that sees most."""
        return max(self.lengths.tolist(), default=0)

    @property
    def longest_chain(self) -> int:
        """Tokens of the longest chain, seen or not."""
        return int(self.chain_lengths.max(initial=0))

    @property
    def shortest_chain(self) -> int:
        """Tokens of the shortest chain, seen or not; 0 if some row reads none."""
        return int(self.chain_lengths.min(initial=self.longest_chain))

    @cached_property
    def is_even(self) -> bool:
        """Whether all rows see the same number of tokens."""
        return len(set(self.lengths.tolist())) <= 1

    @cached_property
    def chain_lengths(self) -> Ints:
        """`[num_rows]` tokens of the whole chains."""
        return np.array([0 if p is None else p.stop for p in self.leaves], dtype=np.int64)

    def seeing(self, lengths: Ints) -> "RowPrefixes":
        """The same chains, of which rows see other numbers of tokens."""
        return RowPrefixes(self.leaves, lengths)

    def shortened(self, num_tokens: int) -> "RowPrefixes":
        """The same chains without the last tokens."""
        return self.seeing(np.maximum(self.lengths - num_tokens, 0)) if num_tokens else self

    def selected(self, indices: Ints) -> "RowPrefixes":
        """Row i as the former row `indices[i]`."""
        leaves = tuple(self.leaves[i] for i in indices)
        lengths = self.lengths[indices]
        is_same = leaves == self.leaves and np.array_equal(lengths, self.lengths)
        return self if is_same else RowPrefixes(leaves, lengths)

    def joined(self, leaf: Prefix | None, length: int) -> "RowPrefixes":
        """With one more row behind the others."""
        return RowPrefixes((*self.leaves, leaf), np.append(self.lengths, length))

    def exchanged(self, replaced: Mapping[Prefix, Prefix]) -> "RowPrefixes":
        """With other prefixes in the place of some, which have the same ids in other parts."""
        if replaced.keys().isdisjoint(self.leaves):
            return self
        leaves = (leaf and replaced.get(leaf, leaf) for leaf in self.leaves)
        return RowPrefixes(tuple(leaves), self.lengths)

    def column_of_prefix(self) -> NDArray[np.bool_]:
        """`[num_rows, longest]` the prefix columns of a mask: pads before those who see less."""
        return np.arange(self.longest) >= (self.longest - self.lengths)[:, None]

    def states(self) -> tuple[LayerStates, ...]:
        """The states that all rows start from; none without layers that keep states."""
        leaf = self.leaves[0] if self.leaves else None
        return () if leaf is None else leaf.states_at(int(self.lengths[0]))

    def ids(self, row: int) -> Ints:
        """The ids of the chain of a row, all of them."""
        leaf = self.leaves[row]
        return np.zeros(0, dtype=np.int64) if leaf is None else leaf.chain_ids

    def readings(self) -> tuple[Reading, ...]:
        """Who reads what; parents before their children."""
        return self._readings

    def parts(self, layer_idx: int) -> tuple[PrefixPart, ...]:
        """What a layer has stored of what is read, worked out once, in the order of `readings`."""
        parts = self._parts.get(layer_idx)
        if parts is None:
            parts = tuple(_part(reading, layer_idx) for reading in self.readings())
            self._parts[layer_idx] = parts
        return parts

    @cached_property
    def _readings(self) -> tuple[Reading, ...]:
        rows_of: dict[tuple[int, Prefix, int], list[int]] = {}
        for row, (leaf, length) in enumerate(zip(self.leaves, self.lengths.tolist(), strict=True)):
            for depth, level in enumerate(() if leaf is None else leaf.levels):
                if length > level.reads_from:
                    rows_of.setdefault((depth, level, min(length, level.stop)), []).append(row)
        return tuple(
            Reading(PrefixGroup(self._rows(rows), depth, level.reads_from, stop), level)
            for (depth, level, stop), rows in sorted(rows_of.items(), key=lambda item: item[0][0])
        )

    def _rows(self, rows: list[int]) -> Ints | None:
        return None if len(rows) == self.num_rows else np.array(rows, dtype=np.int64)


def _part(reading: Reading, layer_idx: int) -> PrefixPart:
    group, prefix = reading
    keys, values = prefix.keys[layer_idx], prefix.values[layer_idx]
    start = prefix.starts[layer_idx]
    if group.stop < prefix.stop:
        num_seen = max(0, group.stop - start)
        keys, values = keys[:, :num_seen], values[:, :num_seen]
    return PrefixPart(group, keys, values, start)


NO_ROWS = RowPrefixes.whole(())


def repeated(bound: RowPrefixes, num_rows: int) -> RowPrefixes:
    """The rows that a batch was bound with, each as often as samples or beams make of it.

    Raises:
        ValueError: If that does not give `num_rows`.
    """
    times = num_rows // max(1, bound.num_rows)
    if times * bound.num_rows != num_rows or not times:
        raise ValueError(
            f"the batch has {counted(num_rows, 'row')}, cache.bind was called with {bound.num_rows}; bind the "
            "prompts of this batch."
        )
    return bound.selected(np.repeat(np.arange(bound.num_rows), times))
