"""What a cache did: which path ran how often, and why others were refused."""

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Journal:
    """Counters behind `AsymmetricPagedCache.stats` and `AsymmetricPagedCache.explain`.

    Attributes:
        backend_steps: Forward passes whose prefix part ran in each backend.
        dense_reads: Per layer, how often its keys or values were put together densely.
    """

    def __init__(self) -> None:
        self.backend_steps: Counter[str] = Counter()
        self.dense_reads: Counter[int] = Counter()
        self._dense_askers: Counter[str] = Counter()
        self._decisions: dict[str, str] = {}
        self._fused: list[str] = []
        self._decodes: Counter[str] = Counter()

    def note_backend(self, name: str, described: str) -> None:
        """Counts one forward pass; `described` is the reckoning that led to the choice."""
        self.backend_steps[name] += 1
        self._decisions[name] = described

    def note_decode(self, reasons: list[str]) -> None:
        """Counts a kind of layer in a decode step: compiled, or in torch for these reasons."""
        self._decodes["compiled" if not reasons else f"in torch ({', '.join(reasons)})"] += 1

    def note_fused(self, described: str) -> None:
        """Notes that a prefix keeps tokens of its parents, and on what reckoning."""
        self._fused.append(described)

    def note_dense(self, layer_idx: int, asked_by: str) -> None:
        """Counts one dense tensor, and logs the first of each layer."""
        if not self.dense_reads[layer_idx]:
            logger.info(
                "Layer %d: %s needs keys and values in one piece; they are built for every "
                "forward pass. Load the model with attn_implementation='granikv' where its "
                "attention allows it.",
                layer_idx,
                asked_by,
            )
        self.dense_reads[layer_idx] += 1
        self._dense_askers[asked_by] += 1

    def lines(self) -> list[str]:
        """The report, a fact a line."""
        report = [
            f"backend {name}: {count} forward passes; last: {self._decisions[name]}"
            for name, count in sorted(self.backend_steps.items())
        ]
        if self.dense_reads:
            askers = ", ".join(f"{name} x{n}" for name, n in self._dense_askers.most_common(5))
            report.append(
                f"dense route: keys or values of {len(self.dense_reads)} layers were put together "
                f"{sum(self.dense_reads.values())} times, asked for by {askers}."
            )
        report += [
            f"private tokens of decode steps, {how}: {count} times"
            for how, count in self._decodes.items()
        ]
        report += [f"fused: {described}" for described in self._fused]
        if not self.backend_steps and not self.dense_reads:
            report.append("no forward pass has read a prefix yet.")
        return report
