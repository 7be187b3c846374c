import os
import runpy
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
# sets up logging, which is for a program to do
PROGRAM = ROOT / "examples" / "grpo.py"


@pytest.mark.smoke
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path != PROGRAM], ids=lambda path: path.stem
)
def test_example_runs_with_its_default_model(example, monkeypatch, capsys):
    if example.stem in NEEDS:
        pytest.importorskip(NEEDS[example.stem])
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(example.parent)
    runpy.run_path(str(example), run_name="__main__")
    assert SHOWN[example.stem] in capsys.readouterr().out


@pytest.mark.smoke
def test_an_example_is_a_program_that_needs_nothing_of_the_tests():
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[PROGRAM.stem] in done.stdout
