"""Benchmark rows: JSON lines with where they come from."""

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import transformers

import hf_granikv

# what a processor has for bfloat16, which torch's name of its instruction set does not say
_MATRIX_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Row:
    """One measured number: its median and the 20th and 80th percentile.

    Attributes:
        bench: The section that measured it.
        peer: Whose it is.
        workload: What was done.
        metric: What was measured.
        unit: Of the values.
        value: The median.
        p20: 20th percentile.
        p80: 80th percentile.
        note: What else has to be known about it; of the metric `absent`, why nothing was measured.
    """

    bench: str
    peer: str
    workload: str
    metric: str
    unit: str
    value: float
    p20: float
    p80: float
    note: str = ""


def measured(
    bench: str,
    peer: str,
    workload: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    note: str = "",
) -> Row:
    """A row from repeated measurements."""
    repeated = [*values] * 2 if len(values) == 1 else [*values]
    tenths = quantiles(repeated, n=10, method="inclusive")
    return Row(bench, peer, workload, metric, unit, tenths[4], tenths[1], tenths[7], note)


def absent(bench: str, peer: str, workload: str, reason: str) -> Row:
    """A row that says why a peer was not measured."""
    return Row(bench, peer, workload, "absent", "", 0.0, 0.0, 0.0, reason)


def environment(model: str) -> dict[str, Any]:
    """Model, machine, versions, and when."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "model": model,
        "device": _cpu_name(),
        "isa": _instruction_sets(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        "date": now.date().isoformat(),
        "run": now.isoformat(timespec="seconds"),
    }


def record(rows: Sequence[Row], where: dict[str, Any], out: str | None) -> list[dict[str, Any]]:
    """The rows of one run as they are kept; appended to the file `out` if there is one."""
    kept = [{**asdict(row), **where} for row in rows]
    if out:
        with Path(out).open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in kept)
    return kept


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results.

    Raises:
        ValueError: There is no such file, or a line of it is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file; give one that `granikv bench --out` has written.")
    kept = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            row["bench"], row["peer"], row["workload"], row["metric"], row["value"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number} is no row of results ({error}); give a file that "
                "`granikv bench --out` has written."
            ) from error
        kept.append(row)
    return kept


def _cpu_name() -> str:
    for line in _cpu_info():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _instruction_sets() -> str:
    flags = next(
        (line.split() for line in _cpu_info() if line.startswith(("flags", "Features"))), []
    )
    return ", ".join(
        [torch.backends.cpu.get_cpu_capability(), *(f for f in _MATRIX_FLAGS if f in flags)]
    )


def _cpu_info() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []


def _commit() -> str:
    """The commit of the package, or its version where it is installed without one."""
    if not _git("ls-files", Path(__file__).name):
        return f"hf_granikv {hf_granikv.__version__}"
    # results are files of the repository, and the first row written is no change of what is measured
    is_changed = _git("status", "--porcelain", "--", str(Path(hf_granikv.__file__).parent))
    return _git("describe", "--always") + ("-dirty" if is_changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
