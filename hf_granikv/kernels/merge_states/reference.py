"""Torch implementation of `merge_states`."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from hf_granikv.views import AttentionState

_LOWEST = torch.finfo(torch.float32).min


def merge_states(states: Sequence[AttentionState]) -> AttentionState:
    """Combines partial results into the attention over the union of their keys.

    Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.

    Args:
        states: At least one part, all over the same queries and with disjoint keys; any strides.
            A part in which a query sees nothing is `(0, -inf)`.

    Returns:
        out `[rows, num_q_heads, q_len, head_dim]` float32 and lse `[rows, num_q_heads, q_len]`;
        `(0, -inf)` where no part sees anything. A single state comes back as it is.

    Raises:
        ValueError: `states` is empty.
    """
    if not states:
        raise ValueError("merge_states got no states; give it at least one.")
    return reduce(_merge_two, states)


def merged_out(states: Sequence[AttentionState]) -> Tensor:
    """Gives the `out` of `merge_states`, for the last merge of a layer, whose lse nobody reads."""
    *others, last = states
    return _mixed(merge_states(others), last) if others else last.out


def _merge_two(a: AttentionState, b: AttentionState) -> AttentionState:
    return AttentionState(_mixed(a, b), torch.logaddexp(a.lse, b.lse))


def _mixed(a: AttentionState, b: AttentionState) -> Tensor:
    # clamping one side keeps -inf - -inf from becoming NaN: two empty parts give weight 0
    weight = torch.sub(b.lse, a.lse.clamp_min(_LOWEST)).sigmoid_().unsqueeze(-1)
    return torch.lerp(a.out.float(), b.out.float(), weight)
