"""What a cache did: which path ran how often and how fast, and why others were refused."""

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Set
from statistics import median

from hf_granikv.errors import warn_nothing_shared
from hf_granikv.wording import counted

logger = logging.getLogger(__name__)

# forward passes whose times are remembered
_REMEMBERED = 32


class GroupNote:
    """How the prefix part of one group runs, and what that takes.

    Args:
        describe: Says what the group is and why it runs as it does.
        is_timed: Whether its coming run is to be timed.

    Attributes:
        is_due: Whether the coming run is to be timed.
    """

    def __init__(self, describe: Callable[[], str], *, is_timed: bool) -> None:
        self._describe = describe
        self._taken: deque[Callable[[], float]] = deque(maxlen=_REMEMBERED)
        self.is_due = is_timed

    def took(self, seconds: Callable[[], float]) -> None:
        """Takes the time of a run; it is asked for when somebody wants to know."""
        self.is_due = False
        self._taken.append(seconds)

    @property
    def measured_s(self) -> float | None:
        """Median seconds of the runs that were timed last, one layer each; None without any."""
        return median(seconds() for seconds in self._taken) if self._taken else None

    def __str__(self) -> str:
        measured_s = self.measured_s
        measured = "" if measured_s is None else f"; measured {1e6 * measured_s:.0f} us"
        return f"{self._describe()}{measured}"


class ForwardNotes:
    """What one forward pass notes in the journal of its cache: each backend once, each group once."""

    def __init__(self, journal: "Journal") -> None:
        self._journal = journal
        self._before: dict[str, dict[Hashable, GroupNote]] = {}

    def add(
        self,
        backend_name: str,
        group: Hashable,
        describe: Callable[[], str],
        *,
        is_timed: bool,
        note: GroupNote | None = None,
    ) -> GroupNote:
        """Notes that a group is served by a backend.

        Args:
            backend_name: The backend.
            group: What tells the group from others; one of the forward pass before that is equal has
                its times go on.
            describe: See `GroupNote`.
            is_timed: Likewise.
            note: What was given for the group in an earlier forward pass, if that is known.
        """
        journal = self._journal
        if backend_name not in self._before:
            self._before[backend_name] = journal.groups.get(backend_name, {})
            journal.groups[backend_name] = {}
            journal.backend_steps[backend_name] += 1
            journal.latest = self._before.keys()
        notes, before = journal.groups[backend_name], self._before[backend_name]
        note = note or notes.get(group) or before.get(group)
        if note is None:
            note = GroupNote(describe, is_timed=is_timed)
        note.is_due = is_timed
        notes[group] = note
        return note


class Journal:
    """Counters behind `AsymmetricPagedCache.stats` and `AsymmetricPagedCache.explain`.

    Attributes:
        backend_steps: Forward passes whose prefix part ran in each backend.
        groups: For each backend, the groups of the last forward pass that it served.
        latest: The backends of the last forward pass that read a prefix.
        dense_reads: Per layer, how often its keys or values were put together densely.
        promoted_tokens: Tokens that rows had computed for themselves, and have come to share since.
        once_tokens: Tokens that one row computed for several.
        merged_levels: How many of what rows share were stored as one with what comes before.
        steps_in_graphs: Forward passes that graphs of `torch.compile` ran.
        reckoning: Where the constants of predictions come from.
        times_accelerators: Whether groups are timed where that takes events; on a CPU they are.
        has_warned: Whether it was said that nothing is shared, or that is known to the caller.
    """

    def __init__(self) -> None:
        self.backend_steps: Counter[str] = Counter()
        self.groups: dict[str, dict[Hashable, GroupNote]] = {}
        self.latest: Set[str] = frozenset()
        self.dense_reads: Counter[int] = Counter()
        self.reckoning = ""
        self.times_accelerators = False
        self.has_warned = False
        self._dense_askers: Counter[str] = Counter()
        self._unshared_reads: Counter[int] = Counter()
        self.promoted_tokens = 0
        self.once_tokens = 0
        self.merged_levels = 0
        self.steps_in_graphs = 0
        self._decodes: Counter[str] = Counter()
        self._fused: deque[str] = deque(maxlen=20)
        # by what they say but for the numbers: how often, and the latest
        self._not_shared: Counter[str] = Counter()
        self._not_shared_last: dict[str, str] = {}

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

    def note_dense(self, layer_idx: int, asked_by: str, num_together: int) -> None:
        """Counts one dense tensor, logs the first of each layer, warns where all are dense.

        Args:
            layer_idx: The layer.
            asked_by: Who needs it.
            num_together: Rows of the largest group; a single row has nobody to share with.
        """
        if not self.dense_reads[layer_idx]:
            logger.info(
                "Layer %d: %s needs keys and values in one piece; they are built for every "
                "forward pass.%s",
                layer_idx,
                asked_by,
                _advice(asked_by),
            )
        self.dense_reads[layer_idx] += 1
        self._dense_askers[asked_by] += 1
        self._unshared_reads[layer_idx] += num_together > 1
        # keys and values of one forward pass may have had a reason of their own
        if self._unshared_reads[layer_idx] > 2 and not self.backend_steps:
            self.warn_unshared(
                f"nothing is shared: each row reads the whole prefix by itself in every layer, since "
                f"{asked_by} needs keys and values in one piece.{_advice(asked_by)} cache.explain() says more."
            )

    def warn_unshared(self, why: str) -> None:
        """Warns, once, a caller who asked for sharing that it does not happen, or not all of it."""
        if not self.has_warned:
            self.has_warned = True
            warn_nothing_shared(why)

    def lines(self) -> list[str]:
        """The report, a fact a line."""
        report: list[str] = []
        for name, count in sorted(self.backend_steps.items()):
            last = "last" if name in self.latest else "not the latest one; its own last"
            head, notes = f"backend {name}: {_passes(count)}; {last}", self.groups[name]
            if len(notes) == 1:
                report += [f"{head}: {note}" for note in notes.values()]
            else:
                report += [f"{head}, {len(notes)} groups:", *(f"  {n}" for n in notes.values())]
        if self.reckoning:
            report.append(f"predictions: {self.reckoning}.")
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
        if self.steps_in_graphs:
            report.append(f"in graphs of torch.compile: {_passes(self.steps_in_graphs)}.")
        report += [f"fused: {described}" for described in self._fused]
        if self.promoted_tokens or self.once_tokens:
            report.append(
                f"shared: {self.promoted_tokens} tokens that rows held each for itself, "
                f"{self.once_tokens} that one of them computed for several; "
                f"{self.merged_levels} times two levels with the same readers became one."
            )
        report += [
            f"not shared: {self._not_shared_last[kind]} (x{count})"
            for kind, count in self._not_shared.most_common(5)
        ]
        if not self.backend_steps and not self.dense_reads:
            report.append("no forward pass has read a prefix yet.")
        return report


def _passes(number: int) -> str:
    return counted(number, "forward pass", "forward passes")


def _advice(asked_by: str) -> str:
    """What to do where keys and values are asked for in one piece; where ours asks, it says why."""
    if asked_by.startswith("granikv"):
        return ""
    return " Load the model with attn_implementation='granikv' where its attention allows it."
