"""Who enters, who leaves and who computes how much in the next step: arithmetic on counts, no torch.

```
arrival   0        1        2          3          4
          running  running  running    waiting    waiting
          1 token  1 token  a chunk
```

Turns are served in the order of their arrival, and that is the only order there is: the oldest runs,
nobody overtakes it, and what it needs the youngest gives back. So the oldest always goes on, and
everybody is the oldest some day.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hf_granikv.errors import ColdPoolFullError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may take.

    Attributes:
        max_tokens: The most private tokens held, those of idle agents included; None for no limit.
        max_rows: The most turns that run at a time.
        max_step_tokens: The most tokens of one forward pass: one for each running answer first, the
            rest goes to prompts. Running answers always get theirs.
        lookahead: Tokens that each running turn must still be able to take when another one enters,
            so that it is not sent away again right after.
        tokens_per_row: How many tokens take as much as a row does beside its own; they count towards
            `max_tokens`.
        moves_rows: Whether a row that changes its batch is there twice meanwhile, within `max_tokens`:
            a turn enters when the longest one could be.
    """

    max_tokens: int | None = None
    max_rows: int = 64
    max_step_tokens: int = 256
    lookahead: int = 16
    tokens_per_row: int = 0
    moves_rows: bool = False

    def check_fits(self, num_tokens: int) -> None:
        """Checks that a turn can run to its end when it is alone.

        Args:
            num_tokens: The private tokens it holds in the end, at most.

        Raises:
            ColdPoolFullError: With the numbers and the remedy.
        """
        if self.max_tokens is None or num_tokens + self.tokens_per_row <= self.max_tokens:
            return
        beside = f" and {self.tokens_per_row} for its states" if self.tokens_per_row else ""
        raise ColdPoolFullError(
            f"a turn of up to {num_tokens} private tokens{beside} was asked, the budget is "
            f"{self.max_tokens} for all; raise max_cold_slots or max_bytes, shorten the "
            "message, or lower max_new_tokens."
        )

    def committed(self, seats: "Sequence[Seat]") -> int:
        """What turns take once all their ids are computed."""
        return sum(max(seat.num_ids, seat.num_held) + self.tokens_per_row for seat in seats)

    def ahead(self, seats: "Sequence[Seat]") -> int:
        """What has to be free beside when the last of these turns enters."""
        to_come = sum(min(seat.num_to_come, self.lookahead) for seat in seats)
        longest = max(seat.num_ids for seat in seats)
        return to_come + (longest + self.tokens_per_row) * self.moves_rows


@dataclass(frozen=True, slots=True)
class Seat:
    """A turn, as far as the schedule needs to know it.

    Attributes:
        order: Its arrival, counted over all turns.
        num_ids: Its private ids so far: of the prompt after the prefix, and of the answer.
        num_held: How many of these are computed and held.
        num_to_come: The most ids that the answer can still get.
    """

    order: int
    num_ids: int
    num_held: int = 0
    num_to_come: int = 1


@dataclass(frozen=True, slots=True)
class IdleTokens:
    """Private tokens that an agent keeps between its turns.

    Attributes:
        key: Who keeps them.
        num_tokens: How many.
        wanted_by: The arrival of the waiting turn that would start from them, and leave none behind.
    """

    key: Hashable
    num_tokens: int
    wanted_by: int | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    """What changes before a step, in this order.

    Attributes:
        evicted: The keys of idle tokens to be dropped.
        preempted: The running turns that wait again, with nothing held.
        admitted: The waiting turns that run from now on.
    """

    evicted: tuple[Hashable, ...] = ()
    preempted: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()


def next_moves(
    limits: Limits, running: Sequence[Seat], waiting: Sequence[Seat], idle: Sequence[IdleTokens]
) -> Moves:
    """Makes room for the ids that running turns have now, then lets waiting ones in.

    Afterwards the ids of all running turns and the idle tokens are within `max_tokens`, unless a
    single turn runs.

    Args:
        limits: What is allowed.
        running: In any order.
        waiting: In any order.
        idle: The one that was used longest ago first.
    """
    room = _Room(limits, idle)
    stays = sorted(running, key=lambda seat: seat.order)
    preempted: list[int] = []
    while not room.makes(limits.committed(stays)) and len(stays) > 1:
        preempted.append(stays.pop().order)
    if preempted:
        return Moves(tuple(room.evicted), tuple(preempted))
    admitted: list[int] = []
    for seat in sorted(waiting, key=lambda seat: seat.order):
        entered = [*stays, seat]
        if len(entered) > limits.max_rows:
            break
        committed, ahead = limits.committed(entered), limits.ahead(entered)
        can_go_on = room.could_make(committed + ahead)
        if stays and not can_go_on:
            break
        # a row that moves finds the room for it now
        room.makes(committed + ahead * (limits.moves_rows and can_go_on), enters=seat.order)
        stays = entered
        admitted.append(seat.order)
    return Moves(tuple(room.evicted), (), tuple(admitted))


def step_feeds(limits: Limits, running: Sequence[Seat]) -> dict[int, int]:
    """Shares the tokens of one forward pass out.

    Returns:
        The tokens that each turn computes, by its arrival; turns that get none are left out.
    """
    missing = {seat.order: seat.num_ids - seat.num_held for seat in running}
    feeds = {order: 1 for order, count in sorted(missing.items()) if count == 1}
    left = max(1, limits.max_step_tokens - len(feeds))
    for order, count in sorted(missing.items()):
        if count > 1 and left:
            feeds[order] = min(count, left)
            left -= feeds[order]
    return feeds


class _Room:
    """The budget, and the idle tokens that go when it is short."""

    def __init__(self, limits: Limits, idle: Sequence[IdleTokens]) -> None:
        self.evicted: list[Hashable] = []
        self._limit = limits.max_tokens
        self._per_row = limits.tokens_per_row
        # what a waiting turn is going to read goes last
        self._idle = sorted(idle, key=lambda tokens: tokens.wanted_by is not None)

    def could_make(self, num_tokens: int) -> bool:
        """Whether so many fit once nothing is idle any more."""
        return self._limit is None or num_tokens <= self._limit

    def makes(self, num_tokens: int, enters: int | None = None) -> bool:
        """Evicts until so many fit beside what is idle, if that is possible.

        Args:
            num_tokens: Of all that run, the one that enters included.
            enters: The turn that takes its own idle tokens over.
        """
        rest = [tokens for tokens in self._idle if enters is None or tokens.wanted_by != enters]
        while rest and not self.could_make(num_tokens + self._held(rest)):
            self.evicted.append(rest.pop(0).key)
        self._idle = rest
        return self.could_make(num_tokens + self._held(rest))

    def _held(self, idle: Sequence[IdleTokens]) -> int:
        return sum(tokens.num_tokens + self._per_row for tokens in idle)
