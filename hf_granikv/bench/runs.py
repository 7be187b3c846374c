"""What a file of results holds: runs, each of peers that took turns on one workload."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_DECODE = re.compile(r"(\d+) x (\d+) \+ (\d+), (\w+)")

NO_CONTEXT = "no-context"
# peers with settings to try, of which a summary shows the one that is best
_FAMILIES = ("llama.cpp", "continuous")


class Shape(NamedTuple):
    """The workload of a decode step."""

    num_rows: int
    prefix_len: int
    suffix_len: int
    dtype: str


@dataclass
class Run:
    """Figures that may be compared: they were measured in turns, in one process.

    Attributes:
        bench: The section.
        workload: What was done.
        where: Machine, versions, commit and date.
        peers: Who was measured, or is absent; the others are compared with the first.
        values: Medians by peer and metric.
        notes: What has to be known about them, by peer and metric.
    """

    bench: str
    workload: str
    where: dict[str, Any]
    peers: list[str] = field(default_factory=list)
    values: dict[tuple[str, str], float] = field(default_factory=dict)
    spreads: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def shape(self) -> Shape | None:
        """What the workload was, if it is one of rows over one prefix."""
        match = _DECODE.fullmatch(self.workload)
        if match is None:
            return None
        num_rows, prefix_len, suffix_len, dtype = match.groups()
        return Shape(int(num_rows), int(prefix_len), int(suffix_len), dtype)

    def value(self, peer: str, metric: str) -> float | None:
        """A figure, if it was measured."""
        return self.values.get((peer, metric))

    def ratio(self, peer: str, metric: str) -> float | None:
        """A figure over that of the first peer; None where that says nothing."""
        theirs, first = self.value(peer, metric), self.value(self.peers[0], metric)
        if peer in (self.peers[0], NO_CONTEXT) or theirs is None or first is None:
            return None
        # what is above no context may be less than the noise
        return theirs / first if theirs > 0 and first > 0 else None

    def is_rival(self, peer: str) -> bool:
        """Whether the first peer is ours, and this one is not."""
        ours = [name.startswith("granikv") for name in (self.peers[0], peer)]
        return ours == [True, False]

    def best(self, family: str, metric: str) -> str | None:
        """The peer of a family with the least of a metric; the family's name may be a peer's."""
        members = [peer for peer in self.peers if family_of(peer) == family]
        members = [peer for peer in members if self.value(peer, metric) is not None]
        return min(members, key=lambda peer: self.values[peer, metric], default=None)


def family_of(peer: str) -> str:
    """What a peer is a variant of: itself, or another engine with other settings."""
    return next((name for name in _FAMILIES if peer.split("-")[0] == name), peer)


def runs_of(rows: Iterable[Mapping[str, Any]]) -> list[Run]:
    """The last run of each workload, in the order in which workloads first come.

    Rows of one run follow each other. A new one begins where a figure comes again, or section,
    workload, commit or time change.
    """
    runs: dict[tuple[str, str], Run] = {}
    last: Run | None = None
    began: tuple[Any, ...] = ()
    for row in rows:
        key = (row["bench"], row["workload"])
        begins = (*key, row.get("commit"), row.get("date"), row.get("run"))
        figure = (row["peer"], row["metric"])
        if last is None or begins != began or figure in last.values:
            known = ("model", "device", "isa", "threads", "torch", "transformers", "commit", "date")
            last = Run(*key, {name: row[name] for name in known if name in row})
            runs[key], began = last, begins
        if row["peer"] not in last.peers:
            last.peers.append(row["peer"])
        last.values[figure] = row["value"]
        last.spreads[figure] = (row.get("p20", row["value"]), row.get("p80", row["value"]))
        if note := row.get("note"):
            last.notes[figure] = note
    return list(runs.values())
