import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import SHARED_PATH

TESTS = Path(__file__).parents[1]


@pytest.mark.smoke
@pytest.mark.slow
def test_ranks_that_share_the_heads_give_each_row_alone(tmp_path: Path) -> None:
    """Every rank caches its own heads, which the config does not count: huggingface/transformers
    #48307 and PR #39164."""
    # an even vocabulary, which older transformers cut too
    SHARED_PATH["llama"].model(vocab_size=98).save_pretrained(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", TESTS / "two_ranks.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
