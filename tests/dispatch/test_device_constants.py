import warnings
from dataclasses import replace

import pytest
import torch
from devices import CPU_TABLE

from hf_granikv.dispatch import device_constants
from hf_granikv.dispatch.calibration_file import Calibration, write_calibration
from hf_granikv.dispatch.device_constants import (
    amx_table,
    avx2_table,
    avx512_table,
    built_in_constants,
    calibration_path,
    constants_for,
    device_name,
    threads_of,
)
from hf_granikv.dispatch.known_devices import GPU

CPU = torch.device("cpu")
BUILT_INS = [avx2_table(), avx512_table(), amx_table()]


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Where calibrations are looked for; what was read before is forgotten, before and after."""
    monkeypatch.setattr(device_constants, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(device_constants, "built_in_constants", built_in_constants)
    device_constants._constants.cache_clear()
    yield tmp_path
    device_constants._constants.cache_clear()


def calibration(**changed) -> Calibration:
    constants = replace(CPU_TABLE, launch_s=123e-6)
    ours = Calibration(device_name(CPU), threads_of(CPU), torch.__version__, constants)
    return replace(ours, **changed)


def test_a_device_without_a_calibration_has_a_table_and_no_warning(home):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert constants_for("cpu") in BUILT_INS


@pytest.mark.parametrize(
    ("is_avx512", "has_tiles", "table"),
    [(False, False, avx2_table()), (True, False, avx512_table()), (True, True, amx_table())],
)
def test_the_table_of_a_cpu_goes_by_what_the_processor_has(
    home, monkeypatch, is_avx512, has_tiles, table
):
    monkeypatch.setattr(device_constants, "is_avx512", lambda: is_avx512)
    monkeypatch.setattr(device_constants, "has_tiles", lambda: has_tiles)

    assert constants_for("cpu") == table


@pytest.mark.parametrize("device", ["xpu", "meta", "mps"])
def test_an_unknown_device_counts_as_a_gpu(home, device):
    assert constants_for(device) is GPU


def test_a_calibration_is_used_without_being_asked_for(home):
    write_calibration(calibration_path(CPU), calibration())

    found = constants_for("cpu")

    assert found.launch_s == 123e-6
    assert found.origin == "measured by granikv calibrate"


def test_a_calibration_is_read_once(home, monkeypatch):
    write_calibration(calibration_path(CPU), calibration())
    first = constants_for("cpu")
    monkeypatch.setattr(device_constants, "read_calibration", lambda path: 1 / 0)

    assert constants_for(CPU) is first


def test_the_file_is_that_of_the_device_and_its_threads(home):
    name = calibration_path(CPU).name
    assert name.startswith("cpu-")
    assert name.endswith(f"-{torch.get_num_threads()}-threads.json")
    assert calibration_path(CPU).parent == home / "calibration"
    assert "threads" not in calibration_path(torch.device("meta")).name


@pytest.mark.parametrize(
    "changed",
    [{"device": "another"}, {"threads": 64}, {"torch": "1.2.3"}],
    ids=lambda changed: next(iter(changed)),
)
def test_the_calibration_of_something_else_is_refused_with_the_remedy(home, changed):
    write_calibration(calibration_path(CPU), calibration(**changed))

    with pytest.warns(UserWarning, match=r"is of .*this is .*run granikv calibrate"):
        found = constants_for("cpu")

    assert found in BUILT_INS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert constants_for("cpu") is found


def test_a_patch_release_of_torch_keeps_the_calibration(home):
    major, minor, *_ = torch.__version__.split(".")
    write_calibration(calibration_path(CPU), calibration(torch=f"{major}.{minor}.99"))

    assert constants_for("cpu").launch_s == 123e-6


def test_a_broken_calibration_is_refused_with_the_remedy(home):
    path = calibration_path(CPU)
    path.parent.mkdir()
    path.write_text("{")

    with pytest.warns(UserWarning, match=r"cannot be used.*built-in table.*granikv calibrate"):
        assert constants_for("cpu") in BUILT_INS


@pytest.mark.parametrize("table", BUILT_INS[1:], ids=lambda table: table.name)
def test_tables_that_were_measured_know_every_backend(table):
    from hf_granikv.backends import BACKENDS

    for dtype in ("float32", "bfloat16", "float16"):
        assert table.knows(BACKENDS, dtype)
