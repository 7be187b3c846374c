"""What the queries of a forward pass see of private tokens, and where tokens lie in its columns.

Everything here is on the CPU; layers of other devices take their copies.
"""

import numpy as np
import torch
from torch import Tensor

from hf_granikv.prompt_checks import Bools, Ints


def suffix_mask(owned: Bools, before: Ints, width: int) -> Tensor | None:
    """Tells which private tokens each query sees: those of its row up to itself.

    Args:
        owned: `[num_rows, q_len]` which columns of the forward are tokens.
        before: `[num_rows]` private tokens of each row before it.
        width: Private tokens of the longest row after it.

    Returns:
        `[num_rows or 1, 1, q_len, width]` bool, True where visible; None if everything is.
    """
    seen = before[:, None] + owned.cumsum(1)  # [rows, q_len]
    if seen.min(initial=width) >= width:
        return None
    seen = seen[:1] if (seen == seen[0]).all() else seen
    visible = np.arange(width) < seen[:, :, None]
    return torch.from_numpy(visible[:, None])


def dense_columns(owned: Bools, lengths: Ints, prefix_len: int, *, pads_first: bool) -> Tensor:
    """Tells which token lies in each column of dense keys and values; pads repeat one.

    Args:
        owned: `[num_rows, num_columns]` which columns since the prefix are tokens.
        lengths: `[num_rows]` private tokens of each row.
        prefix_len: Columns of the prefix.
        pads_first: Whether a row's pads come before the prefix, and not where they were given.

    Returns:
        `[num_rows, num_columns]` private tokens, or, with pads first, `[num_rows, kv_len]` tokens
        of the row, whose prefix is right-aligned.
    """
    if not pads_first:
        return torch.from_numpy(np.maximum(owned.cumsum(1) - 1, 0))
    num_columns = owned.shape[1]
    columns = np.arange(prefix_len + num_columns) - (num_columns - lengths)[:, None]
    return torch.from_numpy(np.maximum(columns, 0))


def why_not_dense(owned: Bools) -> str | None:
    """Why local layers that measure distances in columns cannot be right; None if they can."""
    if (owned[:, :-1] & ~owned[:, 1:]).any():
        return (
            "local layers measure distances in columns, and a pad follows a token in this forward. "
            "Pad on the left."
        )
    return None
