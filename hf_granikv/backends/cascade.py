"""All rows' queries against one read of the prefix, in a fused kernel."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.backends.base import (
    Attend,
    PrefixBackend,
    attention_work,
    of_rows,
    pack_queries,
)
from hf_granikv.dispatch.roofline import Work
from hf_granikv.kernels.shared_attention import (
    COMPILED,
    CompiledAttention,
    flash_shared_attention,
    unsupported_reasons,
)
from hf_granikv.views import AttentionState, GroupShape


class CascadeBackend(PrefixBackend):
    """Reads the prefix once for the whole group; scores never leave the kernel.

    Source: Hydragen, arXiv:2402.05099, section 3.2.
    """

    name: ClassVar[str] = "cascade"

    def unsupported_reasons(self, shape: GroupShape) -> list[str]:
        """Refuses soft-capped scores, which stay inside the kernel."""
        return ["the fused kernel has no soft-capping"] if shape.is_capped else []

    def work(self, shape: GroupShape) -> Work:
        """Counts one read of the prefix; launches are those around torch's kernel."""
        tile_rows = shape.num_queries // shape.num_kv_heads
        return attention_work(shape, launches=4, tile_rows=tile_rows)

    def pieces(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionState:
        """Attends in torch's fused kernel; out has the dtype of the query on a CPU, or is float32."""
        assert softcap is None, "unsupported_reasons names soft-capping"
        packed = pack_queries(query, keys.shape[0])
        states = flash_shared_attention(packed, keys, values, scale=scale)
        return of_rows(*states, query.shape[0])

    def planned(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> Attend:
        """Plans a compiled kernel where there is one for this CPU."""
        assert softcap is None, "unsupported_reasons names soft-capping"
        kernel, refused = _compiled(query, keys, values)
        if kernel is None:
            in_torch = super().planned(query, keys, values, scale=scale, softcap=None, rows=rows)
            return replace(in_torch, kernel=", ".join(refused))
        attention = kernel(query, keys, values, scale=scale, rows=rows)
        state = of_rows(*attention.states, len(query) if rows is None else len(rows))

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> AttentionState:
            attention.run(query, keys, values)
            return state

        return Attend(attend, ", ".join([f"in {kernel.name}", *refused]), attention, state)


def _compiled(
    query: Tensor, keys: Tensor, values: Tensor
) -> tuple[type[CompiledAttention] | None, list[str]]:
    """Gives the fastest compiled kernel that can serve, and why faster ones cannot."""
    refused: list[str] = []
    for kernel in COMPILED:
        if query.is_cpu and query.dtype in kernel.dtypes:
            reasons = unsupported_reasons(kernel, query, keys, values)
            if not reasons:
                return kernel, refused
            refused.append(f"not in {kernel.name} ({', '.join(reasons)})")
    return None, refused
