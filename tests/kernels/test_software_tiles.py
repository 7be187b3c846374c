"""What is written for the tiles of a CPU, where there are none: with tiles in software."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention import TiledAttention

TESTS = Path(__file__).parents[1]
FILES = ("kernels/test_compiled_shared_attention.py", "kernels/test_decode_chain.py")
# a test of each file that is known to use them
RAN = (
    "test_equals_dense_attention[(16, 9, 3, 1, 4097, 64)-TiledAttention-bfloat16]",
    "test_equals_attention_over_all_that_a_row_reads[torch.bfloat16-2]",
)


def has_wide_vectors() -> bool:
    llvm = compiled.load("hf_granikv.kernels._numba_llvm")
    return not isinstance(llvm, str) and "+avx512bw" in llvm.cpu_features()


@pytest.mark.skipif(not TiledAttention.missing(), reason="their tests run on real ones")
@pytest.mark.skipif(not has_wide_vectors(), reason="no numba, or a CPU without AVX-512")
def test_the_tests_of_tiles_pass_on_tiles_in_software() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "software_tiles", "-p", "no:cacheprovider"]
    command += ["-rA", "-k", "TiledAttention or chain", *(str(TESTS / file) for file in FILES)]

    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}

    result = subprocess.run(
        command, cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False
    )

    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "SKIPPED" not in output, output
    for name in RAN:
        assert f"::{name}" in output, output
