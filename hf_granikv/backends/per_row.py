"""Each row reads the prefix by itself: the plain path."""

from typing import ClassVar

from torch import Tensor

from hf_granikv.backends.base import PrefixBackend, attention_work
from hf_granikv.dispatch.roofline import Work
from hf_granikv.kernels.suffix_attention import SuffixMask, suffix_attention
from hf_granikv.views import AttentionState, GroupShape


class PerRowBackend(PrefixBackend):
    """Expands the prefix over the rows with stride 0: one launch, but one read per row."""

    name: ClassVar[str] = "per_row"
    is_by_row: ClassVar[bool] = True

    def work(self, shape: GroupShape) -> Work:
        """Counts one read of the prefix per row."""
        tile_rows = shape.gqa_ratio * shape.q_len
        return attention_work(shape, launches=2, tile_rows=tile_rows, num_reads=shape.num_rows)

    def pieces(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionState:
        """Attends without packing across rows; out has the dtype of the query on a CPU."""
        return attend_each_row(query, keys, values, scale=scale, softcap=softcap, mask=None)


def attend_each_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None,
    mask: SuffixMask | None,
) -> AttentionState:
    """Attends to a prefix without packing across rows; see `PrefixBackend.pieces`.

    Args:
        query: As there, like the keys, the values and what comes out.
        keys: Likewise.
        values: Likewise.
        scale: Likewise.
        softcap: Likewise.
        mask: `[rows, 1, q_len, prefix_len]` what each row sees of it; None = everything.
    """
    keys, values = (t.expand(len(query), -1, -1, -1) for t in (keys, values))
    state = suffix_attention(query, keys, values, scale=scale, mask=mask, softcap=softcap)
    out, lse = state.by_kv_head(keys.shape[1])
    return AttentionState(out[None], lse[None])
