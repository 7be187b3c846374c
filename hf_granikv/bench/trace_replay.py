"""Requests replayed against several engines at once, each with a clock of its own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hf_granikv.bench.trace_engines import TraceEngine
from hf_granikv.bench.trace_load import Request


@dataclass
class Log:
    """What an engine did, by its own clock.

    Attributes:
        clock_s: Seconds since the first request came.
        num_taken: Requests taken.
        tokens: The answer of each request.
        times_s: When each token was there.
        peak_bytes: The most that was held after a step.
    """

    clock_s: float = 0.0
    num_taken: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0

    def first_token_s(self, requests: Sequence[Request]) -> list[float]:
        """Seconds from the arrival of each request to its first token."""
        return [self.times_s[r.name][0] - r.arrival_s for r in requests]

    def between_tokens_s(self) -> list[float]:
        """Seconds between the tokens of an answer, of all answers."""
        return [
            later - earlier for times in self.times_s.values() for earlier, later in pairwise(times)
        ]

    def tokens_per_s(self) -> float:
        """Tokens of all answers, over the time from the first arrival to the last token."""
        return sum(map(len, self.tokens.values())) / self.clock_s


def replay(engines: Sequence[TraceEngine], requests: Sequence[Request]) -> dict[str, Log]:
    """Lets each engine answer all requests.

    Time is virtual: a step advances the clock of its engine by what it took, an engine without work
    skips to the next arrival, and the engine whose clock is behind goes next. So all of them live
    through the same stretch of a machine that others use too, and none waits or competes with another
    for its cores. An engine that runs a loop in real time sees the same: what has come is known to it
    between two steps, and nothing else happens meanwhile.

    Args:
        engines: They have computed the prefixes.
        requests: In the order of their arrival.
    """
    logs = {engine.name: Log() for engine in engines}
    busy = list(engines)
    while busy:
        engine = min(busy, key=lambda each: logs[each.name].clock_s)
        log = logs[engine.name]
        if engine.is_idle and log.num_taken < len(requests):
            log.clock_s = max(log.clock_s, requests[log.num_taken].arrival_s)
        _step(engine, log, requests)
        if engine.is_idle and log.num_taken == len(requests):
            busy.remove(engine)
    return logs


def _step(engine: TraceEngine, log: Log, requests: Sequence[Request]) -> None:
    start = time.perf_counter()
    while log.num_taken < len(requests) and requests[log.num_taken].arrival_s <= log.clock_s:
        engine.submit(requests[log.num_taken])
        log.num_taken += 1
    new_tokens = engine.step()
    log.clock_s += time.perf_counter() - start
    for name, token in new_tokens.items():
        log.tokens.setdefault(name, []).append(token)
        log.times_s.setdefault(name, []).append(log.clock_s)
    log.peak_bytes = max(log.peak_bytes, engine.bytes_held)
