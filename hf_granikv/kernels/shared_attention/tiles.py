"""Attention to a shared prefix in the matrix tiles of a CPU (Intel AMX)."""

from array import array
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels import compiled, cpu
from hf_granikv.kernels.shared_attention.reference import PackedStates

_TILES = "hf_granikv.kernels._numba_tiles"
MODULE = "hf_granikv.kernels.shared_attention._tiles"
# the fewest tokens that are worth a thread's while
_MIN_PIECE = 256


class TiledAttention:
    """Attends from all rows to a shared prefix, each key and value read once.

    Made once for a step and run in each layer. Weights are rounded to bfloat16, sums are in float32.

    Source: FlashAttention-2, arXiv:2307.08691, algorithm 1, with a loop as in Flash-Decoding: pieces
    of the prefix for the threads, merged by who calls.

    Args:
        query: As `run` takes it, of the first layer; likewise the keys and values.
        keys: Likewise.
        values: Likewise.
        scale: Factor on the scores.

    Attributes:
        states: Where the attention is after a run, until the next, of the queries packed as
            `pack_queries` does it; out is float32.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> None:
        # without the system's leave the first instruction would end the process
        assert not missing(), "unsupported_reasons says so"
        (rows, num_q_heads, q_len, key_dim), (heads, length, value_dim) = query.shape, values.shape
        ratio = num_q_heads // heads
        num_queries, threads = rows * ratio * q_len, torch.get_num_threads()
        pieces = cpu.num_pieces(heads, length, _MIN_PIECE)
        out = query.new_empty((pieces, heads, num_queries, value_dim), dtype=torch.float32)
        lse = query.new_empty((pieces, heads, num_queries), dtype=torch.float32)
        self.states = PackedStates(out, lse)
        self._threads = min(threads, heads * pieces)
        kernel = compiled.load(MODULE)
        places, size = _scratch(kernel, num_queries, key_dim, value_dim)
        # what the addresses below point to
        self._scratch = torch.empty(self._threads * size, dtype=torch.uint8)
        # base two: the kernel's exponential is
        self._factor = np.array([scale / kernel.LOG_2], dtype=np.float32)
        self._task: int = kernel.attend_bfloat16.address
        sizes = [heads, ratio, q_len, num_queries, key_dim, value_dim, pieces, length]
        memory = [out.data_ptr(), lse.data_ptr(), self._factor.ctypes.data]
        memory += [_tile_config().ctypes.data, self._scratch.data_ptr(), size]
        self._of_layer = slice(kernel.QUERY, kernel.OUT)
        num_of_layer = kernel.OUT - kernel.QUERY
        # the order is that of the names in _tiles.py
        numbers = [*sizes, *[0] * num_of_layer, *memory, *places]
        self._numbers = array("q", numbers)

    def run(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Attends in one layer.

        Args:
            query: `[rows, num_q_heads, q_len, head_dim]` bfloat16, any strides.
            keys: `[num_kv_heads, prefix_len, head_dim]`, any strides but over the last dimension.
            values: `[num_kv_heads, prefix_len, value_dim]`, likewise.
        """
        if query.stride(3) != 1:
            query = query.contiguous()
        (row, head, token, _), of_keys, of_values = query.stride(), keys.stride(), values.stride()
        of_layer = [query.data_ptr(), 2 * row, 2 * head, 2 * token]
        of_layer += [keys.data_ptr(), 2 * of_keys[0], 2 * of_keys[1]]
        of_layer += [values.data_ptr(), 2 * of_values[0], 2 * of_values[1]]
        self._numbers[self._of_layer] = array("q", of_layer)
        compiled.run(self._task, self._numbers, self._threads)


@cache
def _scratch(kernel: Any, num_queries: int, key_dim: int, value_dim: int) -> tuple[list[int], int]:
    """Where the parts of a thread's scratch memory begin, behind the queries, and its bytes."""
    tile, block = kernel.TILE, kernel.BLOCK
    num_tiles = -(-num_queries // tile)
    sizes = [
        num_tiles * 2 * tile * key_dim,
        num_tiles * 4 * tile * value_dim,
        *(num_tiles * 4 * tile, num_tiles * 4 * tile),
        2 * block * value_dim,
        4 * block * tile,
        2 * block * (key_dim + value_dim),
    ]
    ends = [int(end) for end in np.cumsum(sizes)]
    return ends[:-1], ends[-1]


@cache
def _tile_config() -> NDArray[np.uint8]:
    """Eight tiles of 16 rows of 64 bytes; Intel's instruction set reference, LDTILECFG."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2] = 64
    config[48:56] = 16
    return config


@cache
def missing() -> tuple[str, ...]:
    """Gives what this CPU, this installation or the system lacks; where nothing, it can run."""
    tiles = compiled.load(_TILES)
    if isinstance(tiles, str):
        return (tiles,)
    if missing := tiles.unsupported_reasons():
        return tuple(missing)
    # Linux gives no process tiles unasked
    if not getattr(torch.cpu, "_init_amx", lambda: False)():
        return ("torch cannot ask the system for AMX tiles",)
    kernel = compiled.load(MODULE)
    return (kernel,) if isinstance(kernel, str) else ()
