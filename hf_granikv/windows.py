"""What the queries of a local layer see in one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.views import LayerStep


@dataclass(frozen=True, slots=True)
class LocalView:
    """Which stored tokens the queries of a local layer see, by position.

    ```
    prefix          start ....... fringe_start ........ common_start ........... shared_len
                    seen by none  seen by some queries  seen by every query
    private tokens  suffix_start .......  seen as suffix_mask says
    ```

    Attributes:
        fringe_start: First prefix position that some query sees.
        common_start: First prefix position from which on every query sees everything.
        fringe_mask: `[num_rows, 1, q_len, common_start - fringe_start]` bool; None if that is empty.
        suffix_start: First private token that some query sees.
        suffix_mask: `[num_rows or 1, 1, q_len, max_suffix_len - suffix_start]` bool, True where a
            query sees a private token; None if every query sees all of them.
    """

    fringe_start: int
    common_start: int
    fringe_mask: Tensor | None
    suffix_start: int
    suffix_mask: Tensor | None


def local_view(step: LayerStep) -> LocalView:
    """Works out what the window of a layer leaves visible; `step.window` is not None."""
    plan, window = step.plan, step.window
    assert window is not None
    positions, first_seen = plan.positions, window.first_seen(plan.positions)
    of_tokens = first_seen[plan.is_token]
    lowest = int(of_tokens.min(initial=plan.kv_len))
    highest = int(of_tokens.max(initial=0))
    assert max(0, lowest) >= step.prefix_start or not step.prefix_start, "HOT lacks what is seen"
    fringe_start = min(max(lowest, step.prefix_start), plan.shared_len)
    common_start = min(max(highest, fringe_start), plan.shared_len)
    fringe_mask = None
    if common_start > fringe_start:
        fringe = np.arange(fringe_start, common_start) >= first_seen[:, :, None]
        fringe_mask = torch.from_numpy(fringe[:, None])
    width = step.suffix_keys.shape[2]
    suffix_start = min(max(lowest - plan.shared_len, 0), width)
    private = np.arange(plan.shared_len + suffix_start, plan.shared_len + width)
    visible = (private <= positions[:, :, None]) & (private >= first_seen[:, :, None])
    return LocalView(fringe_start, common_start, fringe_mask, suffix_start, _as_mask(visible))


def _as_mask(visible: NDArray[np.bool_]) -> Tensor | None:
    if visible.all():
        return None
    if (visible == visible[0]).all():
        visible = visible[:1]
    return torch.from_numpy(visible[:, None])
