"""Times the steps of a running `generate` and shows that they go on."""

import time
from typing import Protocol

from torch import Tensor
from tqdm.auto import tqdm


class Streamer(Protocol):
    """What `generate` tells its steps to, as transformers' `BaseStreamer` has it."""

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then the tokens of each step."""

    def end(self) -> None:
        """Hears that no more steps follow."""


class StepTimer:
    """Hears when each step is done, shows it, and hands the tokens on to the caller's streamer.

    The times are None where no step was heard of, because `generate` ran without this streamer.

    Attributes:
        total_s: Seconds between entering and leaving the `with` block.
    """

    def __init__(self, streamer: Streamer | None, num_steps: int | None) -> None:
        self.total_s = 0.0
        self._streamer = streamer
        # a caller who streams has something on the screen already; None is "only on a terminal"
        self._progress = tqdm(
            total=num_steps,
            desc="granikv",
            unit="step",
            delay=1,
            leave=False,
            disable=None if streamer is None else True,
        )
        # the start, the prompt's arrival, then the end of each step
        self._marks_s: list[float] = []

    def __enter__(self) -> "StepTimer":
        self._marks_s = [time.perf_counter()]
        return self

    def __exit__(self, *exception: object) -> None:
        self.total_s = time.perf_counter() - self._marks_s[0]
        self._progress.close()

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then the tokens of each step."""
        if len(self._marks_s) > 1:
            self._progress.update()
        self._marks_s.append(time.perf_counter())
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """Hands the end on to the caller's streamer."""
        if self._streamer is not None:
            self._streamer.end()

    @property
    def _has_steps(self) -> bool:
        return len(self._marks_s) > 2

    @property
    def decode_steps(self) -> int | None:
        """Steps after the one over the suffixes."""
        return len(self._marks_s) - 3 if self._has_steps else None

    @property
    def prefill_s(self) -> float | None:
        """Seconds until the first token of each row."""
        return self._marks_s[2] - self._marks_s[0] if self._has_steps else None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first tokens to the last."""
        return self._marks_s[-1] - self._marks_s[2] if self._has_steps else None
