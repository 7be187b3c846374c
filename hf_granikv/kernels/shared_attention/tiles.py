"""Attention to a shared prefix in the matrix tiles of a CPU (Intel AMX)."""

from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.compiled_attention import CompiledAttention, ends

_TILES = "hf_granikv.kernels._numba_tiles"


class TiledAttention(CompiledAttention):
    """Attends in AMX tiles; weights are rounded to bfloat16, sums are in float32."""

    name: ClassVar[str] = "AMX tiles"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    module: ClassVar[str] = "hf_granikv.kernels.shared_attention._tiles"

    @classmethod
    @cache
    def missing(cls) -> tuple[str, ...]:
        """Gives what this CPU, this installation or the system lacks; where nothing, it can run."""
        tiles = compiled.load(_TILES)
        if isinstance(tiles, str):
            return (tiles,)
        if missing := tiles.unsupported_reasons():
            return tuple(missing)
        # Linux gives no process tiles unasked
        if not getattr(torch.cpu, "_init_amx", lambda: False)():
            return ("torch cannot ask the system for AMX tiles",)
        return super().missing()

    @staticmethod
    def reasons_against(query: Tensor, keys: Tensor, values: Tensor) -> list[str]:
        """Refuses heads that do not fill tiles."""
        if keys.shape[2] % 32 or values.shape[2] % 64:
            return ["it takes keys of 32, 64, ... numbers, values of 64, 128, ..."]
        return []

    @staticmethod
    @cache
    def _scratch(
        kernel: Any, num_queries: int, key_dim: int, value_dim: int
    ) -> tuple[list[int], int]:
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
        places, size = ends(sizes)
        return [*places, _tile_config().ctypes.data], size


@cache
def _tile_config() -> NDArray[np.uint8]:
    """Eight tiles of 16 rows of 64 bytes; Intel's instruction set reference, LDTILECFG."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2] = 64
    config[48:56] = 16
    return config
