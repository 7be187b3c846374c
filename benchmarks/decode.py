"""Time of a decode step, every row one token, over one shared prefix.

    python benchmarks/decode.py --rows 16 --prefix 4096 --dtype bfloat16

Peers take turns step by step in one run on the same inputs, after their logits were compared. The
memory columns are bytes of the caches' storages, and what resident memory grew by while decoding.
"""

import argparse
import gc
import os
import time

import psutil
import torch
from peers import PEERS, Peer
from rows import Row, finish, measured
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_granikv.demo_model import obtain_model

# greatest difference of logits that is still called equal: rounding of the dtype through 30 layers
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model or obtain_model(print), dtype=dtype)
    model.eval()
    vocab_size = model.config.vocab_size
    prefix = torch.randint(100, vocab_size, (1, args.prefix))
    suffixes = torch.randint(100, vocab_size, (args.rows, args.suffix))
    tokens = torch.randint(100, vocab_size, (args.warmup + args.steps, args.rows, 1))

    with torch.no_grad():
        peers = [PEERS[name](model) for name in args.peers]
        for peer in peers:
            peer.prepare(prefix, suffixes, len(tokens))
            gc.collect()
        compare(peers, tokens[: args.warmup], LOGITS_TOLERANCE[dtype])
        seconds, growth = race(peers, tokens[args.warmup :])

    workload = f"{args.rows} x {args.prefix} + {args.suffix}, {args.dtype}"
    report(peers, workload, seconds, growth, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS)[:4])
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    return parser.parse_args()


def compare(peers: list[Peer], tokens: Tensor, tolerance: float) -> None:
    """Checks, while warming up, that all peers compute the same."""
    for ids in tokens:
        expected, *others = [peer.step(ids) for peer in peers]
        for peer, logits in zip(peers[1:], others, strict=True):
            if not peer.is_compared:
                continue
            difference = (logits.float() - expected.float()).abs().max().item()
            if difference > tolerance:
                raise SystemExit(f"{peer.name} differs from {peers[0].name} by {difference:.3g}")


def race(peers: list[Peer], tokens: Tensor) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every step, and the growth of resident memory, of each peer."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    growth = {peer.name: 0 for peer in peers}
    process = psutil.Process()
    for ids in tokens:
        for peer in peers:
            before = process.memory_info().rss
            start = time.perf_counter()
            peer.step(ids)
            seconds[peer.name].append(time.perf_counter() - start)
            growth[peer.name] = max(growth[peer.name], process.memory_info().rss - before)
    return seconds, growth


def report(
    peers: list[Peer],
    workload: str,
    seconds: dict[str, list[float]],
    growth: dict[str, int],
    out: str | None,
) -> None:
    rows: list[Row] = []
    summary: dict[str, object] = {"bench": "decode", "workload": workload}
    ours = measured("decode", "", workload, "step", "ms", [s * 1e3 for s in seconds[peers[0].name]])
    print(
        f"\n{workload}\n{'peer':<22}{'ms/step':>10}{'p20':>9}{'p80':>9}{'x':>8}{'MB':>9}{'RSS+MB':>9}"
    )
    for peer in peers:
        row = measured(
            "decode", peer.name, workload, "step", "ms", [s * 1e3 for s in seconds[peer.name]]
        )
        held = peer.bytes_held()
        rows += [row, measured("decode", peer.name, workload, "held", "bytes", [held])]
        ratio = row.value / ours.value
        summary[f"{peer.name}_ms"] = round(row.value, 3)
        summary[f"{peer.name}_ratio"] = round(ratio, 3)
        summary[f"{peer.name}_bytes"] = held
        print(
            f"{peer.name:<22}{row.value:>10.1f}{row.p20:>9.1f}{row.p80:>9.1f}{ratio:>8.2f}"
            f"{held / 1e6:>9.1f}{growth[peer.name] / 1e6:>9.1f}"
        )
    finish(rows, out=out, summary=summary)


if __name__ == "__main__":
    main()
