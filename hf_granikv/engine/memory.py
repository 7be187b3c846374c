"""What an agent keeps in the pools between its turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.pools import Prefix


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens that are computed and held.

    Attributes:
        token_ids: Their ids, after those of the prefix.
        parked: The row that holds them; forks share it. The first of them may be in what it reads,
            which is then more than the prefix.
        used_at: When they were used last, in turns of the engine.
    """

    token_ids: tuple[int, ...] = ()
    parked: ParkedRow | None = None
    used_at: int = 0


NOTHING = Kept()


@dataclass(eq=False)
class Memory:
    """What one agent holds after its prefix, from turn to turn.

    What is kept is replaced as a whole, so any thread may read it, and forget it.

    Attributes:
        prefix: The end of the chain of prefixes that the agent reads; None for none.
        kept: What it holds between its turns; nothing while one runs.
        is_closed: Whether nothing is to be kept any more.
    """

    prefix: Prefix | None
    kept: Kept
    is_closed: bool
    _make: Callable[[Prefix | None, Kept], "Memory"] = field(repr=False)
    _on_close: Callable[[], None] = field(repr=False)

    def fork(self) -> "Memory":
        """Gives another agent's memory that starts with the same tokens, held once for both."""
        return self._make(self.prefix, self.kept)

    def close(self) -> None:
        """Gives back what is held; a turn that runs keeps nothing for the next one."""
        self.is_closed = True
        self.kept = NOTHING
        self._on_close()

    @property
    def num_tokens(self) -> int:
        """Tokens held after those of the prefix."""
        return len(self.kept.token_ids)


def num_common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many ids at the head of `held` serve a row with the ids `wanted`, whose last one is computed."""
    length = min(len(held), len(wanted) - 1)
    if length <= 0:
        return 0
    differs = np.asarray(held[:length]) != np.asarray(wanted[:length])
    return int(differs.argmax()) if differs.any() else length
