"""Tables of runs: for the terminal, and in Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_granikv.bench.runs import NO_CONTEXT, Run

TITLES = {
    "decode": "rows x prefix + suffix",
    "groups": "rows x prefixes + suffix",
    "ttft": "rows x prefix + suffix",
    "drop_in": "rows, tokens",
    "trace": "requests",
}
# cells of one peer in one run, by the heading of their column
_Cells = dict[str, str]


@dataclass(frozen=True)
class Table:
    """Text in columns.

    Attributes:
        heading: Of each column.
        lines: The cells of each line, as many as there are columns.
    """

    heading: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table in Markdown, a line for each."""
        rule = "|" + "---|" * len(self.heading)
        rows = ["| " + " | ".join(cells) + " |" for cells in (self.heading, *self.lines)]
        # an empty cell is one blank, not two
        rows = [row.replace("|  |", "| |").replace("|  |", "| |") for row in rows]
        return "\n".join([rows[0], rule, *rows[1:]])

    def text(self) -> str:
        """The table in aligned columns, without marks of Markdown."""
        rows = [[cell.replace("**", "") for cell in cells] for cells in (self.heading, *self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()
            for cells in rows
        )


def table_of(runs: Sequence[Run]) -> Table:
    """All peers of runs of one section, a line each; columns without a figure are left out."""
    bench = runs[0].bench
    lines: list[_Cells] = []
    for run in runs:
        for peer in run.peers:
            # a workload is named once, in the line of the first peer
            named = {TITLES[bench]: run.workload if peer == run.peers[0] else "", "peer": peer}
            lines.append({**named, **_cells(run, peer)})
    heading = list(dict.fromkeys(name for line in lines for name in line))
    heading = [name for name in heading if any(line.get(name) for line in lines)]
    return Table(heading, [[line.get(name, "") for name in heading] for line in lines])


def compared(run: Run, peer: str, metric: str, show: Callable[[float], str]) -> str:
    """A figure that is better when less, and how many times less ours is."""
    value, ratio = run.value(peer, metric), run.ratio(peer, metric)
    if value is None:
        return ""
    return show(value) if ratio is None else f"{show(value)} ({verdict(run, peer, ratio)})"


def verdict(run: Run, peer: str, ratio: float) -> str:
    """How many times better ours is, in words where it is worse."""
    text = f"{ratio:.2f}"
    return f"**{text}x: we lose**" if float(text) < 1 and run.is_rival(peer) else f"{text}x"


def milliseconds(value: float) -> str:
    """A time of some milliseconds, to three digits."""
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.1f} ms"


def seconds(value: float) -> str:
    """A time of some seconds."""
    return f"{value:.1f} s" if value >= 0.95 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Bytes, in millions."""
    return f"{value / 1e6:,.0f} MB" if value >= 10e6 else f"{value / 1e6:.1f} MB"


def _cells(run: Run, peer: str) -> _Cells:
    if reason := run.notes.get((peer, "absent")):
        return {"step": f"not run: {reason}"}
    if run.bench == "trace":
        return _trace_cells(run, peer)
    if run.bench == "ttft":
        computed = run.value(peer, "tokens_computed")
        return {
            "first token": compared(run, peer, "ttft", seconds),
            "tokens computed": "" if computed is None else f"{computed:,.0f}",
        }
    costs: _Cells = {}
    if peer != NO_CONTEXT:
        above = compared(run, peer, "step_above_no_context", milliseconds)
        costs = {"above no context": above, "cache bytes": compared(run, peer, "held", megabytes)}
    step = (peer, "step")
    spread = ""
    if step in run.spreads:
        spread = " to ".join(milliseconds(bound).removesuffix(" ms") for bound in run.spreads[step])
    return {
        "step": compared(run, peer, "step", milliseconds),
        "p20 to p80": spread,
        **costs,
        "logits apart (same best token)": _agreement(run, peer),
    }


def _trace_cells(run: Run, peer: str) -> _Cells:
    def times(metric: str, unit: float, suffix: str) -> str:
        both = (run.value(peer, f"{metric}_median_s"), run.value(peer, f"{metric}_p99_s"))
        return " / ".join(f"{x * unit:.2f}" for x in both if x is not None) + suffix

    rate, ours = run.value(peer, "tokens_per_s"), run.value(run.peers[0], "tokens_per_s")
    throughput = "" if rate is None else f"{rate:.1f}"
    if rate and ours and peer != run.peers[0]:
        throughput += f" ({verdict(run, peer, ours / rate)})"
    peak = run.value(peer, "peak_bytes")
    return {
        "tokens/s": throughput,
        "first token, median / p99": times("first_token", 1.0, " s"),
        "next token, median / p99": times("between_tokens", 1e3, " ms"),
        "most bytes": "" if peak is None else megabytes(peak),
    }


def _agreement(run: Run, peer: str) -> str:
    apart, same = run.value(peer, "logits_difference"), run.value(peer, "same_best_token")
    return "" if apart is None or same is None else f"{100 * apart:.2g} % ({100 * same:.0f} %)"
