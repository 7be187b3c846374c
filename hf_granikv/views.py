"""Frozen records that rooms show each other."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.journal import Journal


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


class AttentionState(NamedTuple):
    """A partial attention result that can be merged with others over the same queries.

    Attributes:
        out: `[rows, num_q_heads, q_len, head_dim]` softmax-weighted values of this part alone; by
            kv head, `[rows, num_kv_heads, gqa_ratio * q_len, head_dim]`.
        lse: `[rows, num_q_heads, q_len]`, or by kv head likewise; float32, natural log of the sum
            of exponentiated scores; any strides.
            A part in which a query sees nothing is `(0, -inf)`.
    """

    out: Tensor
    lse: Tensor

    def by_kv_head(self, num_kv_heads: int) -> "AttentionState":
        """The same with the queries of one kv head side by side."""
        sizes = (num_kv_heads, -1)
        return AttentionState(*(t.unflatten(1, sizes).flatten(2, 3) for t in self))


@dataclass(frozen=True, slots=True)
class Window:
    """What a local attention layer sees, by position in the sequence; pads do not count.

    Attributes:
        size: Tokens of the window, the query's own included, or of a chunk.
        is_chunked: Whether a query sees its own chunk up to itself, and not the `size` tokens that
            end in itself.
    """

    size: int
    is_chunked: bool = False

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that each query sees; negative while the window is not full."""
        if self.is_chunked:
            return positions // self.size * self.size
        return positions - self.size + 1

    def first_reached(self, position: int) -> int:
        """The first position that a query at `position`, or any later one, sees."""
        return max(0, int(self.first_seen(np.array(position))))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer of a model asks of a cache.

    Attributes:
        stores: Whether it stores keys and values; one that reads another layer's does not.
        window: What it sees; None = everything before.
        num_states: Recurrent or convolution states that it keeps, of each sort.
        name: The config's word for a layer that keeps states.
    """

    stores: bool = True
    window: Window | None = None
    num_states: int = 0
    name: str | None = None


class GroupShape(NamedTuple):
    """The size of the matrix problem that one group of rows poses to one stored prefix.

    Attributes:
        num_rows: Rows of the batch that read the prefix.
        q_len: Query tokens per row.
        prefix_len: Prefix tokens that the rows see.
        num_kv_heads: Key/value heads.
        gqa_ratio: Query heads per key/value head.
        head_dim: Width of one head.
        dtype_bytes: Bytes per stored number.
        is_capped: Whether the scores are soft-capped.
        dtype: Torch's name of the stored numbers, without `torch.`; the usual one of so many bytes
            if it is not given.
    """

    num_rows: int
    q_len: int
    prefix_len: int
    num_kv_heads: int
    gqa_ratio: int
    head_dim: int
    dtype_bytes: int
    is_capped: bool = False
    dtype: str = ""

    @property
    def dtype_name(self) -> str:
        """Torch's name of the stored numbers, without `torch.`."""
        return self.dtype or ("bfloat16" if self.dtype_bytes == 2 else "float32")

    @property
    def num_queries(self) -> int:
        """Query vectors, of all heads together."""
        return self.num_rows * self.q_len * self.num_kv_heads * self.gqa_ratio


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroup:
    """Rows of a batch that read the same tokens of one stored prefix.

    Attributes:
        rows: `[num_rows]` ascending; None for all rows of the batch.
        depth: Prefixes that these rows read before this one.
        start: Position of the first token they read of it.
        stop: Position after the last.
    """

    rows: NDArray[np.int64] | None
    depth: int
    start: int
    stop: int

    def num_rows_of(self, num_rows: int) -> int:
        """How many these are of the rows of a batch."""
        return num_rows if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPart:
    """What one layer has stored of the tokens that a group reads.

    Attributes:
        group: Who reads them.
        keys: `[num_kv_heads, group.stop - start, head_dim]`.
        values: Likewise.
        start: Position of the first token; later than the group's where no window sees further.
    """

    group: PrefixGroup
    keys: Tensor
    values: Tensor
    start: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: made once at its first layer, read by all. Its tensors are on the CPU.

    Attributes:
        num_rows: Rows of the batch.
        q_len: Tokens per row in this forward, pads included.
        prefix_lens: `[num_rows]` prefix tokens that each row sees.
        kv_len: Columns of the attention mask: the most of those, and all columns since.
        suffix_mask: `[num_rows or 1, 1, q_len, max_suffix_len]` bool, True where a query sees a
            private token; None if every query sees all of them, or there is no prefix.
        positions: `[num_rows, q_len]` position of each query in its row; that of the token before
            for a pad.
        is_token: `[num_rows, q_len]` False for pads.
        column_index: `[num_rows, num_columns]` the private token of each of the last `num_columns`
            columns, or, where there are `kv_len` of them, the token of the row laid out with its
            prefix right-aligned; None if columns and tokens agree.
        dense_reason: Why the shared path must not be used in this forward, or None.
        dense_refusal: Why the dense route would go wrong in this forward, or None.
        why_unmasked: Why the model was given no mask; None if it was, or needs none.
        dispatch: The caller's choice of backend.
        journal: Where what happens is counted.
        to_come: Layers that have not run, as far as it is known what they read.
        kept: What attention has kept of earlier steps in which the rows read the same prefixes.
        alike: By layer, what attention knows of those that are like one that has run.
        touched: Layers whose keys or values the model has changed, or asked for in one piece.
        scratch: What attention works out once per forward and keeps for the other layers.
    """

    num_rows: int
    q_len: int
    prefix_lens: NDArray[np.int64]
    kv_len: int
    suffix_mask: Tensor | None
    positions: NDArray[np.int64]
    is_token: NDArray[np.bool_]
    column_index: Tensor | None
    dense_reason: str | None
    dense_refusal: str | None
    why_unmasked: str | None
    dispatch: str
    journal: Journal
    to_come: dict[int, "LayerTokens"] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    alike: dict[int, Any] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    scratch: dict[Any, Any] = field(default_factory=dict)

    def of_last_queries(self, q_len: int) -> "StepPlan":
        """The plan for a layer that is given the last queries of each row only."""
        mask = self.suffix_mask
        return replace(
            self,
            q_len=q_len,
            suffix_mask=None if mask is None else mask[:, :, -q_len:],
            positions=self.positions[:, -q_len:],
            is_token=self.is_token[:, -q_len:],
        )

    @property
    def goes_straight(self) -> bool:
        """Whether what the cache gave went to attention by parts, and nowhere else."""
        return bool(self.scratch) and not self.touched

    @property
    def longest_prefix(self) -> int:
        """Columns of the prefix: what the row sees that sees most."""
        return int(self.prefix_lens.max(initial=0))


class PrivateTokens:
    """Private tokens of all rows in one layer: as they lie in the pool, and put together if asked.

    Args:
        storages: Keys and values, `[num_kv_heads, num_slots, head_dim]` each.
        slots: `[num_rows, at least max_length]` which slot holds the j-th token of each row.
        max_length: Tokens of the longest row.
        read: Gives keys and values, `[num_rows, num_kv_heads, max_length, head_dim]` each.
        new_slots: `[num_rows]` the slots of the tokens that the forward under way brings, if that is one
            for each row.
    """

    __slots__ = ("_read", "_tensors", "max_length", "new_slots", "slots", "storages")

    def __init__(
        self,
        storages: tuple[Tensor, Tensor],
        slots: NDArray[np.int64],
        max_length: int,
        read: Callable[[], tuple[Tensor, Tensor]],
        new_slots: NDArray[np.int64] | None = None,
    ) -> None:
        self.storages: tuple[Tensor, Tensor] | None = storages
        self.slots: NDArray[np.int64] | None = slots
        self.max_length, self.new_slots = max_length, new_slots
        self._read: Callable[[], tuple[Tensor, Tensor]] | None = read
        self._tensors: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_tensors(cls, keys: Tensor, values: Tensor) -> "PrivateTokens":
        """Tokens that lie in no pool: `[num_rows, num_kv_heads, max_length, head_dim]`."""
        tokens = cls.__new__(cls)
        tokens.storages, tokens.slots, tokens.max_length = None, None, keys.shape[2]
        tokens._read, tokens._tensors, tokens.new_slots = None, (keys, values), None
        return tokens

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.tensors[0].shape[1] if self.storages is None else self.storages[0].shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[num_rows, num_kv_heads, max_length, head_dim]`, strided."""
        if self._tensors is None:
            assert self._read is not None
            self._tensors = self._read()
        return self._tensors

    def like(self, side: int) -> tuple[tuple[int, ...], Tensor]:
        """Shape of the keys (0) or values (1), and a tensor of their dtype and device."""
        if self._tensors is not None:
            tensor = self._tensors[side]
            return tuple(tensor.shape), tensor
        assert self.storages is not None
        assert self.slots is not None
        storage = self.storages[side]
        num_heads, _, head_dim = storage.shape
        return (len(self.slots), num_heads, self.max_length, head_dim), storage


class LayerTokens(NamedTuple):
    """A `LayerStep` without its plan, which would hold it in a cycle."""

    parts: tuple[PrefixPart, ...]
    private: PrivateTokens
    window: Window | None


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What one layer's attention reads in one forward pass.

    Attributes:
        layer_idx: The layer.
        plan: The forward pass.
        parts: What is stored of the prefixes, parents before their children.
        private: What is private to the rows.
        window: What the layer sees; None = everything before.
    """

    layer_idx: int
    plan: StepPlan
    parts: tuple[PrefixPart, ...]
    private: PrivateTokens
    window: Window | None = None
