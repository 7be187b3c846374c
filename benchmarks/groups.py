"""Time of a decode step over rows of several prefixes in one batch.

    python benchmarks/groups.py --prefixes 1024 2048 3072 4096 --agents 4 --dtype bfloat16

Peers take turns step by step in one run on the same inputs, after their logits were compared; who
begins changes with every step. Beside a step stands what of it is above `no-context`, the model on
the new tokens alone: the part that a cache can change. Bytes are those of the caches' storages.
"""

import argparse
import gc
import os
import time
from statistics import median

import torch
from decode import LOGITS_TOLERANCE
from group_peers import GROUP_PEERS, GroupPeer, NoContext
from group_workload import GroupWorkload
from rows import Row, finish, measured
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_granikv.demo_model import obtain_model

DEFAULT = ["granikv", "batch-global", "StaticCache", "DynamicCache", "continuous-4", "no-context"]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model or obtain_model(print), dtype=dtype)
    model.eval()
    vocab_size = model.config.vocab_size
    work = GroupWorkload.random(args.prefixes, args.agents, args.suffix, vocab_size, args.shuffled)
    tokens = torch.randint(100, vocab_size, (args.warmup + args.steps, work.num_rows, 1))
    with torch.no_grad():
        peers = [GROUP_PEERS[name](model) for name in args.peers]
        for peer in peers:
            start = time.perf_counter()
            peer.prepare(work, len(tokens))
            gc.collect()
            print(f"{peer.name} prepared in {time.perf_counter() - start:.0f} s", flush=True)
        compare(peers, tokens[: args.warmup], LOGITS_TOLERANCE[dtype])
        seconds = race(peers, tokens[args.warmup :])
    lengths = "/".join(map(str, args.prefixes))
    order = ", shuffled" if args.shuffled else ""
    report(peers, f"{args.agents} x {lengths} + {args.suffix}, {args.dtype}{order}", seconds, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1024, 2048, 3072, 4096])
    parser.add_argument("--agents", type=int, default=4, help="rows of each prefix")
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--shuffled", action="store_true", help="rows of a prefix are no neighbours"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", nargs="+", choices=list(GROUP_PEERS), default=DEFAULT)
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    return parser.parse_args()


def compare(peers: list[GroupPeer], tokens: Tensor, tolerance: float) -> None:
    """Checks, while warming up, that all peers compute the same."""
    for ids in tokens:
        expected, *others = [peer.step(ids).float() for peer in peers]
        for peer, logits in zip(peers[1:], others, strict=True):
            difference = (logits - expected).abs().max().item()
            if peer.is_compared and not difference <= tolerance:
                raise SystemExit(f"{peer.name} differs from {peers[0].name} by {difference:.3g}")


def race(peers: list[GroupPeer], tokens: Tensor) -> dict[str, list[float]]:
    """Seconds of every step of each peer."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn, ids in enumerate(tokens):
        # who comes after a peer that streams gigabytes finds nothing in the processor's caches
        first = turn % len(peers)
        for peer in peers[first:] + peers[:first]:
            start = time.perf_counter()
            peer.step(ids)
            seconds[peer.name].append(time.perf_counter() - start)
    return seconds


def report(
    peers: list[GroupPeer], workload: str, seconds: dict[str, list[float]], args: argparse.Namespace
) -> None:
    """Prints a card, and one JSON line last."""
    rows: list[Row] = []
    summary: dict[str, object] = {"bench": "groups", "workload": workload}
    num_rows = args.agents * len(args.prefixes)
    floor = seconds.get(NoContext.name, [0.0] * args.steps)
    print(
        f"\n{workload}\n{'peer':<16}{'ms/step':>9}{'p20':>9}{'p80':>9}{'x':>7}{'tokens/s':>10}"
        f"{'ms above':>10}{'x':>7}{'MB':>9}"
    )
    ours = [median(ms) for ms in _steps(seconds[peers[0].name], floor)]
    for peer in peers:
        steps, above = _steps(seconds[peer.name], floor)
        row = measured("groups", peer.name, workload, "step", "ms", steps)
        over = measured("groups", peer.name, workload, "step_above_no_context", "ms", above)
        held = peer.bytes_held()
        rows += [row, over, measured("groups", peer.name, workload, "held", "bytes", [held])]
        ratio = row.value / ours[0]
        ratio_above = over.value / ours[1] if ours[1] > 0 else float("nan")
        print(
            f"{peer.name:<16}{row.value:>9.1f}{row.p20:>9.1f}{row.p80:>9.1f}{ratio:>7.2f}"
            f"{1e3 * num_rows / row.value:>10.1f}{over.value:>10.1f}{ratio_above:>7.2f}"
            f"{held / 1e6:>9.1f}  {peer.backends()}"
        )
        summary[f"{peer.name}_ms"] = round(row.value, 3)
        summary[f"{peer.name}_ratio"] = round(ratio, 3)
        summary[f"{peer.name}_ratio_above"] = round(ratio_above, 3)
        summary[f"{peer.name}_bytes"] = held
    finish(rows, out=args.out, summary=summary)


def _steps(seconds: list[float], floor: list[float]) -> tuple[list[float], list[float]]:
    """Milliseconds of steps, and of what is above the floor in the same turn."""
    above = [1e3 * (s - low) for s, low in zip(seconds, floor, strict=True)]
    return [1e3 * s for s in seconds], above


if __name__ == "__main__":
    main()
