"""Predicts whether a prefix should keep the few tokens before it, or leave them where they are."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.roofline import DeviceConstants, call_s, predict_all
from hf_granikv.views import GroupShape

# groups that are taken to read the level at the same time: each would read its own copy of it
_SIBLINGS = 8
# what copies may add to the bytes of a prefix
_MAX_OVERHEAD = 1 / 8


@dataclass(frozen=True, slots=True)
class FusingCost:
    """Predicted seconds per layer and step.

    Attributes:
        apart_s: Of reading the tokens before as a level of their own, once for all siblings.
        fused_s: Of reading a copy of them in each sibling's prefix.
    """

    apart_s: float
    fused_s: float

    @property
    def pays(self) -> bool:
        """Whether the copies are faster."""
        return self.fused_s < self.apart_s


def fusing_cost(
    shape: GroupShape, *, constants: DeviceConstants, backends: Mapping[str, Candidate]
) -> FusingCost:
    """Weighs one more level against copies of it.

    Args:
        shape: One row over the tokens before.
        constants: Of the device.
        backends: Backends by name.
    """
    together = shape._replace(num_rows=_SIBLINGS)
    able = {n: b for n, b in backends.items() if not b.unsupported_reasons(together)}
    dtype = shape.dtype_name
    # a level read apart needs, besides its backend, one merge more
    merge_s = constants.merge.predict_s(4.0 * together.num_queries * together.head_dim)
    works = {name: backend.work(together) for name, backend in able.items()}
    apart_s = min(predict_all(works, constants, dtype).values()) + merge_s
    works = {name: backend.work(shape) for name, backend in able.items()}
    # what a call costs is paid for the rest of the prefix anyway
    fused_s = min(
        seconds - call_s(works[name], constants, name, dtype)
        for name, seconds in predict_all(works, constants, dtype).items()
    )
    return FusingCost(apart_s, _SIBLINGS * fused_s)


def is_short(num_before: int, num_tokens: int) -> bool:
    """Whether a copy of the tokens before would be a small part of a prefix of `num_tokens`."""
    return num_before <= num_tokens * _MAX_OVERHEAD
