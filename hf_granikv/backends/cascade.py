"""All rows' queries against one read of the prefix, in a fused kernel."""

from typing import ClassVar

from torch import Tensor

from hf_granikv.backends.base import (
    PrefixBackend,
    attention_work,
    of_rows,
    pack_queries,
)
from hf_granikv.dispatch.roofline import Work
from hf_granikv.kernels.shared_attention import flash_shared_attention
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
        """Counts one read of the prefix; the launches are pack, attend and two unpacks."""
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
        """Attends in one fused call; out has the dtype of the query on a CPU."""
        assert softcap is None, "unsupported_reasons names soft-capping"
        packed = pack_queries(query, keys.shape[0])
        states = flash_shared_attention(packed, keys, values, scale=scale)
        return of_rows(*states, query.shape[0])
