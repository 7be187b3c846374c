"""Calibration of a device that is one of several ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_granikv.dispatch.calibration_file import read_calibration

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_link_between_two_ranks_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", TESTS / "calibrating_ranks.py", out],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    link = read_calibration(out).constants.link_bytes_per_s
    assert link is not None
    assert link > 1e6
    # one of them says it, the other answers
    assert done.stdout.count("between ranks") == 1
    assert done.stdout.count("saved as") == 1
