import subprocess
import sys

import pytest

from hf_granikv.dispatch import roofline
from hf_granikv.dispatch.roofline import (
    CONSTANTS,
    DeviceConstants,
    Work,
    constants_for,
    predict_s,
)

DEVICE = DeviceConstants(peak_flops_per_s=1e12, bandwidth_bytes_per_s=1e10, launch_s=1e-5)


def test_a_compute_bound_time_is_flops_over_peak():
    assert predict_s(Work(1e9, 1.0, 0, 1), DEVICE) == pytest.approx(1e-3)


def test_a_memory_bound_time_is_bytes_over_bandwidth():
    assert predict_s(Work(1.0, 1e7, 0, 1), DEVICE) == pytest.approx(1e-3)


def test_launches_add_to_either():
    assert predict_s(Work(1e9, 1.0, 7, 1), DEVICE) == pytest.approx(1e-3 + 7e-5)


def test_a_thin_product_reaches_half_its_rate_at_the_stated_rows():
    device = DeviceConstants(1e12, 1e12, 0.0, half_rate_rows=16.0)

    assert predict_s(Work(1e9, 1.0, 0, 16), device) == pytest.approx(2e-3)
    assert predict_s(Work(1e9, 1.0, 0, 10**6), device) == pytest.approx(1e-3, rel=1e-3)


def test_efficiency_belongs_to_the_named_backend():
    device = DeviceConstants(1e12, 1e12, 0.0, efficiency={"slow": 0.25})

    assert predict_s(Work(1e9, 1.0, 0, 1), device, "slow") == pytest.approx(4e-3)
    assert predict_s(Work(1e9, 1.0, 0, 1), device, "other") == pytest.approx(1e-3)


def test_the_ridge_is_where_both_bounds_meet():
    flops = 1e7 * DEVICE.ridge_flops_per_byte

    assert predict_s(Work(flops, 1.0, 0, 1), DEVICE) == pytest.approx(
        predict_s(Work(1.0, 1e7, 0, 1), DEVICE)
    )


def test_an_unknown_device_counts_as_a_gpu():
    assert constants_for("xpu") is CONSTANTS["cuda"]


def test_the_arithmetic_needs_no_torch():
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({roofline.__file__!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
