"""Whether a turn that has to wait keeps what it has computed, or computes it again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What the two ways to give room back cost.

    A turn resumes exactly in both: the ids of its answer, its random draws and its processors stay
    with it, only keys and values go.

    Attributes:
        frees_budget: Whether what is kept goes to another memory than that of running rows: to the
            host, where the model is on an accelerator. Elsewhere keeping gives no room, and everything
            is computed again.
        bytes_per_s: How fast it is moved, one way.
        tokens_per_s: How fast prompts are computed.
    """

    frees_budget: bool = False
    bytes_per_s: float = 1e10
    tokens_per_s: float = 1e3

    def keeps(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether moving so many tokens out and back takes less time than computing them."""
        moved_s, computed_s = 2 * num_bytes / self.bytes_per_s, num_tokens / self.tokens_per_s
        return self.frees_budget and moved_s < computed_s
