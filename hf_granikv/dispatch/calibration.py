"""Measures what a device can do, on the operations that attention runs."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_granikv.dispatch.calibration_file import Calibration
from hf_granikv.dispatch.device_constants import device_name, threads_of
from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.fit import fit_backend, fit_line
from hf_granikv.dispatch.roofline import BackendCost, DeviceConstants, LineCost, RateCurve, Work
from hf_granikv.dispatch.stopwatch import Run, Stopwatch
from hf_granikv.views import AttentionState, GroupShape, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# kv heads and their width, of a small model and of a usual one
_HEADS = ((3, 64), (8, 128))
_GQA_RATIOS = (1, 2, 3, 4, 8)
_ROWS = (1, 4, 16, 64)
_PREFIX_LENS = (32, 256, 2048, 8192)
# queries per row of a chunk, of so many rows
_CHUNKS = ((4, 16), (1, 128))
# multiply-adds of one call: more would not fit the minute
_MAX_PRODUCTS = 3 << 30
# shapes that are timed however slow the device is, and how long one run may take at its best rate
_AT_LEAST = 24
_MOST_RUN_S = 0.03
# keys and values lie apart by turns, so that no cache of the device holds them
STORE_BYTES = 512 << 20
_MOST_PLACES = 64
# what a difference of two times is at least
_LEAST_S = 1e-6
# of the minute, what is not spent on backends
_SHARE_OF_OPS = 0.15


# queries, keys and values of a layer
LayerRun = Callable[[Tensor, Tensor, Tensor], object]
# gives, of the first layer, what a step would run without the prefix as well; None if nothing
Anyway = Callable[[Tensor, Tensor, Tensor], LayerRun | None]


class Runnable(Candidate, Protocol):
    """What calibration asks of a backend."""

    def planned(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None
    ) -> LayerRun:
        """Gives what attends to a prefix in each layer of a step, from those of the first."""


# runs that differ in one merge of a state of this size: without it and with it
Merging = Callable[[AttentionState], tuple[Run, Run]]


def calibrate(
    device: torch.device,
    *,
    backends: Mapping[str, Runnable],
    merging: Merging,
    anyway: Mapping[str, Anyway] | None = None,
    budget_s: float = 45.0,
    link_bytes_per_s: float | None = None,
) -> Calibration:
    """Measures a device; shows its progress on a terminal.

    Args:
        device: The device.
        backends: Whose cost is measured, by name.
        merging: What merges a partial result.
        anyway: For some of them, by name, what is no cost of theirs.
        budget_s: Seconds to spend, about.
        link_bytes_per_s: From `measured_link`, where there are several ranks.
    """
    watch = Stopwatch(device)
    with torch.no_grad():
        ops_s = _SHARE_OF_OPS * budget_s / (len(DTYPES) + 1)
        matmul = {dtype_name(dtype): _products(watch, device, dtype, ops_s) for dtype in DTYPES}
        constants = DeviceConstants(
            launch_s=_launch_s(device),
            bandwidth_bytes_per_s=_bandwidth(watch, device),
            matmul=matmul,
            merge=_merge_cost(watch, device, merging),
            gather=_gather_cost(watch, device),
            link_bytes_per_s=link_bytes_per_s,
            name=device_name(device),
        )
        each_s = (1 - _SHARE_OF_OPS) * budget_s / len(DTYPES)
        costs = {
            dtype_name(dtype): _backend_costs(watch, dtype, backends, anyway or {}, matmul, each_s)
            for dtype in DTYPES
        }
    constants = replace(constants, costs=costs)
    return Calibration(device_name(device), threads_of(device), torch.__version__, constants)


def shapes(dtype: torch.dtype, peak_flops_per_s: float = math.inf) -> list[GroupShape]:
    """The group sizes that are timed, in an order whose beginnings are samples of the whole.

    Args:
        dtype: Of queries, keys and values.
        peak_flops_per_s: What the device reaches in it, at most.
    """
    most, found = min(_MAX_PRODUCTS, _MOST_RUN_S * peak_flops_per_s / 2), []
    for num_kv_heads, head_dim in _HEADS:
        for gqa_ratio in _GQA_RATIOS:
            sizes = [(num_rows, 1) for num_rows in _ROWS]
            sizes += _CHUNKS if gqa_ratio in (1, 3, 8) else ()
            for prefix_len in _PREFIX_LENS:
                shape = GroupShape(
                    num_rows=1,
                    q_len=1,
                    prefix_len=prefix_len,
                    num_kv_heads=num_kv_heads,
                    gqa_ratio=gqa_ratio,
                    head_dim=head_dim,
                    dtype_bytes=dtype.itemsize,
                    dtype=dtype_name(dtype),
                )
                found += [shape._replace(num_rows=rows, q_len=q_len) for rows, q_len in sizes]
    found = [shape for shape in found if _num_products(shape) <= most]
    random.Random(0).shuffle(found)
    return found


def _num_products(shape: GroupShape) -> int:
    return 2 * shape.num_queries * shape.prefix_len * shape.head_dim


def _backend_costs(
    watch: Stopwatch,
    dtype: torch.dtype,
    backends: Mapping[str, Runnable],
    anyway: Mapping[str, Anyway],
    matmul: Mapping[str, RateCurve],
    budget_s: float,
) -> dict[str, BackendCost]:
    timings: dict[str, list[tuple[Work, float]]] = {name: [] for name in backends}
    # where products in a half precision are slow, backends cast to float32
    peak = max(matmul[name].peak_flops_per_s for name in {dtype_name(dtype), "float32"})
    asked = shapes(dtype, peak)
    store = random_store(dtype, watch.device)
    for shape in _within(asked, budget_s, f"backends in {dtype_name(dtype)}"):
        num_heads = shape.num_kv_heads * shape.gqa_ratio
        query = torch.randn(shape.num_rows, shape.q_len, num_heads, shape.head_dim)
        query = query.to(watch.device, dtype).transpose(1, 2)
        able = {n: b for n, b in backends.items() if not b.unsupported_reasons(shape)}
        prefix = (2, shape.num_kv_heads, shape.prefix_len, shape.head_dim)
        of_layers = places(store, prefix)
        plan = {"scale": shape.head_dim**-0.5, "softcap": None}
        paths = {n: b.planned(query, *of_layers[0], **plan) for n, b in able.items()}
        known = ((n, anyway[n](query, *of_layers[0])) for n in able if n in anyway)
        others = {n: path for n, path in known if path is not None}
        turns = cycle(of_layers)
        runs = [partial(_attend, p, query, turns) for p in (*paths.values(), *others.values())]
        seconds = watch.medians_s(runs, budget_s / len(asked))
        spent = dict(zip(others, seconds[len(paths) :], strict=True))
        for (name, backend), taken in zip(able.items(), seconds, strict=False):
            own_s = max(_LEAST_S, taken - spent.get(name, 0.0))
            timings[name].append((backend.work(shape), own_s))
    return {name: fit_backend(timed, peak) for name, timed in timings.items() if timed}


def random_store(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, more than caches hold."""
    block = torch.randn(1 << 22).to(device, dtype)
    return block.repeat(STORE_BYTES // block.nbytes)


def places(store: Tensor, size: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Keys and values, `[2, ...]` taken apart, all over a store."""
    each = torch.Size(size).numel()
    num_places = store.numel() // each
    whole = store[: num_places * each].view(num_places, *size)
    return [pair.unbind() for pair in whole[:: max(1, num_places // _MOST_PLACES)]]


def _attend(
    path: Callable[[Tensor, Tensor, Tensor], object],
    query: Tensor,
    turns: Iterator[tuple[Tensor, ...]],
) -> None:
    keys, values = next(turns)
    path(query, keys, values)


def _within(asked: Sequence[GroupShape], budget_s: float, what: str) -> Iterator[GroupShape]:
    """The shapes for which there is time, and those without which nothing can be said."""
    stop = time.perf_counter() + budget_s
    for i, shape in enumerate(tqdm(asked, desc=what, unit="shape", leave=False, disable=None)):
        if i >= _AT_LEAST and time.perf_counter() > stop:
            return
        yield shape


def _launch_s(device: torch.device) -> float:
    small = torch.ones(16, 1, 8, 64, device=device)
    count, taken = 100, []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(count):
            small.mul(2.0)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append((time.perf_counter() - start) / count)
    return median(taken)


def _bandwidth(watch: Stopwatch, device: torch.device) -> float:
    large = torch.ones(64 << 20, device=device)
    (seconds,) = watch.medians_s([large.sum], 0.3)
    return large.nbytes / seconds


def _products(
    watch: Stopwatch, device: torch.device, dtype: torch.dtype, budget_s: float
) -> RateCurve:
    tiles = [2**i for i in range(11)]
    keys = torch.randn(8, 128, 2048).to(device, dtype)
    points: list[tuple[float, float]] = []
    for rows in tiles:
        queries = torch.randn(8, rows, 128).to(device, dtype)
        num_flops = 2.0 * queries.numel() * keys.shape[2]
        # no faster at more rows: what is left would say the same, and take longer than all before
        if points and 4 * num_flops / points[-1][1] > budget_s:
            break
        (seconds,) = watch.medians_s([partial(torch.bmm, queries, keys)], budget_s / len(tiles))
        points.append((float(rows), num_flops / seconds))
    return RateCurve(tuple(points))


def _merge_cost(watch: Stopwatch, device: torch.device, merging: Merging) -> LineCost:
    timings = []
    for num_rows in (1, 16, 128):
        out = torch.randn(num_rows, 16, 1, 64, device=device)
        without_s, with_s = watch.medians_s(merging(AttentionState(out, out[..., 0])), 0.2)
        timings.append((float(out.nbytes), max(1e-9, with_s - without_s)))
    return fit_line(timings)


def _gather_cost(watch: Stopwatch, device: torch.device) -> LineCost:
    timings, store = [], torch.randn(8, 1 << 15, 64, device=device)
    for count in (64, 1024, 1 << 14):
        index = torch.randperm(store.shape[1], device=device)[:count]
        (seconds,) = watch.medians_s([partial(store.index_select, 1, index)], 0.1)
        timings.append((float(store.nbytes) * count / store.shape[1], seconds))
    return fit_line(timings)


def measured_link(device: torch.device) -> float:
    """Gives the bytes that a rank receives per second from the others, all of them at it.

    Every rank of torch's default process group has to call it.
    """
    mine = torch.ones(4 << 20, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        torch.distributed.all_gather(all_of_them, mine)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return (len(all_of_them) - 1) * mine.nbytes / median(taken)
