"""Constants fitted to timings that are made up from known ones."""

import numpy as np
import pytest

from hf_granikv.dispatch.fit import fit_backend, fit_line
from hf_granikv.dispatch.roofline import BackendCost, RateCurve, Work

PEAK = 1e12
TRUE = BackendCost(
    call_s=50e-6,
    byte_s=4e-11,
    output_s=2e-9,
    score_s=1e-10,
    rate=RateCurve(((1.0, 1e10), (8.0, 1e11), (64.0, 4e11), (512.0, 8e11))),
)


def work(tile_rows: int, prefix_len: int, head_dim: int = 64) -> Work:
    scores = 8.0 * tile_rows * prefix_len
    stored = 2.0 * 8 * prefix_len * head_dim * 2
    return Work(
        flops=4 * scores * head_dim,
        bytes=stored,
        launches=4,
        tile_rows=tile_rows,
        stored_bytes=stored,
        num_scores=scores,
        num_outputs=8.0 * tile_rows * head_dim,
    )


WORKS = [
    work(tile, length, head_dim)
    for tile in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
    for length in (32, 256, 2048, 8192)
    for head_dim in (64, 128)
]
# none of them was timed
OTHERS = [work(tile, length, 96) for tile in (6, 24, 200) for length in (64, 1000, 4000)]


def test_known_costs_predict_what_was_not_timed():
    fitted = fit_backend([(w, TRUE.predict_s(w)) for w in WORKS], PEAK)

    for other in OTHERS:
        assert fitted.predict_s(other) == pytest.approx(TRUE.predict_s(other), rel=0.1)


def test_a_few_timings_that_something_disturbed_change_little():
    timings = [(w, TRUE.predict_s(w)) for w in WORKS]
    for disturbed in (3, 11, 20, 60):
        timings[disturbed] = WORKS[disturbed], 12 * TRUE.predict_s(WORKS[disturbed])

    fitted = fit_backend(timings, PEAK)

    for other in OTHERS:
        assert fitted.predict_s(other) == pytest.approx(TRUE.predict_s(other), rel=0.25)


def test_noise_makes_predictions_neither_too_high_nor_too_low():
    noise = np.exp(np.random.default_rng(0).normal(0, 0.3, len(WORKS)))
    timings = [(w, TRUE.predict_s(w) * n) for w, n in zip(WORKS, noise, strict=True)]

    fitted = fit_backend(timings, PEAK)

    ratios = [fitted.predict_s(w) / TRUE.predict_s(w) for w in WORKS]
    assert 0.85 < np.exp(np.mean(np.log(ratios))) < 1.15


def test_no_rate_is_above_that_of_a_large_product():
    timings = [(w, TRUE.predict_s(w)) for w in WORKS]

    assert fit_backend(timings, 3e11).rate.peak_flops_per_s <= 3e11 * (1 + 1e-9)


def test_no_cost_is_negative():
    # the larger the faster: no such device exists, and noise may say so
    timings = [(w, 1e-3 / (1 + w.num_scores)) for w in WORKS]

    fitted = fit_backend(timings, PEAK)

    assert min(fitted.call_s, fitted.byte_s, fitted.output_s, fitted.score_s) >= 0
    assert all(rate > 0 for _, rate in fitted.rate.points)


def test_a_line_goes_through_its_points():
    line = fit_line([(1e3, 2e-6 + 1e-7), (1e5, 2e-6 + 1e-5), (1e7, 2e-6 + 1e-3)])

    assert line.call_s == pytest.approx(2e-6, rel=1e-3)
    assert line.byte_s == pytest.approx(1e-10, rel=1e-3)
