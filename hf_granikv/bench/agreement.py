"""Whether two ways to compute a step computed the same."""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor


class ResultsDiffer(Exception):
    """Peers compute different things, so that their times are not comparable."""


class Tolerance(NamedTuple):
    """The most that logits of two peers may differ by, as a fraction of their standard deviation.

    Attributes:
        typical: Of half of the rows.
        worst: Of every row.
    """

    typical: float
    worst: float


# Measured with SmolLM2-135M in bfloat16, over random ids, ours beside other caches and llama.cpp: half
# of the rows differ by 0.04 to 0.053, the worst one by 0.24. With one token of a suffix missing it is
# 0.084 and 0.37, with new tokens one position late 0.14 and 0.74, with the suffixes of other rows 0.34
# and 1.04.
TOLERANCES = {torch.float32: Tolerance(1e-4, 1e-3), torch.bfloat16: Tolerance(0.1, 0.5)}


@dataclass
class Agreement:
    """How far the logits of two peers are from each other.

    Attributes:
        differences: Of each row of each step: the root mean square of the differences of its logits,
            over their standard deviation.
        num_same_best: Rows with the same best token.
    """

    differences: list[float] = field(default_factory=list)
    num_same_best: int = 0

    def add(self, logits: Tensor, expected: Tensor) -> None:
        """Compares the logits `[num_rows, vocab_size]` of one step."""
        logits, expected = logits.float(), expected.float()
        apart = (logits - expected).square().mean(-1).sqrt() / expected.std(-1)
        self.differences += apart.tolist()
        self.num_same_best += int((logits.argmax(-1) == expected.argmax(-1)).sum())

    def is_within(self, tolerance: Tolerance) -> bool:
        """Whether the difference is no more than that."""
        # nothing that is compared with NaN is true
        return not any(map(math.isnan, self.differences)) and (
            median(self.differences) <= tolerance.typical
            and max(self.differences) <= tolerance.worst
        )


def disagreements(
    agreements: dict[str, Agreement], first: str, tolerance: Tolerance
) -> dict[str, str]:
    """Says of each peer that differs from the first one by more than the tolerance how far it does."""
    found = {}
    for name, agreement in agreements.items():
        if not agreement.is_within(tolerance):
            typical, worst = median(agreement.differences), max(agreement.differences)
            found[name] = (
                f"the logits of {name} differ from those of {first} by {typical:.2g} of their standard "
                f"deviation in half of the rows, and {worst:.2g} in the worst; up to "
                f"{tolerance.typical:g} and {tolerance.worst:g} is rounding. Its time would be that of "
                "other work."
            )
    return found


def check_agreement(agreements: dict[str, Agreement], first: str, tolerance: Tolerance) -> None:
    """Checks that peers agree with the first one.

    Raises:
        ResultsDiffer: They differ by more than the tolerance, or are no numbers.
    """
    for difference in disagreements(agreements, first, tolerance).values():
        raise ResultsDiffer(difference)
