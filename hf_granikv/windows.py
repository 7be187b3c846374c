"""What the queries of a local layer see in one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.views import PrefixPart, StepPlan, Window


@dataclass(frozen=True, slots=True)
class PrefixView:
    """Which tokens of one prefix the queries of a local layer see, by position.

    ```
    part.start ....... fringe_start ........ common_start ........... group.stop
    seen by none       seen by some queries  seen by every query
    ```

    Attributes:
        fringe_start: First position that some query of the group sees.
        common_start: First position from which on every query sees everything.
        fringe_mask: `[group rows, 1, q_len, common_start - fringe_start]` bool; None if that is empty.
    """

    fringe_start: int
    common_start: int
    fringe_mask: Tensor | None


def prefix_view(part: PrefixPart, plan: StepPlan, window: Window) -> PrefixView:
    """Works out what a window leaves visible of a prefix."""
    rows, stop = part.group.rows, part.group.stop
    positions = plan.positions if rows is None else plan.positions[rows]
    is_token = plan.is_token if rows is None else plan.is_token[rows]
    first_seen = window.first_seen(positions)
    of_tokens = first_seen[is_token]
    lowest = int(of_tokens.min(initial=plan.kv_len))
    highest = int(of_tokens.max(initial=0))
    assert part.start == part.group.start or lowest >= part.start, "HOT lacks what is seen"
    fringe_start = min(max(lowest, part.start), stop)
    common_start = min(max(highest, fringe_start), stop)
    fringe_mask = None
    if common_start > fringe_start:
        fringe = np.arange(fringe_start, common_start) >= first_seen[:, :, None]
        fringe_mask = torch.from_numpy(fringe[:, None])
    return PrefixView(fringe_start, common_start, fringe_mask)


@dataclass(frozen=True, slots=True)
class SuffixView:
    """Which private tokens the queries of a local layer see.

    Attributes:
        start: First private token that some query sees.
        mask: `[num_rows or 1, 1, q_len, width - start]` bool, True where a query sees a private
            token; None if every query sees all of them.
    """

    start: int
    mask: Tensor | None


def suffix_view(plan: StepPlan, window: Window, width: int) -> SuffixView:
    """Works out what a window leaves visible of private tokens.

    Args:
        plan: The forward pass.
        window: Of the layer.
        width: Private tokens of the longest row.
    """
    ahead = plan.prefix_lens[:, None]
    last_seen, first_seen = plan.positions - ahead, window.first_seen(plan.positions) - ahead
    start = int(first_seen[plan.is_token].min(initial=width))
    start = min(max(start, 0), width)
    private = np.arange(start, width)
    visible = (private <= last_seen[:, :, None]) & (private >= first_seen[:, :, None])
    return SuffixView(start, _as_mask(visible))


def _as_mask(visible: NDArray[np.bool_]) -> Tensor | None:
    if visible.all():
        return None
    if (visible == visible[0]).all():
        visible = visible[:1]
    return torch.from_numpy(visible[:, None])
