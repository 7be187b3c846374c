"""A mixed trace: requests come at random over a few prefixes, with heavy-tailed lengths.

Engines take turns in one process, in virtual time (`trace_replay.py`), with the prefixes computed
beforehand. Reported are tokens per second from the first arrival to the last token, and median and
99th percentile of the time to the first token and of the time between tokens. Nothing is reported
unless the answers agree: where two engines choose different tokens, both have to be the best there
by a plain forward of the model, up to rounding.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv.bench.agreement import ResultsDiffer
from hf_granikv.bench.options import add_common, add_peers, loaded_model, positive
from hf_granikv.bench.rows import Row, measured
from hf_granikv.bench.trace_engines import ENGINES, Setting
from hf_granikv.bench.trace_load import Lengths, Request, poisson_requests
from hf_granikv.bench.trace_replay import Log, replay
from hf_granikv.bench.workload import random_ids

HELP = "requests that come at random: throughput and latency"
DEFAULT = ["granikv", "continuous-16"]
# how far a logit may be from the best one and be called as good: rounding of the dtype in 30 layers
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this section."""
    add_common(parser)
    lengths = [1024, 2048, 3072, 4096]
    parser.add_argument("--prefixes", type=positive, nargs="+", default=lengths, metavar="TOKENS")
    parser.add_argument("--requests", type=positive, default=40, metavar="N")
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second; default: 0.5")
    parser.add_argument("--suffix", type=float, default=32, help="median tokens after the prefix")
    parser.add_argument("--output", type=float, default=32, help="median tokens of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of lengths")
    parser.add_argument("--longest-suffix", type=positive, default=512, metavar="TOKENS")
    parser.add_argument("--longest-output", type=positive, default=256, metavar="TOKENS")
    parser.add_argument("--max-rows", type=positive, default=16, metavar="N")
    parser.add_argument("--max-step-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most-checked", type=positive, default=8, metavar="N", help="answers that differ to check"
    )
    add_peers(parser, ENGINES, DEFAULT)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Lets each engine answer the same requests.

    Raises:
        ValueError: The rate is not positive.
        ResultsDiffer: An answer is wrong.
    """
    if not arguments.rate > 0:
        raise ValueError(f"--rate {arguments.rate:g} is no rate of arrivals; give one above 0.")
    model = loaded_model(arguments)
    vocab_size = model.config.get_text_config().vocab_size
    prefixes = tuple(random_ids(vocab_size, (1, length)) for length in arguments.prefixes)
    requests = poisson_requests(
        arguments.requests,
        arguments.rate,
        num_prefixes=len(prefixes),
        suffixes=Lengths(arguments.suffix, arguments.sigma, arguments.longest_suffix),
        outputs=Lengths(arguments.output, arguments.sigma, arguments.longest_output),
        vocab_size=vocab_size,
        seed=arguments.seed,
    )
    setting = Setting(model, prefixes, requests, arguments.max_rows, arguments.max_step_tokens)
    with torch.no_grad():
        names = dict.fromkeys(arguments.peers or arguments.default_peers)
        logs = replay([ENGINES[name](setting) for name in names], requests)
        tolerance = LOGIT_TOLERANCE[model.dtype]
        check(model, prefixes, requests, logs, tolerance, arguments.most_checked)
    lengths = "/".join(map(str, arguments.prefixes))
    label = (
        f"{arguments.requests} at {arguments.rate:g}/s over {lengths}, median {arguments.suffix:g} + "
        f"{arguments.output:g}, {arguments.dtype}"
    )
    return [row for name, log in logs.items() for row in log_rows(name, label, log, requests)]


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
        ResultsDiffer: They are not.
    """
    model.config._attn_implementation = "sdpa"
    expected, *others = logs.values()
    num_differing = 0
    for request in requests:
        for log in others:
            theirs, ours = log.tokens[request.name], expected.tokens[request.name]
            if len(theirs) != request.num_new or len(ours) != request.num_new:
                raise ResultsDiffer(f"{request.name} has {len(ours)} and {len(theirs)} tokens")
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
                    raise ResultsDiffer(
                        f"{request.name}: token {at} is {distance:.3g} off the best"
                    )
    num_checked = min(num_differing, most_checked)
    print(
        f"{num_differing} of {len(requests) * len(others)} answers differ; in {num_checked} of "
        "these both tokens were checked to be the best"
    )


def log_rows(name: str, label: str, log: Log, requests: Sequence[Request]) -> list[Row]:
    """The rows of one engine."""
    first, between = log.first_token_s(requests), log.between_tokens_s()
    figures = [("tokens_per_s", "1/s", log.tokens_per_s()), ("peak_bytes", "bytes", log.peak_bytes)]
    for metric, seconds in (("first_token", first), ("between_tokens", between)):
        # answers of one token each have nothing between tokens
        if seconds:
            figures.append((f"{metric}_median_s", "s", float(np.median(seconds))))
            figures.append((f"{metric}_p99_s", "s", float(np.percentile(seconds, 99))))
    return [
        measured("trace", name, label, metric, unit, [value]) for metric, unit, value in figures
    ]
