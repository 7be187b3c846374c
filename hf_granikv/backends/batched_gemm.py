"""All rows' queries against one read of the prefix, in tiled matrix products."""

from typing import ClassVar

from torch import Tensor

from hf_granikv.backends.base import (
    PrefixBackend,
    attention_flops,
    of_rows,
    pack_queries,
    prefix_bytes,
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
        num_queries = shape.num_rows * shape.gqa_ratio * shape.q_len
        return Work(attention_flops(shape), prefix_bytes(shape), 8, num_queries)

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
