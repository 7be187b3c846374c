"""The algorithm that computes the prefix part of an attention step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from hf_granikv.dispatch.roofline import Work
from hf_granikv.views import AttentionState, GroupShape

# queries, keys and values of a layer to stacked states, as `PrefixBackend.pieces` has them
Attend = Callable[[Tensor, Tensor, Tensor], AttentionState]


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

    def kernel(self, query: Tensor, keys: Tensor, values: Tensor) -> str:
        """Says which of its kernels serves these tensors, and why no better one; "" if it has one."""
        return ""

    def planned(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None
    ) -> Attend:
        """Gives `pieces` with all that is the same in the layers of a step worked out once.

        Args:
            query: Of the first layer; the others bring tensors of the same sizes.
            keys: Likewise.
            values: Likewise.
            scale: Factor on the scores.
            softcap: Their bound.

        Returns:
            What attends in one layer. Its result is valid until it is called again.
        """
        return partial(self.pieces, scale=scale, softcap=softcap)


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
