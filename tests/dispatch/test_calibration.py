"""Measuring: what is run, in which order, and what comes out of it. Times themselves are not tested."""

import os
import subprocess
import sys
import time

import pytest
import torch
from oracle import assert_close, reference

from hf_granikv.backends import BACKENDS
from hf_granikv.calibrating import PrivatePath, merging
from hf_granikv.dispatch import Dispatcher, calibration
from hf_granikv.dispatch.calibration import DTYPES, calibrate, places, shapes
from hf_granikv.dispatch.calibration_file import read_calibration, write_calibration
from hf_granikv.dispatch.roofline import RateCurve
from hf_granikv.dispatch.stopwatch import Stopwatch
from hf_granikv.disturbance import waited_s
from hf_granikv.views import AttentionState, GroupShape, dtype_name

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch):
    """Small operands: a test has no minute."""
    monkeypatch.setattr(calibration, "STORE_BYTES", 16 << 20)
    monkeypatch.setattr(calibration, "_AT_LEAST", 8)
    monkeypatch.setattr(calibration, "_MAX_PRODUCTS", 1 << 22)


def test_runs_take_turns_after_one_round_that_does_not_count():
    done = []
    seconds = Stopwatch(CPU).medians_s(
        [lambda: done.append("a"), lambda: done.append("b") or time.sleep(0.002)], 0.0
    )

    assert done == ["a", "b"] * 4
    assert seconds[1] > 0.002 > seconds[0]


def test_shapes_cover_what_a_dispatcher_is_asked():
    found = shapes(torch.bfloat16)

    assert len(set(found)) == len(found)
    assert {s.dtype_name for s in found} == {"bfloat16"}
    assert {s.gqa_ratio for s in found} == {1, 2, 3, 4, 8}
    assert {s.num_rows for s in found} == {1, 4, 16, 64}
    assert {s.prefix_len for s in found} == {32, 256, 2048, 8192}
    assert max(s.q_len for s in found) == 128
    # time may run out anywhere: what came before is a sample of all
    first = found[:40]
    assert {s.gqa_ratio for s in first} == {1, 2, 3, 4, 8}
    assert {s.num_rows for s in first} == {1, 4, 16, 64}


def test_places_lie_all_over_the_store():
    store = torch.arange(1000.0)

    pairs = places(store, (2, 3, 4))

    assert all(keys.shape == values.shape == (3, 4) for keys, values in pairs)
    starts = [int(keys[0, 0]) for keys, _ in pairs]
    assert starts == sorted(set(starts))
    assert max(starts) > 900


def test_a_calibration_knows_every_backend_and_survives_its_file(few, tmp_path):
    found = calibrate(CPU, backends=BACKENDS, merging=merging, budget_s=1.0)

    write_calibration(tmp_path / "device.json", found)
    constants = read_calibration(tmp_path / "device.json").constants
    assert found.threads == torch.get_num_threads()
    assert constants.link_bytes_per_s is None
    for dtype in DTYPES:
        assert constants.knows(BACKENDS, dtype_name(dtype))
    assert 0 < constants.launch_s < 1e-2
    assert constants.bandwidth_bytes_per_s > 1e8
    shape = GroupShape(16, 1, 1000, 3, 3, 64, 2)
    decision = Dispatcher(backends=BACKENDS, constants=constants).choose(shape, "cpu")
    assert all(0 < seconds < 1 for seconds in decision.predicted_s.values())


def test_a_backend_that_cannot_run_is_left_out(few):
    class Refusing:
        def unsupported_reasons(self, shape):
            return ["never"]

    found = calibrate(
        CPU,
        backends={"per_row": BACKENDS["per_row"], "none": Refusing()},
        merging=merging,
        budget_s=0.5,
    )

    assert set(found.constants.costs["float32"]) == {"per_row"}


def test_a_slow_device_still_gets_what_is_needed(few, monkeypatch):
    monkeypatch.setattr(calibration, "tqdm", lambda asked, **_: asked)
    asked = shapes(torch.float32)

    assert len(list(calibration._within(asked, -1.0, ""))) == 8
    assert list(calibration._within(asked, 60.0, "")) == asked


def test_accelerators_are_timed_by_their_own_clock(monkeypatch):
    order = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            self.number = len(order)

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, other):
            return 7.0

    monkeypatch.setattr(torch, "Event", Event)
    watch = Stopwatch(torch.device("meta"))

    assert watch.medians_s([lambda: order.append("run")], 0.0) == [pytest.approx(7e-3)]
    assert order == ["run", *["record", "run", "record", "wait"] * 3]


def test_a_process_that_has_to_share_its_processor_waits():
    if not waited_s():
        pytest.skip("this kernel does not say how long threads wait")
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, stop = waited_s(), time.perf_counter() + 20
        while waited_s() < before + 0.1 and time.perf_counter() < stop:
            pass
        assert waited_s() >= before + 0.1
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, mine)


def test_runs_that_would_take_too_long_in_a_slow_dtype_are_left_out():
    slow = shapes(torch.float16, 2e9)

    assert 24 < len(slow) < len(shapes(torch.float16))
    for shape in slow:
        assert 4 * shape.num_queries * shape.prefix_len * shape.head_dim < 0.03 * 2e9


def test_products_end_where_the_next_would_take_longer_than_all_may():
    class Watch:
        def medians_s(self, runs, budget_s):
            (run,) = runs
            # a second for a row
            return [float(run().shape[1])]

    curve = calibration._products(Watch(), CPU, torch.float32, 20.0)

    # each is run four times: 1, 2, 4 seconds, and 8 would be too much
    assert [rows for rows, _ in curve.points] == [1.0, 2.0, 4.0]


def test_shapes_hold_their_dtype():
    assert shapes(torch.float16)[0]._replace(dtype="").dtype_name == "bfloat16"
    assert shapes(torch.float16)[0].dtype_name == "float16"


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_runs_of_a_merge_compute_with_it_and_without(num_rows):
    out, lse = torch.randn(num_rows, 3, 1, 16), torch.randn(num_rows, 3, 1)
    with torch.no_grad():
        without, with_one = merging(AttentionState(out, lse))
        plain, merged = without(), with_one()

    if plain is not None:
        # compiled: own tokens alone, then mixed with a part that outweighs them where its lse is high
        assert plain.shape == merged.shape == (num_rows, 1, 3, 16)
        assert not torch.equal(plain, merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_private_tokens_are_those_of_each_row(num_rows, dtype):
    query = torch.randn(num_rows, 6, 1, 16).to(dtype)
    keys, values = torch.randn(2, 2, 20, 16).to(dtype)
    path, length = PrivatePath(), 20 // num_rows
    shape = GroupShape(num_rows, 1, 20, 2, 3, 16, dtype.itemsize)
    assert path.unsupported_reasons(shape) == []
    assert path.unsupported_reasons(shape._replace(q_len=2))
    assert path.unsupported_reasons(shape._replace(num_rows=21))
    # each row reads its own, once
    assert path.work(shape).stored_bytes == 2 * 2 * num_rows * length * 16 * dtype.itemsize

    with torch.no_grad():
        attend = path.planned(query, keys, values, scale=0.25, softcap=None)
        # as the first layer of a step, then as another one
        for _ in range(2):
            got = attend(query, keys, values)
            out = got.out if isinstance(got, AttentionState) else got.transpose(1, 2)
            for row in range(num_rows):
                own = slice(row * length, (row + 1) * length)
                ref = reference(
                    query[row : row + 1], keys[None, :, own], values[None, :, own], scale=0.25
                )
                assert_close("out", out[row : row + 1], ref.out, ref.out_budget)


def test_a_slow_product_bounds_no_backend_that_casts_to_float32(few, monkeypatch):
    peaks, one = [], {"per_row": BACKENDS["per_row"]}
    monkeypatch.setattr(calibration, "fit_backend", lambda timed, peak: peaks.append(peak))
    curves = {"float32": RateCurve(((1.0, 300e9),)), "bfloat16": RateCurve(((1.0, 57e9),))}

    for dtype in (torch.float32, torch.bfloat16):
        calibration._backend_costs(Stopwatch(CPU), dtype, one, {}, curves, 0.1)

    assert peaks == [300e9, 300e9]
