"""The prefixes that one cache holds, and which of them the next batch starts from."""

from collections.abc import Mapping, Sequence
from weakref import finalize

from hf_granikv.pools import HotPool, Prefix
from hf_granikv.row_prefixes import RowPrefixes, repeated
from hf_granikv.wording import counted


class HeldPrefixes:
    """Holds on the prefixes of a pool, dropped when this object goes.

    Args:
        hot: The pool, shared with every fork.

    Attributes:
        bound: What the rows of the next batch start from; None for the only prefix there is.
        has_dropped: Whether there were some that are gone.
    """

    def __init__(self, hot: HotPool) -> None:
        self.hot = hot
        self.bound: RowPrefixes | None = None
        self.has_dropped = False
        self._holds: list[tuple[Prefix, finalize]] = []

    def __bool__(self) -> bool:
        return bool(self._holds)

    @property
    def all(self) -> tuple[Prefix, ...]:
        """What is held, in the order in which it came."""
        return tuple(dict.fromkeys(prefix for prefix, _ in self._holds))

    @property
    def any(self) -> Prefix | None:
        """One of them."""
        return self._holds[0][0] if self._holds else None

    @property
    def only(self) -> Prefix | None:
        """The one that every row starts from; None if there is none, or a choice."""
        held = self.all
        return held[0] if len(held) == 1 and held[0].parent is None else None

    @property
    def levels(self) -> set[Prefix]:
        """What is held and what that extends."""
        return {level for prefix in self.all for level in prefix.chain}

    @property
    def longest(self) -> int:
        """Tokens of the longest chain that the next batch starts from, as far as that is known."""
        if self.bound is not None:
            return self.bound.longest
        return 0 if self.only is None else self.only.stop

    def check_takes(self, num_rows: int) -> None:
        """Checks that a prefix may come where so many rows are held.

        Raises:
            ValueError: If they started without any.
        """
        if num_rows and not self:
            raise ValueError(
                f"the cache holds {counted(num_rows, 'row')} already; call cache.reset() first, or build "
                "another cache."
            )

    def bind(self, leaves: Sequence[Prefix | None]) -> None:
        """Lets the rows of the next batches start from these chains, whole."""
        self.bound = RowPrefixes.whole(leaves)

    def rebind(self, replaced: Mapping[Prefix, Prefix]) -> None:
        """Lets bound rows start from others in the place of some prefixes: the same ids in other parts."""
        if self.bound is not None:
            self.bound = self.bound.exchanged(replaced)

    def starting_rows(self, num_rows: int) -> RowPrefixes:
        """What so many rows start from.

        Raises:
            ValueError: If it is not known which of several prefixes they read.
        """
        if self.bound is not None:
            return repeated(self.bound, num_rows)
        if self and self.only is None:
            raise ValueError(
                f"the cache holds {len(self.levels)} prefixes and no batch is bound to them; call "
                "cache.bind(input_ids, attention_mask) with the prompts first."
            )
        return RowPrefixes.whole([self.only] * num_rows)

    def take(self, prefix: Prefix) -> None:
        """Takes over one hold of a prefix, until `let_go` or the end of this object."""
        hold = finalize(self, self.hot.release, prefix)
        hold.atexit = False
        self._holds.append((prefix, hold))

    def let_go(self, prefix: Prefix) -> None:
        """Drops one hold, and the binding if it reads what is gone then.

        Raises:
            ValueError: If it is not held.
        """
        found = next((held for held in self._holds if held[0] is prefix), None)
        if found is None:
            raise ValueError(f"this cache does not hold {prefix}; release a prefix it prefilled.")
        self._holds.remove(found)
        self.has_dropped = True
        found[1]()
        if self.bound is not None and not self.serve(self.bound):
            self.bound = None

    def let_all_go(self) -> None:
        """Drops every hold, and the binding."""
        for _, hold in self._holds:
            hold()
        self.has_dropped = self.has_dropped or bool(self._holds)
        self._holds, self.bound = [], None

    def serve(self, reads: RowPrefixes) -> bool:
        """Whether everything that rows read is held."""
        return self.levels.issuperset(leaf for leaf in reads.leaves if leaf is not None)

    def copy_from(self, other: "HeldPrefixes") -> None:
        """Holds what another one over the same pool holds."""
        for prefix, _ in other._holds:
            self.hot.acquire(prefix)
            self.take(prefix)
        self.bound, self.has_dropped = other.bound, other.has_dropped
