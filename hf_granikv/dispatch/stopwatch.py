"""Times of runs, as calibration and benchmarks of the dispatcher take them."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hf_granikv.dispatch.device_constants import threads_of

Run = Callable[[], object]


class Stopwatch:
    """Times runs with nothing in the caches, as between two layers of a model.

    Args:
        device: Where they run.

    Attributes:
        device: Likewise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # what the cores' own caches hold, or all of an accelerator's
        num_bytes = threads_of(device) * 8 << 20 or 256 << 20
        self._other = torch.ones(num_bytes // 4, device=device)

    def medians_s(self, runs: Sequence[Run], budget_s: float, *, most: int = 20) -> list[float]:
        """Gives the median seconds of each run; they take turns, at least three and at most `most`."""
        seconds: list[list[float]] = [[] for _ in runs]
        for run in runs:
            run()
        stop = time.perf_counter() + budget_s
        while len(seconds[0]) < 3 or (time.perf_counter() < stop and len(seconds[0]) < most):
            for run, taken in zip(runs, seconds, strict=True):
                self._other.sum()
                taken.append(self._once(run))
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
