import json
from dataclasses import replace

import pytest

from hf_granikv.dispatch.calibration_file import (
    Calibration,
    CalibrationFileError,
    read_calibration,
    write_calibration,
)
from hf_granikv.dispatch.roofline import BackendCost, DeviceConstants, RateCurve

CONSTANTS = replace(
    DeviceConstants.from_peaks(
        {"float32": 1e11, "bfloat16": 1e12},
        bandwidth_bytes_per_s=2e10,
        launch_s=3e-6,
        half_rate_rows=12.0,
        link_bytes_per_s=5e9,
    ),
    costs={"float32": {"cascade": BackendCost(1e-5, 2e-11, 0.0, 1e-10, RateCurve(((1.0, 1e10),)))}},
)
CALIBRATION = Calibration("a device", 2, "2.13.0", CONSTANTS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "not there yet" / "device.json"


def test_what_is_written_is_read_again(path):
    write_calibration(path, CALIBRATION)

    found = read_calibration(path)

    assert (found.device, found.threads, found.torch) == ("a device", 2, "2.13.0")
    constants = found.constants
    assert constants.name == "a device"
    assert constants.origin == "measured by granikv calibrate"
    assert constants.costs == CONSTANTS.costs
    assert constants.link_bytes_per_s == 5e9
    assert constants.merge.call_s == pytest.approx(CONSTANTS.merge.call_s, rel=1e-3)
    for dtype in ("float32", "bfloat16"):
        for rows in (1, 10, 5000):
            rate = CONSTANTS.products(dtype).at(rows)
            assert constants.products(dtype).at(rows) == pytest.approx(rate, rel=1e-3)


def test_a_single_rank_has_no_link(path):
    constants = replace(CONSTANTS, link_bytes_per_s=None)
    write_calibration(path, replace(CALIBRATION, constants=constants))

    assert read_calibration(path).constants.link_bytes_per_s is None


def test_a_file_appears_when_it_is_complete(path, monkeypatch):
    write_calibration(path, CALIBRATION)
    before = path.read_text()
    monkeypatch.setattr(json, "dumps", lambda *args, **kwargs: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        write_calibration(path, CALIBRATION)

    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def with_value(value, *keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_value(99, "format"), "its format is 99, this version reads 1"),
        (without("format"), "its format is None"),
        (without("constants", "launch_s"), "'launch_s' is missing"),
        (without("constants", "costs", "float32", "cascade", "rate"), "'rate' is missing"),
        (with_value(-1.0, "constants", "launch_s"), "launch_s is -1.0"),
        (with_value(float("inf"), "constants", "bandwidth_bytes_per_s"), "is inf"),
        (with_value(float("nan"), "constants", "merge", "byte_s"), "byte_s is nan"),
        (with_value("fast", "constants", "launch_s"), "fast"),
        (with_value({}, "constants", "matmul"), "float32 was not measured"),
        (with_value([], "constants", "matmul", "float32", "points"), "no curve"),
        (with_value([[2, 1], [1, 1]], "constants", "matmul", "float32", "points"), "ascending"),
        (with_value([[1, 0]], "constants", "matmul", "float32", "points"), "not positive"),
        (with_value([[1]], "constants", "matmul", "float32", "points"), "no curve"),
        (with_value([1], "constants"), "indices must be integers"),
    ],
)
def test_a_file_that_means_nothing_is_refused_with_the_reason(path, change, reason):
    write_calibration(path, CALIBRATION)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

    with pytest.raises(CalibrationFileError, match=r"device\.json cannot be used: .*" + reason):
        read_calibration(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00\xff"])
def test_a_file_that_is_no_json_table_is_refused(path, text):
    path.parent.mkdir()
    path.write_bytes(text.encode("latin1"))

    with pytest.raises(CalibrationFileError, match="cannot be used"):
        read_calibration(path)
