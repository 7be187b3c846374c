"""The algorithm that computes the prefix part of an attention step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.dispatch.roofline import Work
from hf_granikv.kernels.shared_attention import CompiledAttention
from hf_granikv.views import AttentionState, GroupShape


@dataclass(frozen=True, slots=True)
class Attend:
    """What attends from the rows of a group to one prefix, in each layer of a step.

    Attributes:
        run: Takes the queries of the whole batch, and keys and values of a layer; gives stacked
            states, as `PrefixBackend.pieces` has them, which are valid until it is called again.
        kernel: Which kernel serves, and why no better one; "" where there is but one.
        compiled: That kernel, for those who run it along with others; None where it is torch's.
        state: Where it leaves its result.
    """

    run: Callable[[Tensor, Tensor, Tensor], AttentionState]
    kernel: str = ""
    compiled: CompiledAttention | None = None
    state: AttentionState | None = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> AttentionState:
        """Runs it."""
        return self.run(query, keys, values)


class PrefixBackend(ABC):
    """Attends from the rows of one group to the prefix that they share.

    Attributes:
        name: The module's.
        is_by_row: Whether each row reads the prefix by itself, as it reads its own tokens.
    """

    name: ClassVar[str]
    is_by_row: ClassVar[bool] = False

    def unsupported_reasons(self, shape: GroupShape) -> list[str]:
        """Gives every reason why this backend cannot serve the group; none = it can."""
        return []

    @abstractmethod
    def work(self, shape: GroupShape) -> Work:
        """Gives what this backend has to do for the group in one layer."""

    @abstractmethod
    def pieces(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionState:
        """Attends to the whole prefix, in pieces that are yet to be merged.

        Args:
            query: `[rows, num_q_heads, q_len, head_dim]`, any strides.
            keys: `[num_kv_heads, prefix_len, head_dim]`; nothing in it is masked.
            values: `[num_kv_heads, prefix_len, value_dim]`.
            scale: Factor on the scores.
            softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.

        Returns:
            Stacked states by kv head: out `[num_pieces, rows, num_kv_heads, gqa_ratio * q_len,
            value_dim]` and lse `[num_pieces, rows, num_kv_heads, gqa_ratio * q_len]`, any strides.
        """

    def planned(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None,
        rows: NDArray[np.int64] | None = None,
    ) -> Attend:
        """Gives `pieces` with all that is the same in the layers of a step worked out once.

        Args:
            query: Of the whole batch in the first layer; the others bring tensors of the same sizes.
            keys: Likewise.
            values: Likewise.
            scale: Factor on the scores.
            softcap: Their bound.
            rows: `[num_group_rows]` which rows of the batch attend, ascending; None for all.
        """
        pieces = partial(self.pieces, scale=scale, softcap=softcap)
        return Attend(pieces if rows is None else _OfRows(pieces, row_index(rows, query.device)))


@dataclass(frozen=True, slots=True)
class _OfRows:
    """Attention of some rows of a batch."""

    run: Callable[[Tensor, Tensor, Tensor], AttentionState]
    rows: slice | Tensor

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> AttentionState:
        return self.run(query[self.rows], keys, values)


def row_index(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """An index that takes rows of a batch, without a copy where they are neighbours.

    Args:
        rows: `[num_rows]` ascending.
        device: Of what is indexed.
    """
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.from_numpy(rows).to(device)


def pack_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """Gathers all queries that read one kv head, rows first.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]`, any strides.
        num_kv_heads: Kv heads; a divisor of `num_q_heads`.

    Returns:
        `[num_kv_heads, rows * gqa_ratio * q_len, head_dim]`.
    """
    rows, num_q_heads, q_len, head_dim = query.shape
    queries_per_row = num_q_heads // num_kv_heads * q_len
    grouped = query.reshape(rows, num_kv_heads, queries_per_row, head_dim).transpose(0, 1)
    return grouped.reshape(num_kv_heads, rows * queries_per_row, head_dim)


def of_rows(out: Tensor, lse: Tensor, num_rows: int) -> AttentionState:
    """Undoes `pack_queries` on a result, without a copy.

    Args:
        out: `[num_pieces, num_kv_heads, num_queries, value_dim]`.
        lse: `[num_pieces, num_kv_heads, num_queries]`.
        num_rows: Rows whose queries were packed.
    """
    sizes = (num_rows, out.shape[2] // num_rows)
    return AttentionState(
        out.unflatten(2, sizes).transpose(1, 2), lse.unflatten(2, sizes).transpose(1, 2)
    )


def attention_work(shape: GroupShape, *, launches: int, tile_rows: int, num_reads: int = 1) -> Work:
    """Counts what attention to a prefix takes, two operations per multiply-add.

    Args:
        shape: The group's matrix problem.
        launches: Torch operations started.
        tile_rows: Query rows that share one read of a key.
        num_reads: How often the prefix is read.
    """
    num_scores = float(shape.num_queries * shape.prefix_len)
    return Work(
        flops=4.0 * num_scores * shape.head_dim,
        bytes=num_reads * prefix_bytes(shape),
        launches=launches,
        tile_rows=tile_rows,
        stored_bytes=prefix_bytes(shape),
        num_scores=num_scores,
        num_outputs=float(shape.num_queries * shape.head_dim),
    )


def private_work(shape: GroupShape) -> Work:
    """Counts what attention of rows to tokens of their own takes, `prefix_len` of them each."""
    tile_rows = shape.gqa_ratio * shape.q_len
    work = attention_work(shape, launches=2, tile_rows=tile_rows, num_reads=shape.num_rows)
    return replace(work, stored_bytes=work.bytes)


def prefix_bytes(shape: GroupShape) -> float:
    """Counts the bytes of the stored keys and values."""
    return 2.0 * shape.num_kv_heads * shape.prefix_len * shape.head_dim * shape.dtype_bytes
