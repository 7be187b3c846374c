"""What all agents of an engine keep between their turns."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.engine.job import Job
from hf_granikv.engine.memory import NOTHING, Kept, Memory
from hf_granikv.engine.schedule import IdleTokens
from hf_granikv.pools import Prefix


class Memories:
    """The memories of an engine, held weakly.

    `make` may be called on any thread, everything else on the engine's.

    Attributes:
        on_close: Called when one is closed, on any thread.
    """

    def __init__(self) -> None:
        self.on_close: Callable[[], None] = lambda: None
        self._all: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._new: deque[weakref.ref[Memory]] = deque()
        self._clock = 0

    def make(self, prefix: Prefix | None, kept: Kept = NOTHING) -> Memory:
        """Gives a memory of an agent that reads these prefixes."""
        memory = Memory(prefix, kept, False, self.make, lambda: self.on_close())
        self._new.append(weakref.ref(memory))
        return memory

    def keep(self, memory: Memory, token_ids: tuple[int, ...], parked: Any) -> None:
        """Notes what a turn has left."""
        self._clock += 1
        _put(memory, Kept(token_ids, parked, self._clock))

    def __iter__(self) -> Iterator[Memory]:
        self._register()
        return iter(list(self._all))

    def exchange(self, parked: Mapping[int, ParkedRow]) -> None:
        """Puts rows that hold the same in the place of parked ones, by their keys."""
        for memory in self:
            kept = memory.kept
            if id(kept.parked) in parked:
                _put(memory, replace(kept, parked=parked[id(kept.parked)]))

    def forget(self, keys: Iterable[int]) -> int:
        """Drops idle tokens by their keys; gives how many agents lost theirs."""
        gone, losers = set(keys), 0
        for memory in self._all if gone else ():
            if id(memory.kept.parked) in gone:
                memory.kept = NOTHING
                losers += 1
        return losers

    def idle(self, waiting: Iterable[Job] = ()) -> list[IdleTokens]:
        """Gives what is kept, each parked row once, the one used longest ago first."""
        self._register()
        wanted_by = {id(job.memory): job.order for job in waiting}
        used_at: dict[int, int] = {}
        num_tokens: dict[int, int] = {}
        orders: dict[int, list[int | None]] = {}
        for memory in self._all:
            kept = memory.kept
            if kept.parked is not None:
                key = id(kept.parked)
                used_at[key] = max(kept.used_at, used_at.get(key, 0))
                num_tokens[key] = kept.parked.num_tokens
                orders.setdefault(key, []).append(wanted_by.get(id(memory)))
        return [
            # shared with a fork it stays when one of them goes on
            IdleTokens(key, num_tokens[key], orders[key][0] if len(orders[key]) == 1 else None)
            for key in sorted(used_at, key=used_at.__getitem__)
        ]

    @property
    def parked(self) -> list[ParkedRow]:
        """The rows that hold what is kept, each once."""
        rows = (memory.kept.parked for memory in self)
        return list({id(row): row for row in rows if row is not None}.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept, each parked row once."""
        return sum(row.num_bytes for row in self.parked)

    def _register(self) -> None:
        while self._new:
            memory = self._new.popleft()()
            if memory is not None:
                self._all.add(memory)


def _put(memory: Memory, kept: Kept) -> None:
    memory.kept = kept
    # by another thread, meanwhile
    if memory.is_closed:
        memory.kept = NOTHING
