"""Time of a decode step, every row one token, over one shared prefix.

Peers take turns step by step in one run on the same inputs, after their logits were compared. Bytes
are those of the caches' storages; beside them, what resident memory grew by while decoding. With
`no-context` among the peers, what is above it is what the context costs.
"""

import argparse
import gc
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_granikv.bench.agreement import TOLERANCES
from hf_granikv.bench.compiled import GranikvCompiled, GranikvFrozen, StaticCompiled, StaticFrozen
from hf_granikv.bench.llama_cpp import LLAMA_CPP
from hf_granikv.bench.options import add_common, add_peers, loaded_model, positive
from hf_granikv.bench.peers import (
    CONTINUOUS,
    Dynamic,
    Granikv,
    GranikvCascade,
    GranikvGemm,
    GranikvPerRow,
    NoContext,
    PeerFactory,
    Static,
)
from hf_granikv.bench.race import checked_race, chosen, prepared
from hf_granikv.bench.rows import Row
from hf_granikv.bench.step_rows import step_rows
from hf_granikv.bench.workload import Workload, random_ids

HELP = "time of a decode step over one shared prefix"
_ONE_PREFIX = (Granikv, Static, Dynamic, NoContext)
_COMPILED = (GranikvCompiled, GranikvFrozen, StaticCompiled, StaticFrozen)
_FORCED = (GranikvCascade, GranikvGemm, GranikvPerRow)
PEERS: dict[str, PeerFactory] = {
    **{peer.name: peer for peer in (*_ONE_PREFIX, *_COMPILED, *_FORCED)},
    **CONTINUOUS,
    **LLAMA_CPP,
}
DEFAULT = ["granikv", "granikv-compiled", "granikv-frozen"]
DEFAULT += ["StaticCache", "StaticCache-compiled", "StaticCache-frozen"]
DEFAULT += ["DynamicCache", "continuous-4", *LLAMA_CPP, NoContext.name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this section."""
    add_common(parser)
    parser.add_argument("--rows", type=positive, nargs="+", default=[16], metavar="N")
    parser.add_argument("--prefix", type=positive, nargs="+", default=[4096], metavar="TOKENS")
    parser.add_argument("--suffix", type=positive, default=64, metavar="TOKENS")
    parser.add_argument("--steps", type=positive, default=20, metavar="N")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N")
    add_peers(parser, PEERS, DEFAULT)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measures every number of rows over every length of prefix."""
    model = loaded_model(arguments)
    names = chosen(arguments, PEERS, model)
    rows: list[Row] = []
    for num_rows in arguments.rows:
        for prefix_len in arguments.prefix:
            rows += measure(model, names, num_rows, prefix_len, arguments)
            # compiled functions and caches refer to each other in circles
            gc.collect()
    return rows


def measure(
    model: PreTrainedModel,
    names: Sequence[str],
    num_rows: int,
    prefix_len: int,
    arguments: argparse.Namespace,
) -> list[Row]:
    """The rows of one workload."""
    label = f"{num_rows} x {prefix_len} + {arguments.suffix}, {arguments.dtype}"
    vocab_size = model.config.get_text_config().vocab_size
    torch.manual_seed(0)
    workload = Workload.random([prefix_len], num_rows, arguments.suffix, vocab_size, False)
    tokens = random_ids(vocab_size, (arguments.warmup + arguments.steps, num_rows, 1))
    with torch.no_grad():
        peers, reasons = prepared(PEERS, names, model, workload, len(tokens))
        raced = checked_race(
            peers,
            reasons,
            tokens,
            arguments.warmup,
            TOLERANCES[model.dtype],
            rotates=False,
            description=label,
        )
    return step_rows("decode", label, *raced)
