"""What prefixes bring to a decode step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels.compiled import Task

if TYPE_CHECKING:
    from array import array


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


class PrefixKernel(Protocol):
    """A compiled kernel that leaves states; see `kernels.shared_attention.CompiledAttention`."""

    task: Task

    def place(self, keys: Tensor, values: Tensor) -> "array[int]":
        """Writes down where keys and values of a layer are."""

    def aim(self, query: int, strides: Sequence[int], place: "array[int]") -> None:
        """Makes the task one of a layer."""


class Prefix(NamedTuple):
    """A prefix that is attended to along with the rows' own tokens, in the same parallel region.

    Attributes:
        kernel: What attends, from the queries of the whole batch.
        states: What it leaves.
    """

    kernel: PrefixKernel
    states: GroupStates


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
