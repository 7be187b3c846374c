"""A mixed trace: requests come at random over a few prefixes, with heavy-tailed lengths.

    python benchmarks/trace.py --rate 0.5 --dtype bfloat16

Engines take turns in one process, in virtual time (`trace_replay.py`), with the prefixes computed
beforehand. Reported are tokens per second from the first arrival to the last token, and median and
99th percentile of the time to the first token and of the time between tokens. Nothing is reported
unless the answers agree: where two engines choose different tokens, both have to be the best there
by a plain forward of the model, up to rounding.
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np
import torch
from decode import LOGITS_TOLERANCE
from rows import Row, finish, measured
from torch import Tensor
from trace_engines import ENGINES, Setting
from trace_load import Lengths, Request, poisson_requests
from trace_replay import Log, replay
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_granikv.demo_model import obtain_model


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model or obtain_model(print), dtype=dtype)
    model.eval()
    vocab_size = model.config.vocab_size
    prefixes = tuple(torch.randint(2, vocab_size, (1, length)) for length in args.prefixes)
    requests = poisson_requests(
        args.requests,
        args.rate,
        num_prefixes=len(prefixes),
        suffixes=Lengths(args.suffix, args.sigma, args.longest_suffix),
        outputs=Lengths(args.output, args.sigma, args.longest_output),
        vocab_size=vocab_size,
        seed=args.seed,
    )
    setting = Setting(model, prefixes, requests, args.max_rows, args.max_step_tokens)
    with torch.no_grad():
        engines = [ENGINES[name](setting) for name in args.peers]
        print(f"{args.peers} prepared", flush=True)
        logs = replay(engines, requests)
        check(model, prefixes, requests, logs, LOGITS_TOLERANCE[dtype], args.most_checked)
    lengths = "/".join(map(str, args.prefixes))
    workload = (
        f"{args.requests} at {args.rate}/s over {lengths}, median {args.suffix} + {args.output}, "
        f"{args.dtype}"
    )
    report(logs, requests, workload, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1024, 2048, 3072, 4096])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second")
    parser.add_argument("--suffix", type=float, default=32, help="median tokens after the prefix")
    parser.add_argument("--output", type=float, default=32, help="median tokens of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of lengths")
    parser.add_argument("--longest-suffix", type=int, default=512)
    parser.add_argument("--longest-output", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--max-step-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-checked", type=int, default=8, help="answers that differ to check")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--peers", nargs="+", choices=list(ENGINES), default=["granikv", "continuous-16"]
    )
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    return parser.parse_args()


def check(
    model: PreTrainedModel,
    prefixes: Sequence[Tensor],
    requests: Sequence[Request],
    logs: dict[str, Log],
    tolerance: float,
    most_checked: int,
) -> None:
    """Checks that every answer is whole, and where answers first differ, that both are right.

    Raises:
        SystemExit: They are not.
    """
    model.config._attn_implementation = "sdpa"
    expected, *others = logs.values()
    num_differing = 0
    for request in requests:
        for log in others:
            theirs, ours = log.tokens[request.name], expected.tokens[request.name]
            if len(theirs) != request.num_new or len(ours) != request.num_new:
                raise SystemExit(f"{request.name} has {len(ours)} and {len(theirs)} tokens")
            if theirs == ours:
                continue
            num_differing += 1
            if num_differing > most_checked:
                continue
            at = next(i for i in range(request.num_new) if theirs[i] != ours[i])
            ids = [*prefixes[request.prefix_idx][0].tolist(), *request.suffix, *ours[:at]]
            logits = model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float()
            for token in (theirs[at], ours[at]):
                if (distance := (logits.max() - logits[token]).item()) > tolerance:
                    raise SystemExit(f"{request.name}: token {at} is {distance:.3g} off the best")
    num_checked = min(num_differing, most_checked)
    print(
        f"{num_differing} of {len(requests) * len(others)} answers differ; in {num_checked} of "
        "these both tokens were checked to be the best"
    )


def report(
    logs: dict[str, Log], requests: Sequence[Request], workload: str, out: str | None
) -> None:
    """Prints a card, and one JSON line last."""
    rows: list[Row] = []
    summary: dict[str, object] = {"bench": "trace", "workload": workload}
    columns = [
        ("tokens/s", "tokens_per_s", 1.0),
        ("first s", "first_token_median_s", 1.0),
        ("p99", "first_token_p99_s", 1.0),
        ("next ms", "between_tokens_median_s", 1e3),
        ("p99", "between_tokens_p99_s", 1e3),
        ("peak MB", "peak_bytes", 1e-6),
    ]
    print(f"\n{workload}\n{'peer':<16}" + "".join(f"{title:>10}" for title, _, _ in columns))
    for name, log in logs.items():
        first, between = log.first_token_s(requests), log.between_tokens_s()
        figures = {
            "tokens_per_s": log.tokens_per_s(),
            "first_token_median_s": float(np.median(first)),
            "first_token_p99_s": float(np.percentile(first, 99)),
            "between_tokens_median_s": float(np.median(between)),
            "between_tokens_p99_s": float(np.percentile(between, 99)),
            "peak_bytes": log.peak_bytes,
        }
        print(
            f"{name:<16}" + "".join(f"{figures[metric] * by:>10.2f}" for _, metric, by in columns)
        )
        for metric, value in figures.items():
            unit = {"s": "s", "bytes": "bytes"}[metric.split("_")[-1]]
            unit = "1/s" if metric == "tokens_per_s" else unit
            rows.append(measured("trace", name, workload, metric, unit, [value]))
            summary[f"{name}_{metric}"] = round(value, 4)
    finish(rows, out=out, summary=summary)


if __name__ == "__main__":
    main()
