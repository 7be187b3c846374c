"""What prefixes give to a decode step."""

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
