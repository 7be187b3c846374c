"""Time of a decode step over rows of several prefixes in one batch.

Peers take turns step by step in one run on the same inputs, after their logits were compared; who
begins changes with every step. Beside a step stands what of it is above `no-context`, the model on
the new tokens alone: the part that a cache can change. Bytes are those of the caches' storages.
"""

import argparse

import torch

from hf_granikv.bench.agreement import TOLERANCES
from hf_granikv.bench.group_peers import GROUP_PEERS
from hf_granikv.bench.options import add_common, add_peers, loaded_model, positive
from hf_granikv.bench.race import checked_race, chosen, prepared
from hf_granikv.bench.rows import Row
from hf_granikv.bench.step_rows import step_rows
from hf_granikv.bench.workload import Workload, random_ids

HELP = "time of a decode step over rows of several prefixes"
DEFAULT = ["granikv", "granikv-compiled", "granikv-frozen"]
DEFAULT += ["batch-global", "batch-global-compiled", "batch-global-frozen"]
DEFAULT += ["StaticCache", "StaticCache-compiled", "DynamicCache", "continuous-4", "no-context"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this section."""
    add_common(parser)
    lengths = [1024, 2048, 3072, 4096]
    parser.add_argument("--prefixes", type=positive, nargs="+", default=lengths, metavar="TOKENS")
    parser.add_argument(
        "--agents", type=positive, default=4, metavar="N", help="rows of each prefix; default: 4"
    )
    parser.add_argument("--suffix", type=positive, default=32, metavar="TOKENS")
    parser.add_argument("--steps", type=positive, default=20, metavar="N")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N")
    parser.add_argument(
        "--shuffled", action="store_true", help="rows of a prefix are no neighbours"
    )
    add_peers(parser, GROUP_PEERS, DEFAULT)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measures one batch."""
    model = loaded_model(arguments)
    names = chosen(arguments, GROUP_PEERS, model)
    lengths = "/".join(map(str, arguments.prefixes))
    label = f"{arguments.agents} x {lengths} + {arguments.suffix}, {arguments.dtype}"
    label += ", shuffled" if arguments.shuffled else ""
    vocab_size = model.config.get_text_config().vocab_size
    workload = Workload.random(
        arguments.prefixes, arguments.agents, arguments.suffix, vocab_size, arguments.shuffled
    )
    num_steps = arguments.warmup + arguments.steps
    tokens = random_ids(vocab_size, (num_steps, workload.num_rows, 1))
    with torch.no_grad():
        peers, reasons = prepared(GROUP_PEERS, names, model, workload, num_steps)
        raced = checked_race(
            peers,
            reasons,
            tokens,
            arguments.warmup,
            TOLERANCES[model.dtype],
            rotates=True,
            description=label,
        )
    return step_rows("groups", label, *raced)
