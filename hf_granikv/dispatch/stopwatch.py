"""Times of runs, and whether anything else took the processor meanwhile."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from hf_granikv.dispatch.device_constants import threads_of

try:
    import resource
except ImportError:  # Windows
    resource: Any = None  # type: ignore[no-redef]

Run = Callable[[], object]


class Stopwatch:
    """Times runs with nothing in the caches, as between two layers of a model.

    Args:
        device: Where they run.

    Attributes:
        device: Likewise.
        num_medians: What was given so far.
        num_disturbed: How many of them are of runs most of which were interrupted on a CPU, so that
            another process could have it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_medians, self.num_disturbed = 0, 0
        # what the cores' own caches hold, or all of an accelerator's
        num_bytes = threads_of(device) * 8 << 20 or 256 << 20
        self._other = torch.ones(num_bytes // 4, device=device)

    def medians_s(self, runs: Sequence[Run], budget_s: float, *, most: int = 20) -> list[float]:
        """Gives the median seconds of each run; they take turns, at least three and at most `most`."""
        seconds: list[list[float]] = [[] for _ in runs]
        counts = [0] * len(runs)
        for run in runs:
            run()
        stop = time.perf_counter() + budget_s
        while len(seconds[0]) < 3 or (time.perf_counter() < stop and len(seconds[0]) < most):
            for i, run in enumerate(runs):
                self._other.sum()
                before = interruptions()
                seconds[i].append(self._once(run))
                counts[i] += interruptions() > before
        self.num_medians += len(runs)
        if self.device.type == "cpu":
            self.num_disturbed += sum(2 * n > len(seconds[0]) for n in counts)
        return [median(taken) for taken in seconds]

    def _once(self, run: Run) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def interruptions() -> int:
    """How often threads of this process had to leave a processor to others so far; 0 if unknown."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
