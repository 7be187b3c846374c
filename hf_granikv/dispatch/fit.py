"""Fits the constants of a device to timings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_granikv.dispatch.roofline import BackendCost, LineCost, RateCurve, Work

Floats = NDArray[np.float64]

_ROUNDS = 6
_SWEEPS = 2000
# a timing that is off by more than this counts less: something else ran on the machine then
_OUTLIER = 0.3


def fit_backend(timings: Sequence[tuple[Work, float]], peak_flops_per_s: float) -> BackendCost:
    """Gives the cost that predicts a backend's timings with the least relative error.

    The time of a flop is free at every number of tile rows that was measured.

    Args:
        timings: What was done, and the seconds that it took.
        peak_flops_per_s: Of a large product: what no rate is above.
    """
    tiles = sorted({float(work.tile_rows) for work, _ in timings})
    table = np.array([_features(work, tiles) for work, _ in timings])
    least_s = np.array([work.flops / peak_flops_per_s for work, _ in timings])
    solved = _solve(table, np.array([seconds for _, seconds in timings]), least_s)
    call_s, byte_s, output_s, score_s = map(float, solved[:4])
    rates = map(float, 1 / (solved[4:] + 1 / peak_flops_per_s))
    curve = RateCurve(tuple(zip(tiles, rates, strict=True)))
    return BackendCost(call_s, byte_s, output_s, score_s, curve)


def fit_line(timings: Sequence[tuple[float, float]]) -> LineCost:
    """Gives the cost of an operation from `(bytes, seconds)` of it."""
    table = np.array([[1.0, num_bytes] for num_bytes, _ in timings])
    seconds = np.array([taken for _, taken in timings])
    call_s, byte_s = _solve(table, seconds, np.zeros(len(seconds)))
    return LineCost(float(call_s), float(byte_s))


def _features(work: Work, tiles: Sequence[float]) -> list[float]:
    nodes = np.log(tiles)
    # the share of each node in the interpolation of `RateCurve`
    shares = [np.interp(np.log(work.tile_rows), nodes, one) for one in np.eye(len(tiles))]
    of_products = [work.flops * share for share in shares]
    return [1.0, work.stored_bytes, work.num_outputs, work.num_scores, *of_products]


def _solve(table: Floats, seconds: Floats, least_s: Floats) -> Floats:
    """Costs that explain what took longer than the least.

    Least squares of the logarithm of predicted over measured, by reweighting: with no negative cost
    and little heed to outliers.
    """
    relative, least = table / seconds[:, None], least_s / seconds
    scale = np.maximum(relative.max(0), 1e-300)
    relative = relative / scale
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        solved = _nonnegative(relative * weights[:, None], (1.0 - least) * weights)
        ratio = np.maximum(relative @ solved + least, 1e-3)
        error = np.abs(np.log(ratio))
        # the plain error of a prediction that is too high grows faster than its logarithm
        weights = np.sqrt(_OUTLIER / np.maximum(error, _OUTLIER) / ratio)
    return solved / scale


def _nonnegative(table: Floats, target: Floats) -> Floats:
    """Least squares over numbers that are not negative, one after the other until none moves."""
    gram, aim = table.T @ table, table.T @ target
    solved = np.zeros(table.shape[1])
    for _ in range(_SWEEPS):
        before = solved.copy()
        for i in np.flatnonzero(gram.diagonal()):
            solved[i] = max(0.0, solved[i] + (aim[i] - gram[i] @ solved) / gram[i, i])
        if np.abs(solved - before).max() < 1e-9:
            break
    return solved
