"""Finding the longest stored chain that the ids of a row start with."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_granikv.pools import Prefix
from hf_granikv.pools.hot import prefix_digest

Ints = NDArray[np.int64]

# of a text, tokens at its end that may be others where more text follows, and the least before them:
# short texts, such as tags, differ in their last tokens on purpose
_MOST_SEAM, _LEAST_HEAD = 2, 16
_SEAM = (
    "Text that ends a prefix may be cut into other tokens where more text follows; end it in a line "
    "break, or concatenate ids."
)


class PrefixLookup:
    """Prefixes by the SHA-256 digest of what they hold; equal ids under other salts stay apart.

    Args:
        prefixes: What may be found, with all that they extend.
    """

    def __init__(self, prefixes: Iterable[Prefix]) -> None:
        known = {level.digest: level for prefix in prefixes for level in prefix.chain}
        self._by_digest = known
        self._lengths: dict[bytes, set[int]] = defaultdict(set)
        # by what comes before: prefixes by their salt and all but their last tokens
        self._heads: dict[bytes, dict[tuple[str | None, bytes], Prefix]] = {}
        for level in known.values():
            self._lengths[_digest(level.parent)].add(level.num_tokens)

    def get(self, parent: Prefix | None, salt: str | None, token_ids: Ints) -> Prefix | None:
        """The prefix with these ids after its parent's, if there is one."""
        return self._by_digest.get(prefix_digest(_digest(parent), salt, token_ids))

    def longest(self, token_ids: Ints, salt: str | None) -> Prefix | None:
        """The longest chain under a salt that the ids start with; None if there is none.

        Of several with the same ids, one of the fewest levels.
        """
        best: Prefix | None = None
        found: list[Prefix | None] = [None]
        while found:
            parent = found.pop()
            if parent is not None and (best is None or _rank(parent) > _rank(best)):
                best = parent
            start = 0 if parent is None else parent.stop
            for num_tokens in self._lengths.get(_digest(parent), ()):
                given = token_ids[start : start + num_tokens]
                child = self.get(parent, salt, given) if len(given) == num_tokens else None
                if child is not None:
                    found.append(child)
        return best

    def why_less(
        self,
        rows: Sequence[Ints],
        salts: Sequence[str | None],
        leaves: Sequence[Prefix | None],
    ) -> str | None:
        """Says how rows that share nothing, or lack the last tokens of a chain, come by that.

        Args:
            rows: The ids of each.
            salts: The salt of each.
            leaves: What was found for each.

        Returns:
            A warning for who asked for sharing; None where nothing is amiss.
        """
        if not rows:
            return None
        if not any(leaves):
            return f"nothing is shared: {self._why_none(rows, salts)}"
        for i, (row, salt, leaf) in enumerate(zip(rows, salts, leaves, strict=True)):
            start = 0 if leaf is None else leaf.stop
            if (level := self._nearly(row[start:], salt, leaf)) is not None:
                num_common = _num_common(row[start:], level.token_ids.numpy())
                if start + num_common == len(row):
                    continue
                return (
                    f"less is shared than could be, if row {i} was to begin with all of a prefix: after "
                    f"{start} tokens that it shares it has the first {num_common} of {level.num_tokens} more, "
                    f"and reads none of them. {_SEAM}"
                )
        return None

    def _nearly(self, ids: Ints, salt: str | None, parent: Prefix | None) -> Prefix | None:
        """A prefix that ids begin with but for its last tokens, in whose place they have others."""
        ahead = _digest(parent)
        lengths = self._lengths.get(ahead)
        if not lengths:
            return None
        if ahead not in self._heads:
            self._heads[ahead] = {
                (level.salt, level.token_ids.numpy()[:-num_seam].tobytes()): level
                for level in self._by_digest.values()
                for num_seam in range(1, _MOST_SEAM + 1)
                if level.parent is parent
            }
        heads = {length - num_seam for length in lengths for num_seam in range(1, _MOST_SEAM + 1)}
        found = (
            self._heads[ahead].get((salt, ids[:head].tobytes()))
            for head in sorted(heads, reverse=True)
            if _LEAST_HEAD <= head < len(ids)
        )
        return next((level for level in found if level is not None), None)

    def _why_none(self, rows: Sequence[Ints], salts: Sequence[str | None]) -> str:
        best, of, at = 0, 0, None
        for i, (row, salt) in enumerate(zip(rows, salts, strict=True)):
            for level in self._by_digest.values():
                if level.salt == salt and level.parent is None:
                    num_common = _num_common(row, level.chain_ids)
                    if at is None or num_common > best:
                        best, of, at = num_common, level.num_tokens, i
        if at is None:
            return f"no prefix is held under the salt of any row bound, of {len(rows)}."
        return (
            f"no row bound, of {len(rows)}, starts with a prefix that is held; the nearest, row "
            f"{at}, has its first {best} tokens in common with one of {of}. {_SEAM}"
        )

    def leaves(self, rows: Iterable[Ints], salts: Iterable[str | None]) -> list[Prefix | None]:
        """The longest chain of each row under its salt."""
        return [self.longest(row, salt) for row, salt in zip(rows, salts, strict=True)]


def _digest(parent: Prefix | None) -> bytes:
    """What the digest of a prefix says of the one that it extends."""
    return b"" if parent is None else parent.digest


def _rank(leaf: Prefix) -> tuple[int, int]:
    return leaf.stop, -len(leaf.chain)


def _num_common(a: Ints, b: Ints) -> int:
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
