"""The command `granikv bench`: sections, the suite of them, and what is made of results."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_granikv.bench import decode, drop_in, groups, trace, ttft
from hf_granikv.bench.agreement import ResultsDiffer
from hf_granikv.bench.options import add_common, check_common, model_name
from hf_granikv.bench.plots import draw
from hf_granikv.bench.rows import environment, read_rows, record
from hf_granikv.bench.runs import runs_of
from hf_granikv.bench.suite import QUICK, SUITE
from hf_granikv.bench.tables import table_of

SECTIONS: dict[str, Any] = {
    "decode": decode,
    "ttft": ttft,
    "drop-in": drop_in,
    "groups": groups,
    "trace": trace,
}
_EPILOG = """parts of the suite:
""" + "\n".join(f"  granikv bench {part.section} {part.options}" for part in SUITE)


def main(argv: Sequence[str]) -> int:
    """Runs `granikv bench` with the arguments after these words, and gives the exit code.

    0: measured. 1: results differ, so that nothing was measured. 2: it cannot be done, and why.
    """
    # options without a section are those of the whole suite
    named = argv[:1] and (argv[0] in ("-h", "--help") or not argv[0].startswith("-"))
    arguments = _parser().parse_args(argv if named else ["all", *argv])
    try:
        check_common(arguments)
        code: int = arguments.run(arguments)
    except ResultsDiffer as error:
        print(f"granikv bench: {error}", file=sys.stderr)
        return 1
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # the errors of libraries may run over many lines
        print(f"granikv bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="granikv bench",
        description="Measures this package beside other caches and engines, in turns in one process, "
        "after their results were compared. Without a section: the suite.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sections = parser.add_subparsers(dest="section", required=True)
    for name, module in SECTIONS.items():
        section = sections.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(section)
        section.set_defaults(run=_run_section)
    whole = sections.add_parser("all", help="the suite, each part in a process of its own")
    add_common(whole)
    whole.add_argument("--quick", action="store_true", help="tiny workloads: does it run here?")
    whole.set_defaults(run=_run_suite)
    show = sections.add_parser("show", help="tables and plots of results that are there")
    show.add_argument("results", metavar="FILE", help="what --out has written")
    show.add_argument("--plot", metavar="DIR", help="folder for plots; needs matplotlib")
    show.set_defaults(run=_show, out=None)
    return parser


def _run_section(arguments: argparse.Namespace) -> int:
    rows = SECTIONS[arguments.section].run(arguments)
    where = environment(model_name(arguments))
    kept = record(rows, where, arguments.out)
    _print_tables(kept)
    _plot(arguments.plot, read_rows(Path(arguments.out)) if arguments.out else kept)
    print(json.dumps({**_summary(kept), **where}))
    return 0


def _run_suite(arguments: argparse.Namespace) -> int:
    parts = QUICK if arguments.quick else SUITE
    common = ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    common += ["--model", arguments.model] if arguments.model else []
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or str(Path(folder) / "results.jsonl")
        for number, part in enumerate(parts, start=1):
            print(f"[{number}/{len(parts)}] {part.section} {part.options}", flush=True)
            command = [sys.executable, "-m", "hf_granikv.cli", "bench", part.section]
            # a process of its own has nothing of what was measured before in its memory
            command += [*part.options.split(), *common, "--out", out]
            codes.append(subprocess.run(command, check=False).returncode)
            if codes[-1] < 0:
                raise RuntimeError(
                    f"{part.section} {part.options} was killed (signal {-codes[-1]})"
                )
        if arguments.plot and Path(out).exists():
            _plot(arguments.plot, read_rows(Path(out)))
    return max(codes)


def _show(arguments: argparse.Namespace) -> int:
    rows = read_rows(Path(arguments.results))
    if not rows:
        raise ValueError(f"{arguments.results} holds no rows; give a file that --out has written.")
    _print_tables(rows)
    _plot(arguments.plot, rows)
    return 0


def _print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    runs = sorted(runs_of(rows), key=lambda run: list(SECTIONS).index(run.bench.replace("_", "-")))
    for bench, same in groupby(runs, key=lambda run: run.bench):
        print(f"\n{bench}\n{table_of(list(same)).text()}\n")


def _plot(folder: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if folder is None:
        return
    files = draw(runs_of(rows), Path(folder))
    print("\n".join(map(str, files)) or "nothing to plot: two runs of decode are the least")


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a run, for one line of JSON."""
    figures: dict[str, Any] = {}
    for run in runs_of(rows):
        metric = (
            "tokens_per_s" if run.bench == "trace" else "ttft" if run.bench == "ttft" else "step"
        )
        figures[run.workload] = {
            peer: run.values[peer, metric] for peer in run.peers if (peer, metric) in run.values
        }
    return {"bench": rows[0]["bench"], **figures}
