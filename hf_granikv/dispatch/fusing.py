"""Predicts whether a prefix should keep the few tokens before it, or leave them where they are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.roofline import constants_for, predict_s
from hf_granikv.views import GroupShape

# a level read apart needs, besides its backend, one merge more
MERGE_LAUNCHES = 6
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
    shape: GroupShape, *, device_type: str, backends: Mapping[str, Candidate]
) -> FusingCost:
    """Weighs one more level against copies of it.

    Args:
        shape: One row over the tokens before.
        device_type: Such as `"cpu"`; picks the built-in constants.
        backends: Backends by name.
    """
    constants = constants_for(device_type)
    together = replace(shape, num_rows=_SIBLINGS)

    def best_s(of: GroupShape, launches: int) -> float:
        return min(
            predict_s(replace(backend.work(of), launches=launches), constants, name)
            for name, backend in backends.items()
            if not backend.unsupported_reasons(of)
        )

    launches = min(backend.work(shape).launches for backend in backends.values())
    apart_s = best_s(together, launches + MERGE_LAUNCHES)
    return FusingCost(apart_s, _SIBLINGS * best_s(shape, 0))


def is_short(num_before: int, num_tokens: int) -> bool:
    """Whether a copy of the tokens before would be a small part of a prefix of `num_tokens`."""
    return num_before <= num_tokens * _MAX_OVERHEAD
