"""What prefixes bring to a decode step."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class GroupStates(NamedTuple):
    """Partial results over a prefix, for the rows that read it.

    Attributes:
        out: `[num_pieces, num_group_rows, num_kv_heads, gqa_ratio, value_dim]` bfloat16 or float32,
            any strides but over the last dimension.
        lse: `[num_pieces, num_group_rows, num_kv_heads, gqa_ratio]` float32, any strides.
        rows: `[num_rows]` which of the group's rows each row is, -1 for none; None: all, in order.
    """

    out: Tensor
    lse: Tensor
    rows: NDArray[np.int64] | None


class Segment(NamedTuple):
    """Tokens that several rows read, each by itself.

    Attributes:
        keys: `[num_kv_heads, num_tokens, head_dim]` in the dtype of the query, any strides but over
            the last dimension.
        values: `[num_kv_heads, num_tokens, value_dim]`, likewise.
        rows: `[num_rows]` negative for rows that do not read them; None: all do.
    """

    keys: Tensor
    values: Tensor
    rows: NDArray[np.int64] | None
