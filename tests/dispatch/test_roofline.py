import subprocess
import sys
from dataclasses import replace

import pytest

from hf_granikv.dispatch import roofline
from hf_granikv.dispatch.roofline import (
    BackendCost,
    DeviceConstants,
    LineCost,
    RateCurve,
    Work,
    call_s,
    predict_all,
    predict_s,
    regime_of,
)


def device(peak=1e12, bandwidth=1e10, launch_s=1e-5, **others) -> DeviceConstants:
    return DeviceConstants.from_peaks(
        {"float32": peak, "bfloat16": 4 * peak},
        bandwidth_bytes_per_s=bandwidth,
        launch_s=launch_s,
        **others,
    )


DEVICE = device()
COST = BackendCost(call_s=1.0, byte_s=2.0, output_s=3.0, score_s=4.0, rate=RateCurve(((1.0, 0.5),)))


def with_costs(*names: str) -> DeviceConstants:
    return replace(DEVICE, costs={"float32": dict.fromkeys(names, COST)})


def test_a_compute_bound_time_is_flops_over_peak():
    assert predict_s(Work(1e9, 1.0, 0, 1), DEVICE) == pytest.approx(1e-3)


def test_a_memory_bound_time_is_bytes_over_bandwidth():
    assert predict_s(Work(1.0, 1e7, 0, 1), DEVICE) == pytest.approx(1e-3)


def test_launches_add_to_either():
    assert predict_s(Work(1e9, 1.0, 7, 1), DEVICE) == pytest.approx(1e-3 + 7e-5)
    assert call_s(Work(1e9, 1.0, 7, 1), DEVICE) == pytest.approx(7e-5)


def test_each_dtype_has_its_rate_and_an_unknown_one_that_of_float32():
    work = Work(1e9, 1.0, 0, 1)
    assert predict_s(work, DEVICE, dtype="bfloat16") == pytest.approx(2.5e-4)
    assert predict_s(work, DEVICE, dtype="float64") == pytest.approx(1e-3)


def test_a_thin_product_reaches_half_its_rate_at_the_stated_rows():
    thin = device(bandwidth=1e12, launch_s=0.0, half_rate_rows=16.0)

    assert predict_s(Work(1e9, 1.0, 0, 16), thin) == pytest.approx(2e-3)
    assert predict_s(Work(1e9, 1.0, 0, 8192), thin) == pytest.approx(1e-3, rel=1e-2)


def test_between_measured_rows_the_time_of_a_flop_is_linear_in_their_logarithm():
    curve = RateCurve(((1.0, 10.0), (4.0, 40.0), (64.0, 80.0)))

    assert [curve.at(rows) for rows in (1, 4, 64)] == pytest.approx([10, 40, 80])
    assert 1 / curve.at(2) == pytest.approx((1 / 10 + 1 / 40) / 2)
    assert (curve.at(0.5), curve.at(1000)) == (10, 80)
    assert curve.peak_flops_per_s == 80


def test_efficiency_belongs_to_the_named_backend():
    slow = device(bandwidth=1e12, launch_s=0.0, efficiency={"slow": 0.25})

    assert predict_s(Work(1e9, 1.0, 0, 1), slow, "slow") == pytest.approx(4e-3)
    assert predict_s(Work(1e9, 1.0, 0, 1), slow, "other") == pytest.approx(1e-3)


def test_a_measured_cost_is_a_sum_of_what_is_done():
    work = Work(5.0, 1e9, 9, 1, stored_bytes=10.0, num_scores=100.0, num_outputs=1000.0)
    known = with_costs("a")

    assert predict_s(work, known, "a") == pytest.approx(1 + 20 + 400 + 3000 + 10)
    assert call_s(work, known, "a") == 1.0


def test_measured_costs_count_only_if_every_backend_has_one():
    works = {"a": Work(1e9, 1.0, 0, 1), "b": Work(1e9, 1.0, 0, 1)}

    assert predict_all(works, with_costs("a"), "float32") == predict_all(works, DEVICE, "float32")
    assert predict_all(works, with_costs("a", "b"), "float32")["a"] > 1.0
    # another dtype was not measured
    assert predict_all(works, with_costs("a", "b"), "bfloat16")["a"] < 1e-3


def test_bytes_between_ranks_take_the_time_of_the_link():
    linked = device(link_bytes_per_s=1e6)
    work = Work(1.0, 1.0, 0, 1, comm_bytes=1e3)

    assert predict_s(work, linked) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match="run granikv calibrate under torchrun"):
        predict_s(work, DEVICE)


@pytest.mark.parametrize(
    ("work", "regime"),
    [
        (Work(1e9, 1.0, 0, 1), "compute"),
        (Work(1.0, 1e7, 0, 1), "memory"),
        (Work(1.0, 1.0, 9, 1), "launch"),
        (Work(1e9, 1e7, 0, 1, comm_bytes=1e9), "communication"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_regime_names_the_bound(work, regime):
    assert regime_of(work, device(link_bytes_per_s=1e6), "", "float32") == regime


def test_the_bounds_meet_where_flops_and_bytes_take_as_long():
    ridge = 1e12 / 1e10
    below, above = Work(0.9e7 * ridge, 1e7, 0, 1), Work(1.1e7 * ridge, 1e7, 0, 1)

    assert regime_of(below, DEVICE, "", "float32") == "memory"
    assert regime_of(above, DEVICE, "", "float32") == "compute"


def test_a_line_is_a_call_and_a_part_per_byte():
    assert LineCost(1.0, 0.5).predict_s(4.0) == 3.0


def test_the_arithmetic_needs_no_torch():
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({roofline.__file__!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
