"""Benchmark rows: JSON lines with where they come from."""

import datetime
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class Row:
    """One measured number: its median and the 20th and 80th percentile."""

    bench: str
    peer: str
    workload: str
    metric: str
    unit: str
    value: float
    p20: float
    p80: float


def measured(
    bench: str, peer: str, workload: str, metric: str, unit: str, values: list[float]
) -> Row:
    """A row from repeated measurements."""
    if len(values) == 1:
        values = values * 2
    fifths = quantiles(values, n=10, method="inclusive")
    return Row(bench, peer, workload, metric, unit, fifths[4], fifths[1], fifths[7])


def environment() -> dict[str, Any]:
    """Machine and versions."""
    return {
        "device": _cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def finish(rows: list[Row], *, out: str | None, summary: dict[str, Any]) -> None:
    """Appends the rows to `out` and prints the summary as the one JSON line that ends a run."""
    where = environment()
    if out:
        with Path(out).open("a") as file:
            file.writelines(json.dumps({**asdict(row), **where}) + "\n" for row in rows)
    print(json.dumps({**summary, **where}))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
