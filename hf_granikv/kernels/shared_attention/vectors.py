"""Attention to a shared prefix in the vector registers of a CPU."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.compiled_attention import CompiledAttention, ends
from hf_granikv.processor import has_fast_matmul


class VectorAttention(CompiledAttention):
    """Attends in vector registers; products and sums are in float32."""

    name: ClassVar[str] = "vector registers"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    module: ClassVar[str] = "hf_granikv.kernels.shared_attention._vectors"

    @staticmethod
    def reasons_against(query: Tensor, keys: Tensor, values: Tensor) -> list[str]:
        """Leaves bfloat16 to torch where that is faster."""
        if query.dtype == torch.bfloat16 and has_fast_matmul(torch.bfloat16):
            return ["torch multiplies bfloat16 in hardware here"]
        return []

    @staticmethod
    def _num_chunks(num_queries: int) -> int:
        return -(-num_queries // compiled.load(VectorAttention.module).CHUNK)

    @staticmethod
    @cache
    def _scratch(
        kernel: Any, num_queries: int, key_dim: int, value_dim: int
    ) -> tuple[list[int], int]:
        panels, panel = -(-min(num_queries, kernel.CHUNK) // kernel.PANEL), 4 * kernel.PANEL
        sizes = [panels * panel * key_dim, panels * panel * value_dim]
        # the largest scores and the sums of weights; of one panel, what its sums shrink by
        sizes += [panels * panel, panels * panel, panel]
        sizes += [kernel.BLOCK * size for size in (panel, 4 * key_dim, 4 * value_dim)]
        # whole cache lines, lest threads share one
        return ends([-(-size // 64) * 64 for size in sizes])
