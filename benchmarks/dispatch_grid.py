"""What the dispatcher chooses, beside everything it could have chosen and beside stock attention.

    granikv calibrate && python benchmarks/dispatch_grid.py --plot docs/dispatch.png

One layer's attention in a decode step, prefix, suffix and merge, on a sample of
rows x prefix x suffix x gqa_ratio x dtype with a fixed seed. Every backend takes its turn, then SDPA
over a dense copy in every row, as `StaticCache` has it; nothing is in the cores' caches, as between
two layers of a model. What is timed has been compared before.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, product
from statistics import median
from types import SimpleNamespace

import torch
from dispatch_layers import Layers, plan_of
from torch import Tensor
from tqdm.auto import tqdm
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_granikv.backends import BACKENDS
from hf_granikv.bench.rows import Row, environment, measured, record
from hf_granikv.calibrating import PerRowPath
from hf_granikv.dispatch import Dispatcher
from hf_granikv.dispatch.calibration import STORE_BYTES, places, random_store
from hf_granikv.dispatch.stopwatch import Stopwatch
from hf_granikv.views import GroupShape, dtype_name

ROWS = (1, 2, 4, 8, 16, 32, 64)
PREFIX_LENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SUFFIX_LENS = (1, 16, 64, 256, 1024)
GQA_RATIOS = (1, 2, 3, 4, 8)
# kv heads and their width: of SmolLM2-135M, and of a model of 8B parameters
HEADS = ((3, 64), (8, 128))
# a dense copy in every row may take so much
MAX_DENSE_BYTES = STORE_BYTES
# greatest difference of outputs that is still called equal: they are of size 1, and less
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
STOCK = "SDPA"


@dataclass(frozen=True)
class Cell:
    """One point of the grid, and the seconds of each peer."""

    shape: GroupShape
    suffix_len: int
    chosen: str
    predicted_s: float
    # of the prefix part of the chosen path, by itself
    prefix_s: float
    seconds: dict[str, float]

    @property
    def winner(self) -> str:
        """The fastest backend."""
        return min(BACKENDS, key=self.seconds.__getitem__)

    @property
    def regret(self) -> float:
        """Time of the chosen path over that of the fastest."""
        return self.seconds[self.chosen] / self.seconds[self.winner]

    @property
    def over_stock(self) -> float:
        """Time of the chosen path over that of stock attention."""
        return self.seconds[self.chosen] / self.seconds[STOCK]

    def __str__(self) -> str:
        s = self.shape
        times = ", ".join(f"{name} {1e6 * taken:.0f}" for name, taken in self.seconds.items())
        return (
            f"{s.num_rows:>2} rows x {s.prefix_len} + {self.suffix_len}, {s.num_kv_heads} heads x "
            f"{s.gqa_ratio} of {s.head_dim}, {s.dtype_name}: {self.chosen} (us: {times})"
        )


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    watch, dispatcher = Stopwatch(device), Dispatcher(backends=BACKENDS)
    sizes = sampled(args.draws)
    stores = {name: random_store(getattr(torch, name), device) for name in TOLERANCE}
    with torch.no_grad():
        cells = [
            timed(*size, watch, dispatcher, stores[size[0].dtype_name], args.seconds / len(sizes))
            for size in tqdm(sizes, unit="cell", disable=None)
        ]
    report(cells)
    if args.plot:
        # its matplotlib is an extra
        from dispatch_plot import plot

        plot(cells, args.plot)
    choice_us = 1e6 * choosing_s(dispatcher, [cell.shape for cell in cells])
    summary = {
        "bench": "dispatch_grid",
        "cells": len(cells),
        "within_10_percent": round(share(c.regret <= 1.10 for c in cells), 4),
        "no_slower_than_stock": round(share(c.over_stock <= 1.03 for c in cells), 4),
        "worst_regret": round(max(c.regret for c in cells), 3),
        "median_over_stock": round(median(c.over_stock for c in cells), 3),
        "predicted_over_measured": round(median(c.predicted_s / c.prefix_s for c in cells), 3),
        "choice_us": round(choice_us, 2),
    }
    where = environment("one layer")
    record(rows_of(cells), where, args.out)
    print(json.dumps({**summary, **where}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=3, help="per rows x prefix x dtype; default 3")
    parser.add_argument("--seconds", type=float, default=240, help="to spend on runs; default 240")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plot", metavar="FILE", help="picture to write; needs matplotlib")
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    return parser.parse_args()


def sampled(num_draws: int) -> list[tuple[GroupShape, int]]:
    """Group sizes with suffix lengths: for all rows and prefixes, some of everything else."""
    chance, found = random.Random(0), []
    for name, num_rows, prefix_len in product(TOLERANCE, ROWS, PREFIX_LENS):
        others = list(product(SUFFIX_LENS, GQA_RATIOS, HEADS))
        chance.shuffle(others)
        shapes = [
            (group_shape(getattr(torch, name), num_rows, prefix_len, gqa_ratio, *heads), suffix_len)
            for suffix_len, gqa_ratio, heads in others
        ]
        fitting = (pair for pair in shapes if dense_bytes(*pair) <= MAX_DENSE_BYTES)
        found += [pair for pair, _ in zip(fitting, range(num_draws), strict=False)]
    return found


def group_shape(
    dtype: torch.dtype, num_rows: int, prefix_len: int, gqa_ratio: int, heads: int, head_dim: int
) -> GroupShape:
    return GroupShape(
        num_rows=num_rows,
        q_len=1,
        prefix_len=prefix_len,
        num_kv_heads=heads,
        gqa_ratio=gqa_ratio,
        head_dim=head_dim,
        dtype_bytes=dtype.itemsize,
        dtype=dtype_name(dtype),
    )


def dense_bytes(shape: GroupShape, suffix_len: int) -> int:
    tokens = shape.num_rows * (shape.prefix_len + suffix_len)
    return 2 * tokens * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes


def timed(
    shape: GroupShape,
    suffix_len: int,
    watch: Stopwatch,
    dispatcher: Dispatcher,
    store: Tensor,
    budget_s: float,
) -> Cell:
    """Checks that all peers compute the same, and times them in turns."""
    layers = Layers(shape, suffix_len, store)
    module = SimpleNamespace(num_key_value_groups=shape.gqa_ratio, is_causal=True, training=False)

    def stock(pair: Iterable[Tensor]) -> Tensor:
        keys, values = pair
        scale = layers.rule.scale
        return sdpa_attention_forward(module, layers.query, keys, values, None, scaling=scale)[0]

    want = stock(layers.dense()).float()
    peers: dict[str, Callable[[], object]] = {}
    for name in BACKENDS:
        peers[name] = layers.attention(plan_of(shape, suffix_len, name))
        difference = (peers[name](0).float() - want).abs().max().item()
        if difference > TOLERANCE[shape.dtype_name]:
            raise SystemExit(f"{name} differs from {STOCK} by {difference:.3g} for {shape}")
    copies = cycle(places(store, (2, *layers.dense()[0].shape)))
    peers[STOCK] = lambda: stock(next(copies))
    decision = dispatcher.choose(shape, "cpu")
    chosen = decision.backend_name
    prefix_part = layers.prefix_part({**BACKENDS, PerRowPath.name: PerRowPath()}[chosen])
    *times, prefix_s = watch.medians_s([*peers.values(), prefix_part], budget_s, most=25)
    seconds = dict(zip(peers, times, strict=True))
    return Cell(shape, suffix_len, chosen, decision.predicted_s[chosen], prefix_s, seconds)


def choosing_s(dispatcher: Dispatcher, shapes: list[GroupShape]) -> float:
    """Median seconds of a choice that has to be worked out."""
    taken = []
    for shape in shapes:
        # as many rows as no cell has: nothing is known of them yet
        fresh = shape._replace(num_rows=shape.num_rows + 1000)
        start = time.perf_counter()
        dispatcher.choose(fresh, "cpu")
        taken.append(time.perf_counter() - start)
    return median(taken)


def report(cells: list[Cell]) -> None:
    """Prints, for each dtype, the winners and the worst regret over rows and prefix."""
    for dtype in dict.fromkeys(cell.shape.dtype_name for cell in cells):
        print(f"\n{dtype}: most frequent winner, worst regret in %; rows down, prefix across")
        print(f"{'':>4}" + "".join(f"{length:>16}" for length in PREFIX_LENS))
        for num_rows in ROWS:
            row = [
                [c for c in cells if (c.shape.dtype_name, *at(c)) == (dtype, num_rows, length)]
                for length in PREFIX_LENS
            ]
            print(f"{num_rows:>4}" + "".join(f"{_summed_up(of):>16}" for of in row))
    slow = sorted((c for c in cells if c.over_stock > 1.03), key=lambda c: -c.over_stock)
    print(f"\n{len(slow)} of {len(cells)} cells are more than 3 % slower than {STOCK}:")
    for cell in slow[:10]:
        print(f"  {cell.over_stock:.2f}x  {cell}")
    missed = sorted((c for c in cells if c.regret > 1.10), key=lambda c: -c.regret)
    print(f"\n{len(missed)} of {len(cells)} cells are more than 10 % slower than the best path:")
    for cell in missed[:10]:
        print(f"  {cell.regret:.2f}x  {cell}")


def at(cell: Cell) -> tuple[int, int]:
    """Rows and prefix length."""
    return cell.shape.num_rows, cell.shape.prefix_len


def most_frequent(cells: list[Cell]) -> str:
    winners = [cell.winner for cell in cells]
    return max(BACKENDS, key=winners.count)


def _summed_up(cells: list[Cell]) -> str:
    if not cells:
        return "-"
    return f"{most_frequent(cells)} {100 * (max(c.regret for c in cells) - 1):.0f}"


def share(hits: Iterable[bool]) -> float:
    found = list(hits)
    return sum(found) / len(found)


def rows_of(cells: list[Cell]) -> list[Row]:
    rows = []
    for cell in cells:
        for name, taken in cell.seconds.items():
            label = f"{name} (chosen)" if name == cell.chosen else name
            workload = str(cell).split(":")[0].strip()
            rows.append(measured("dispatch_grid", label, workload, "step", "us", [1e6 * taken]))
    return rows


if __name__ == "__main__":
    main()
