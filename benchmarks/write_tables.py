"""Writes the tables of measured numbers: from files of results, between marks in the documents.

    python benchmarks/write_tables.py           # writes
    python benchmarks/write_tables.py --check   # says what would change, and exits with 1 if anything does

A mark names the table, a file in `benchmarks/results` or a pattern of files, and which of their runs:

    <!-- table summary cpu-amx.jsonl dtype=bfloat16 only="decode 16 x *; decode 1 x 4096 *" -->
    <!-- end of table -->

`summary` has a line for each run and a column for each peer, of which the best setting is shown; the
first run has lines for what is above no context, and for bytes. The name of a section (`decode`,
`ttft`, `drop_in`, `groups`, `trace`) has a line for each peer. Each file has a table of its own, with
machine and versions above it. `only` are patterns of section and
workload, with semicolons between them; `dtype` is a word of the workload.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from hf_granikv.bench.rows import read_rows
from hf_granikv.bench.runs import NO_CONTEXT, Run, family_of, runs_of
from hf_granikv.bench.tables import (
    TITLES,
    Table,
    compared,
    megabytes,
    milliseconds,
    seconds,
    table_of,
)

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- table (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

# families of peers in the order of their columns, and what the summary calls them
COLUMNS = {
    "granikv": "hf_granikv",
    "granikv-compiled": "the same, compiled",
    "granikv-frozen": "the same, weights frozen",
    "StaticCache": "StaticCache",
    "StaticCache-compiled": "StaticCache, compiled",
    "StaticCache-frozen": "StaticCache, weights frozen",
    "DynamicCache": "DynamicCache",
    "batch-global": "batch-global cascade",
    "batch-global-compiled": "batch-global, compiled",
    "batch-global-frozen": "batch-global, weights frozen",
    "continuous": "continuous batching",
    "llama.cpp": "llama.cpp",
    NO_CONTEXT: "no context at all",
}


class Mark(NamedTuple):
    """What a mark asks for."""

    table: str
    file: str
    dtype: str
    only: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """Reads what stands in a mark.

        Raises:
            ValueError: It names no table and file, or something unknown.
        """
        words = shlex.split(text)
        options = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        unknown = [word for word in words[2:] if word.split("=")[0] not in ("dtype", "only")]
        if len(words) < 2 or words[0] not in ("summary", *TITLES) or unknown:
            raise ValueError(
                f"the mark 'table {text}' is none: it has to be one of summary, {', '.join(TITLES)}, "
                "a file in benchmarks/results or a pattern, and dtype= and only= if need be."
            )
        patterns = [each.strip() for each in options.get("only", "*").split(";")]
        return cls(words[0], words[1], options.get("dtype", "*"), tuple(patterns))

    def selects(self, run: Run) -> bool:
        """Whether a run is in the table."""
        name = f"{run.bench} {run.workload}"
        is_section = self.table in ("summary", run.bench)
        is_dtype = self.dtype == "*" or self.dtype in re.split(r"[ ,]+", run.workload)
        return is_section and is_dtype and any(fnmatch(name, each) for each in self.only)


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A document with its tables as the results have them.

    Raises:
        ValueError: A mark is wrong, or selects nothing.
    """
    return _BLOCK.sub(lambda match: match[1] + block(match[2], results) + match[3], text)


def block(text: str, results: Path) -> str:
    """What belongs between two marks."""
    mark = Mark.parse(text)
    parts = []
    for path in sorted(results.glob(mark.file)):
        runs = [run for run in runs_of(read_rows(path)) if mark.selects(run)]
        runs.sort(key=lambda run: list(TITLES).index(run.bench))
        if runs:
            table = summary(runs) if mark.table == "summary" else table_of(runs)
            parts.append(f"{provenance(runs)}\n\n{table.markdown()}\n")
    if not parts:
        raise ValueError(f"the mark 'table {text}' selects no run of any file in {results}.")
    return "\n".join(parts)


def provenance(runs: Sequence[Run]) -> str:
    """Where runs come from, in a line; what differs among them is listed."""

    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run.where.get(name, "?")) for run in runs))

    return (
        f"{every('device')} ({every('isa')}), {every('threads')} threads, torch {every('torch')}, "
        f"transformers {every('transformers')}, commit {every('commit')}, {every('date')}"
    )


def summary(runs: Sequence[Run]) -> Table:
    """A line for each run, and for the first one also what its context and its cache cost."""
    found = {family_of(peer) for run in runs for peer in run.peers}
    families = [family for family in COLUMNS if family in found]
    lines: list[list[str]] = []
    for run in runs:
        title = _title(run)
        metric, show = ("ttft", seconds) if run.bench == "ttft" else ("step", milliseconds)
        lines.append([title, *(_best(run, family, metric, show) for family in families)])
        details = (("above no context", milliseconds), ("cache bytes", megabytes))
        metrics = ("step_above_no_context", "held")
        for (words, unit), detail in zip(details, metrics, strict=True) if run is runs[0] else ():
            cells = [
                "" if family == NO_CONTEXT else _best(run, family, detail, unit)
                for family in families
            ]
            if any(cells):
                lines.append([f"its {words}", *cells])
    return Table(["", *(COLUMNS[family] for family in families)], lines)


def _best(run: Run, family: str, metric: str, show: object) -> str:
    if family in run.peers and (family, "absent") in run.notes:
        return "not run"
    peer = run.best(family, metric if metric == "ttft" else "step")
    return "" if peer is None else compared(run, peer, metric, show)  # type: ignore[arg-type]


def _title(run: Run) -> str:
    """What was done, in words."""
    shape = run.shape
    if run.bench == "decode" and shape is not None:
        if shape.num_rows == 1:
            return f"decode step, 1 row over {shape.prefix_len:,} + {shape.suffix_len} tokens"
        rows = f"{shape.num_rows} rows over {shape.prefix_len:,} shared tokens"
        return f"decode step, {rows} + {shape.suffix_len} each"
    if run.bench == "ttft" and shape is not None:
        return f"first token, {shape.num_rows} rows over {shape.prefix_len:,} shared tokens"
    if run.bench == "groups":
        agents, _, rest = run.workload.partition(" x ")
        lengths = rest.partition(" + ")[0].split("/")
        return (
            f"decode step, {agents} rows over each of {len(lengths)} prefixes of "
            f"{int(lengths[0]):,} to {int(lengths[-1]):,} tokens"
        )
    return f"{run.bench}, {run.workload}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="writes nothing")
    is_check = parser.parse_args().check
    stale = [path for path in DOCUMENTS if rewritten(path.read_text()) != path.read_text()]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} {'is not what the results say' if is_check else 'written'}"
        )
        if not is_check:
            path.write_text(rewritten(path.read_text()))
    return int(is_check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
