"""How a model runs the forward passes over a cache."""

from dataclasses import dataclass


@dataclass(slots=True)
class Forwards:
    """What is known of the forwards over one cache.

    Attributes:
        needs_mask: Whether models are given the mask of rows that come and go.
        goes_straight: Whether the last complete forward did (`StepPlan.goes_straight`).
        is_in_graph: Whether a graph of `torch.compile` runs the one under way.
    """

    needs_mask: bool = True
    goes_straight: bool = False
    is_in_graph: bool = False

    def why_unmasked(self, *, is_rectangle: bool) -> str | None:
        """Why layers of the forward under way get no mask; None if they do, or need none.

        Args:
            is_rectangle: Whether rows are of one length, over prefixes of one length.
        """
        if self.is_in_graph:
            # nor one of windows, or of queries that see no later ones
            return "compiled forwards have none; run this model without torch.compile"
        return None if self.needs_mask or is_rectangle else "packed forwards have none"
