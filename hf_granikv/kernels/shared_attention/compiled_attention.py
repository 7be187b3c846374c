"""Attention to a shared prefix by a kernel that numba compiles."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels import compiled, cpu
from hf_granikv.kernels.shared_attention import _arguments
from hf_granikv.kernels.shared_attention.reference import PackedStates

# the fewest tokens that are worth a thread's while
_MIN_PIECE = 256
_QUERY = slice(_arguments.QUERY, _arguments.KEYS)
_OF_LAYER = slice(_arguments.KEYS, _arguments.OUT)


class CompiledAttention(ABC):
    """Attends from all rows to a shared prefix, each key and value read once for many queries.

    Made once for a step and run in each layer.

    Source: FlashAttention-2, arXiv:2307.08691, algorithm 1, with a loop as in Flash-Decoding: pieces
    of the prefix for the threads, merged by who calls.

    Args:
        query: As `run` takes it, of the first layer; likewise the keys and values.
        keys: Likewise.
        values: Likewise.
        scale: Factor on the scores.
        rows: `[num_group_rows]` which rows of the query attend; None for all.

    Attributes:
        name: What it computes in.
        dtypes: Of the tensors that it takes.
        module: The compiled one.
        states: Where the attention is after a run, until the next, of the queries packed as
            `pack_queries` does it; out is float32.
        task: What runs once `aim` was called.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    module: ClassVar[str]

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        # without the system's leave the first instruction may end the process
        assert not self.missing(), "unsupported_reasons says so"
        (_, num_q_heads, q_len, key_dim), (heads, length, value_dim) = query.shape, values.shape
        ratio, num_rows = num_q_heads // heads, len(query) if rows is None else len(rows)
        num_queries, threads = num_rows * ratio * q_len, torch.get_num_threads()
        units = heads * self._num_chunks(num_queries)
        # some threads doing one more unit than others is no matter where all do many
        pieces = 1 if units >= 8 * threads else cpu.num_pieces(units, length, _MIN_PIECE)
        out = query.new_empty((pieces, heads, num_queries, value_dim), dtype=torch.float32)
        lse = query.new_empty((pieces, heads, num_queries), dtype=torch.float32)
        self.states = PackedStates(out, lse)
        kernel = compiled.load(self.module)
        more, size = self._scratch(kernel, num_queries, key_dim, value_dim)
        # what the addresses below point to
        self._memory = torch.empty(threads * size, dtype=torch.uint8, device="cpu")
        self._scale, self._rows = np.array([scale], dtype=np.float32), rows
        self._itemsize, self._shapes = query.itemsize, (query.shape, keys.shape, values.shape)
        # the order is that of the names in _arguments.py
        sizes = [heads, ratio, q_len, num_queries, key_dim, value_dim, pieces, length]
        sizes.append(0 if rows is None else compiled.address_of(rows))
        addresses = [out.data_ptr(), lse.data_ptr(), compiled.address_of(self._scale)]
        addresses += [self._memory.data_ptr(), size]
        of_layer = [0] * (_arguments.OUT - _arguments.QUERY)
        numbers = array("q", [*sizes, *of_layer, *addresses, *more])
        dtype = str(query.dtype).removeprefix("torch.")
        function: int = getattr(kernel, f"attend_{dtype}").address
        self.task = compiled.Task(function, numbers, min(threads, units * pieces))

    @classmethod
    def missing(cls) -> tuple[str, ...]:
        """Gives what this machine lacks; where nothing, it can run."""
        kernel = compiled.load(cls.module)
        return (kernel,) if isinstance(kernel, str) else ()

    @staticmethod
    def _num_chunks(num_queries: int) -> int:
        """In how many parts the queries of a kv head are worked on, by whichever thread."""
        return 1

    @staticmethod
    @abstractmethod
    def reasons_against(query: Tensor, keys: Tensor, values: Tensor) -> list[str]:
        """Gives why it should not serve these tensors, which are of its dtypes and on a CPU."""

    @staticmethod
    @abstractmethod
    def _scratch(
        kernel: Any, num_queries: int, key_dim: int, value_dim: int
    ) -> tuple[list[int], int]:
        """Gives the arguments after the common ones, and the bytes of a thread's scratch memory."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Attends in one layer.

        Args:
            query: `[rows, num_q_heads, q_len, head_dim]`, any strides.
            keys: `[num_kv_heads, prefix_len, head_dim]`, any strides but over the last dimension.
            values: `[num_kv_heads, prefix_len, value_dim]`, likewise.
        """
        assert query.shape == self._shapes[0]
        query = compiled.readable(query)
        self.aim(query.data_ptr(), query.stride(), self.place(keys, values))
        compiled.run(*self.task)

    def place(self, keys: Tensor, values: Tensor) -> "array[int]":
        """Writes down where keys and values of a layer are; see `run`."""
        assert (keys.shape, values.shape) == self._shapes[1:]
        size, numbers = self._itemsize, array("q")
        for tensor in (keys, values):
            of_head, of_token, _ = tensor.stride()
            numbers.extend((tensor.data_ptr(), size * of_head, size * of_token))
        return numbers

    def aim(self, query: int, strides: Sequence[int], place: "array[int]") -> None:
        """Makes the task one of a layer.

        Args:
            query: Address of the queries, whose shape is that of the first layer.
            strides: Theirs, in elements; the last one is 1.
            place: What `place` gave for the layer.
        """
        size, (row, head, token, _), numbers = self._itemsize, strides, self.task.numbers
        numbers[_QUERY] = array("q", (query, size * row, size * head, size * token))
        numbers[_OF_LAYER] = place


def ends(sizes: list[int]) -> tuple[list[int], int]:
    """Gives where all parts but the first begin that lie behind each other, and where all end."""
    *places, size = (int(end) for end in np.cumsum(sizes))
    return places, size
