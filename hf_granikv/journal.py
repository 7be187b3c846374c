"""What a cache did: which path ran how often, and why others were refused."""

import logging
import re
from collections import Counter, deque

logger = logging.getLogger(__name__)


class Journal:
    """Counters behind `AsymmetricPagedCache.stats` and `AsymmetricPagedCache.explain`.

    Attributes:
        backend_steps: Forward passes whose prefix part ran in each backend.
        dense_reads: Per layer, how often its keys or values were put together densely.
        promoted_tokens: Tokens that rows had computed for themselves, and have come to share since.
        once_tokens: Tokens that one row computed for several.
    """

    def __init__(self) -> None:
        self.backend_steps: Counter[str] = Counter()
        self.dense_reads: Counter[int] = Counter()
        self._dense_askers: Counter[str] = Counter()
        self._decisions: dict[str, str] = {}
        self.promoted_tokens = 0
        self.once_tokens = 0
        self._decodes: Counter[str] = Counter()
        self._fused: deque[str] = deque(maxlen=20)
        # by what they say but for the numbers: how often, and the latest
        self._not_shared: Counter[str] = Counter()
        self._not_shared_last: dict[str, str] = {}

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

    def note_not_shared(self, reason: str) -> None:
        """Counts tokens that rows have in common and go on holding each for itself, and why."""
        kind = re.sub(r"\d+", "n", reason)
        self._not_shared[kind] += 1
        self._not_shared_last[kind] = reason

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
        if self.promoted_tokens or self.once_tokens:
            report.append(
                f"shared: {self.promoted_tokens} tokens that rows held each for itself, "
                f"{self.once_tokens} that one of them computed for several."
            )
        report += [
            f"not shared: {self._not_shared_last[kind]} (x{count})"
            for kind, count in self._not_shared.most_common(5)
        ]
        if not self.backend_steps and not self.dense_reads:
            report.append("no forward pass has read a prefix yet.")
        return report
