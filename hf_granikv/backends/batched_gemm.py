"""All rows' queries against one read of the prefix, in tiled matrix products."""

from typing import ClassVar

from torch import Tensor

from hf_granikv.backends.base import (
    PrefixBackend,
    attention_work,
    of_rows,
    pack_queries,
)
from hf_granikv.dispatch.roofline import Work
from hf_granikv.kernels.shared_attention import gemm_shared_attention
from hf_granikv.views import AttentionState, GroupShape


class BatchedGemmBackend(PrefixBackend):
    """Uses the device's matrix product, with the scores of one tile in the cache.

    Source: Bifurcated attention, arXiv:2403.08845, section 4.
    Differs: tiled over the prefix with a running softmax, so memory does not grow with it.
    """

    name: ClassVar[str] = "batched_gemm"

    def work(self, shape: GroupShape) -> Work:
        """Counts one read of the prefix; launches are those of a single tile."""
        tile_rows = shape.num_queries // shape.num_kv_heads
        return attention_work(shape, launches=8, tile_rows=tile_rows)

    def pieces(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionState:
        """Attends tile by tile; out is float32."""
        packed = pack_queries(query, keys.shape[0])
        states = gemm_shared_attention(packed, keys, values, scale=scale, softcap=softcap)
        return of_rows(*states, query.shape[0])
