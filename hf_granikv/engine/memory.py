"""What an agent keeps in the pools between its turns."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_granikv.pools import Prefix

if TYPE_CHECKING:
    from collections import deque


@dataclass(frozen=True, slots=True)
class Kept:
    """Private tokens that are computed and held.

    Attributes:
        token_ids: Their ids, after those of the prefix.
        parked: The row that holds them; forks share it.
        used_at: When they were used last, in turns of the engine.
    """

    token_ids: tuple[int, ...] = ()
    parked: Any = None
    used_at: int = 0


NOTHING = Kept()


class Memory:
    """The private tokens of one agent, from turn to turn.

    Only the engine writes it. A memory that is forgotten gives its tokens back at the next step: what
    it kept goes to `trash`, as pools may be changed on the engine's thread alone.

    Args:
        prefix: The end of the chain of prefixes that the agent reads; None for none.
        trash: Where to leave what was kept.
        kept: What it starts with.

    Attributes:
        prefix: See above.
        is_closed: Whether nothing is to be kept any more.
    """

    def __init__(
        self, prefix: Prefix | None, trash: "deque[list[Kept]]", kept: Kept = NOTHING
    ) -> None:
        self.prefix = prefix
        self.is_closed = False
        self._box = [kept]
        weakref.finalize(self, trash.append, self._box).atexit = False

    @property
    def kept(self) -> Kept:
        """What is held now."""
        return self._box[0]

    @kept.setter
    def kept(self, kept: Kept) -> None:
        self._box[0] = kept

    @property
    def num_tokens(self) -> int:
        """Private tokens held."""
        return len(self.kept.token_ids)


def num_common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many ids at the head of `held` serve a row with the ids `wanted`, whose last one is computed."""
    length = min(len(held), len(wanted) - 1)
    if length <= 0:
        return 0
    differs = np.asarray(held[:length]) != np.asarray(wanted[:length])
    return int(differs.argmax()) if differs.any() else length
