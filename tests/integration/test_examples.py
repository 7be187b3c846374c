import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))
# what each example is about, as its last lines must show it
SHOWN = {
    "beams_and_sampling": "16 beams",
    "debate": "of them computed; held before:",
    "few_shot": "5 rows over 2 prefixes",
    "grpo": "8 rows share 3 prefixes",
    "living_batch": "tokens came meanwhile",
    "runner": "(computed once)",
    "shared_prefix": "a DynamicCache would hold",
    "smolagents_model": "of them computed",
}
NEEDS = {"smolagents_model": "smolagents"}


@pytest.mark.smoke
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_with_its_default_model(example):
    if example.stem in NEEDS:
        pytest.importorskip(NEEDS[example.stem])
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", str(example)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[example.stem] in done.stdout
