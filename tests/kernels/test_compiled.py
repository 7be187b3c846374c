"""What is kept of compiled kernels, and what an installation may lack."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_granikv.kernels import compiled, decode_attention
from hf_granikv.kernels.decode_attention import attention
from hf_granikv.views import PrivateTokens

types = pytest.importorskip("hf_granikv.kernels._numba_types")

VALUE = """
from numba import njit

@njit
def value():
    return {}
"""
ENTRY = """
from granikv_value import value
from hf_granikv.kernels._numba_types import c_function

@c_function
def put(pointer):
    pointer[0] = value()
"""

Put = Callable[[int], int]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """`put(value)`: what a kernel gives that another file says the value of, loaded afresh."""
    monkeypatch.setattr(types, "_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "granikv_entry.py").write_text(ENTRY)

    def loaded(value: int) -> int:
        (tmp_path / "granikv_value.py").write_text(VALUE.format(value))
        forget()
        from granikv_entry import put

        numbers = np.zeros(1, dtype=np.int64)
        put.ctypes(numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
        return int(numbers[0])

    yield loaded
    forget()


def forget() -> None:
    for name in ("granikv_entry", "granikv_value"):
        sys.modules.pop(name, None)


def test_a_change_of_any_file_is_compiled(put: Put, tmp_path: Path) -> None:
    """Numba looks at the file of the function alone, and went on with the code of the others."""
    assert put(1) == 1
    assert list(tmp_path.rglob("*.nbc"))
    assert put(22) == 22


def test_without_a_folder_to_write_to_each_process_compiles(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_LOCATOR_CLASSES", "ZipCacheLocator")
    assert put(3) == 3
    assert not list(tmp_path.rglob("*.nbc"))


def test_numba_without_its_compiler_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert why_not() == "NUMBA_DISABLE_JIT=1 is set"


@pytest.mark.parametrize("version", ["0.61.2", "0.9.0rc1"])
def test_an_old_numba_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("numba.__version__", version)
    assert f"numba {version} is too old" in why_not()


def test_what_is_kept_on_disk_computes_what_was_compiled() -> None:
    """Numba optimises it once more than what it runs itself, and LLVM 22 lost some odd tokens."""
    code = """
from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention import attention, trial
assert not isinstance(compiled.load(attention.MODULE), str)
print(trial.largest_error())
"""
    assert not isinstance(compiled.load(attention.MODULE), str)
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Compiled" not in run.stderr
    assert float(run.stdout) <= 1


@pytest.mark.parametrize("error", [1.5, float("inf")])
def test_a_kernel_that_errs_on_this_cpu_is_reported_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: float
) -> None:
    monkeypatch.setattr(decode_attention, "largest_error", lambda: error)
    query, storages = torch.zeros(1, 1, 1, 16), (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    private = PrivateTokens(storages, np.zeros((1, 1), dtype=np.int64), 1, lambda: storages)
    with torch.no_grad():
        (why,) = decode_attention.unsupported_reasons(query, private)
    assert f"wrongly for this CPU (error {error:.2g} times the bound)" in why
    assert "decode_attention._numba is not used" in caplog.text


def test_a_trial_that_fails_is_a_reason_against_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> float:
        raise RuntimeError("no reference")

    assert compiled.fault(attention.MODULE, fails) == "its trial fails: no reference"
    assert "decode_attention._numba is not used, its trial fails" in caplog.text


def why_not() -> str:
    compiled.load.cache_clear()
    try:
        return str(compiled.load(attention.MODULE))
    finally:
        compiled.load.cache_clear()


def test_a_cpu_without_tiles_gets_an_error_where_llvm_would_end_the_process() -> None:
    code = "import hf_granikv.kernels.shared_attention._tiles"
    names = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "ImportError: this CPU has no avx512f" in run.stderr
