"""One turn as the batch sees it."""

from dataclasses import dataclass, field
from typing import Any

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.engine.memory import Memory
from hf_granikv.engine.offload import OffloadedRow
from hf_granikv.engine.sampler import Sampler
from hf_granikv.engine.schedule import Seat
from hf_granikv.engine.turn import Turn
from hf_granikv.live_levels import num_between
from hf_granikv.pools import Prefix


@dataclass(eq=False, slots=True)
class Job:
    """A turn that waits or runs, and everything it resumes from.

    Attributes:
        turn: The caller's end of it.
        sampler: Chooses its tokens.
        token_ids: Its ids after the prefix: of the prompt, and of the answer so far.
        prefix: The end of the chain of prefixes that its prompt was said to start with.
        memory: What its agent keeps; None keeps nothing.
        order: Its arrival.
        row: Its row while it runs.
        num_held: How many of its ids are computed: in what it reads, and in that row. 0 as long as it
            has none.
        offloaded: What it keeps while it waits again after it ran.
        leaf: The end of the chain that it reads: of the prefix, or of what it shares after that.
        num_prompt: Ids of the prompt after the prefix.
        num_seen: The most that were ever held.
        is_suspect: Whether a forward with it has failed, and none has succeeded since.
        is_compared: Whether what it has in common with others has been looked for.
    """

    turn: Turn
    sampler: Sampler
    token_ids: list[int]
    prefix: Prefix | None = None
    memory: Memory | None = None
    order: int = 0
    row: Any = None
    num_held: int = 0
    offloaded: OffloadedRow | None = None
    leaf: Prefix | None = field(init=False)
    num_prompt: int = field(init=False)
    num_seen: int = 0
    is_suspect: bool = False
    is_compared: bool = False

    def __post_init__(self) -> None:
        """Counts the prompt."""
        self.leaf = self.prefix
        self.num_prompt = len(self.token_ids)

    @property
    def num_shared(self) -> int:
        """How many of its ids are in what it reads."""
        return num_between(self.prefix, self.leaf)

    def goes_on_from(self, parked: ParkedRow) -> bool:
        """Whether a row reads what this turn does, or an earlier part of that."""
        return parked.prefix is None or (self.leaf is not None and parked.prefix in self.leaf.chain)

    @property
    def num_private(self) -> int:
        """Tokens in its row."""
        return max(0, self.num_held - self.num_shared)

    @property
    def seat(self) -> Seat:
        """The job in the words of the schedule."""
        num_ids = len(self.token_ids) - self.num_shared
        return Seat(self.order, num_ids, self.num_private, self.num_to_come)

    @property
    def num_to_come(self) -> int:
        """The most ids that the answer can still get."""
        start = 0 if self.prefix is None else self.prefix.stop
        return self.sampler.max_length - start - len(self.token_ids)

    @property
    def num_at_most(self) -> int:
        """The most tokens it can come to hold; its last id is never computed."""
        return len(self.token_ids) + self.num_to_come - 1

    def next_ids(self, count: int) -> list[int]:
        """The ids that are computed next."""
        return self.token_ids[self.num_held : self.num_held + count]

    def holds_more(self, count: int) -> int:
        """Notes that the next ids are computed.

        Returns:
            How many of them are no first pass over an answer: of the prompt, or computed again.
        """
        self.num_held += count
        is_first = self.num_held - max(self.num_prompt, self.num_seen)
        self.num_seen = max(self.num_seen, self.num_held)
        return count - min(count, max(0, is_first))
