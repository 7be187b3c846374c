"""Whether other processes take the processors while something is measured."""

import time
from contextlib import suppress
from pathlib import Path

# of the time that all takes; idle it is 1 %, and beside a busy process for one of two processors 120 %
_MOST_WAITED = 0.05


def waited_s() -> float:
    """Seconds that threads of this process were ready to run so far and had no processor, all added.

    0 where the kernel does not say: other systems than Linux.
    """
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # a thread may have ended since
        with suppress(OSError):
            total += int(file.read_text().split()[1])
    return total / 1e9


class Disturbance:
    """What other processes take of the processors, from here on."""

    def __init__(self) -> None:
        self._start_s, self._waited_s = time.perf_counter(), waited_s()

    def described(self) -> str | None:
        """Says so where threads of this process have waited for a processor; None if hardly any did."""
        lasted, waited = time.perf_counter() - self._start_s, waited_s() - self._waited_s
        if waited <= _MOST_WAITED * lasted:
            return None
        return (
            f"DISTURBED: threads of this process waited {waited:.0f} s in all for a processor in "
            f"{lasted:.0f} s, so these times say little; measure again while nothing else runs, with no "
            "more threads than there are processors."
        )
