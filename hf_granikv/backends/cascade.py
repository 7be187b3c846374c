"""All rows' queries against one read of the prefix, in a fused kernel."""

from functools import partial
from typing import ClassVar

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
        """Attends in one fused call; out has the dtype of the query on a CPU, or is float32."""
        attend = self.planned(query, keys, values, scale=scale, softcap=softcap)
        return attend(query, keys, values)

    def kernel(self, query: Tensor, keys: Tensor, values: Tensor) -> str:
        """Names the compiled kernel, or why there is none; nothing where there can be none."""
        kernel, refused = _compiled(query, keys, values)
        return ", ".join(refused if kernel is None else [f"in {kernel.name}", *refused])

    def planned(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> Attend:
        """Plans a compiled kernel where there is one for this CPU."""
        assert softcap is None, "unsupported_reasons names soft-capping"
        kernel, _ = _compiled(query, keys, values)
        if kernel is None:
            return partial(_attend_flash, scale=scale)
        attention = kernel(query, keys, values, scale=scale)
        state = of_rows(*attention.states, query.shape[0])

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> AttentionState:
            attention.run(query, keys, values)
            return state

        return attend


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


def _attend_flash(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> AttentionState:
    packed = pack_queries(query, keys.shape[0])
    states = flash_shared_attention(packed, keys, values, scale=scale)
    return of_rows(*states, query.shape[0])
