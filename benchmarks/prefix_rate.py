"""How near each backend comes to the rate of a large matrix product, over one shared prefix.

    python benchmarks/prefix_rate.py

The prefix part of one layer of a decode step, by itself, beside torch's own product of two
4096 x 4096 matrices in the same run. Runs take turns; nothing is in the cores' caches. What is
timed has been compared with attention in float64.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.bench.rows import environment, measured, record
from hf_granikv.dispatch.calibration import places, random_store
from hf_granikv.dispatch.stopwatch import Stopwatch
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.views import AttentionState

# rows, prefix tokens
SIZES = ((16, 4096), (16, 8192), (64, 4096))
# kv heads, gqa ratio, head_dim
HEADS = ((3, 3, 64), (8, 4, 128))
NAMES = ("cascade", "batched_gemm")
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    dtype = getattr(torch, args.dtype)
    watch, store = Stopwatch(device), random_store(dtype, device)
    square = torch.randn(4096, 4096).to(dtype)
    rows = []
    with torch.no_grad():
        for num_rows, prefix_len in SIZES:
            for heads in HEADS:
                runs, num_flops = prepared(store, num_rows, prefix_len, *heads)
                seconds = watch.medians_s(
                    [*runs.values(), partial(torch.mm, square, square)], args.seconds
                )
                best = 2 * 4096**3 / seconds[-1]
                workload = f"{num_rows} x {prefix_len}, {heads[0]} heads x {heads[1]} of {heads[2]}"
                workload += f", {args.dtype}"
                print(f"{workload}; a large product: {best / 1e9:.0f} GFLOP/s")
                for name, taken in zip(runs, seconds, strict=False):
                    share = num_flops / taken / best
                    print(f"  {name:<13} {1e6 * taken:6.0f} us, {100 * share:3.0f} % of that rate")
                    figures = ("prefix_rate", name, workload, "share of a large product", "%")
                    rows.append(measured(*figures, [100 * share]))
    record(rows, environment("one layer"), args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=4, help="for each size; default 4")
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    return parser.parse_args()


def prepared(
    store: Tensor, num_rows: int, prefix_len: int, num_heads: int, gqa_ratio: int, head_dim: int
) -> tuple[dict[str, Callable[[], object]], float]:
    """Checks the backends; gives what runs each over another prefix every time, and its flops."""
    query = (
        torch.randn(num_rows, 1, num_heads * gqa_ratio, head_dim).to(store.dtype).transpose(1, 2)
    )
    prefixes = places(store, (2, num_heads, prefix_len, head_dim))
    scale, turns = head_dim**-0.5, cycle(prefixes)
    runs: dict[str, Callable[[], object]] = {}
    for name in NAMES:
        attend = BACKENDS[name].planned(query, *prefixes[0], scale=scale, softcap=None)
        check(name, attend(query, *prefixes[0]), query, *prefixes[0], scale)
        runs[name] = lambda attend=attend: attend(query, *next(turns))
    return runs, 4.0 * query.numel() * prefix_len


def check(
    name: str, state: AttentionState, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> None:
    pieces = zip(*state, strict=True)
    out, _ = merge_states([AttentionState(out.float(), lse) for out, lse in pieces])
    queries = query.reshape(len(query), keys.shape[0], -1, query.shape[-1]).double()
    weights = torch.softmax(queries @ keys.double().mT * scale, -1)
    difference = (out.double() - weights @ values.double()).abs().max().item()
    if difference > TOLERANCE[query.dtype]:
        raise SystemExit(f"{name} differs from attention in float64 by {difference:.2g}")


if __name__ == "__main__":
    main()
