"""How many slots a pool takes, and how rows lie in them: arithmetic on lengths."""

import numpy as np
from numpy.typing import NDArray

# room left behind each run, so that rows grow in place: at least so many slots
MIN_HEADROOM = 8
# rows are laid out as equal runs only while the slots that this leaves empty stay below
MAX_LAYOUT_WASTE = 0.5
SCATTERED_GROWTH = 1.125
# slots are given back when tokens would do with so much less of them
MAX_IDLE_RATIO = 2


def run_stride(
    lengths: NDArray[np.int64], spare: float, limit: int | None, *, min_headroom: int = 0
) -> int | None:
    """How far apart rows start that are laid out as equal runs.

    Args:
        lengths: `[num_rows]` tokens of each.
        spare: Room to leave behind each, as a fraction of the longest.
        limit: The most slots of all; None for no limit.
        min_headroom: Room that has to be left at least.

    Returns:
        The distance in slots; None if they do not fit, or would leave too many slots empty.
    """
    num_rows, longest = len(lengths), int(lengths.max(initial=0))
    stride = longest + max(MIN_HEADROOM, int(longest * spare))
    if limit is not None:
        stride = min(stride, limit // max(1, num_rows))
    num_wasted = num_rows * longest - int(lengths.sum())
    if stride < longest + min_headroom or num_wasted > MAX_LAYOUT_WASTE * num_rows * longest:
        return None
    return stride


def grown(num_needed: int, num_slots: int, limit: int | None) -> int:
    """How many slots a pool of `num_slots` takes that needs more: so many that growth is amortised."""
    num_slots = max(num_needed, int(num_slots * SCATTERED_GROWTH))
    return num_slots if limit is None else min(num_slots, limit)


def roomy(num_tokens: int, num_rows: int) -> int:
    """How many slots let rows grow for a while."""
    return int(num_tokens * SCATTERED_GROWTH) + num_rows * MIN_HEADROOM


def is_mostly_idle(num_slots: int, num_tokens: int, num_rows: int) -> bool:
    """Whether so many slots are free that they are given back.

    Far enough above what growth and equal runs leave free: it takes as many tokens to come and go
    as are copied then.
    """
    return num_slots > MAX_IDLE_RATIO * roomy(num_tokens, num_rows)
