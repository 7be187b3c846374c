"""Time and tokens to the first token of a batch, against stock batched prefill.

Tokens are counted where they enter the model: in its embedding layer. The logits of the first tokens
are compared.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.bench.agreement import TOLERANCES, Agreement, check_agreement
from hf_granikv.bench.options import add_common, loaded_model, positive
from hf_granikv.bench.rows import Row, measured
from hf_granikv.bench.workload import Workload
from hf_granikv.compat import CACHE_ARGUMENT

HELP = "time and tokens to the first token of a batch"
_OURS, _STOCK = "granikv", "DynamicCache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this section."""
    add_common(parser)
    parser.add_argument("--rows", type=positive, default=16, metavar="N")
    parser.add_argument("--prefix", type=positive, default=4096, metavar="TOKENS")
    parser.add_argument("--suffix", type=positive, default=32, metavar="TOKENS")
    parser.add_argument("--repeats", type=positive, default=1, metavar="N")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measures both, in turns.

    Raises:
        ResultsDiffer: They do not give the same logits.
    """
    model = loaded_model(arguments)
    vocab_size = model.config.get_text_config().vocab_size
    workload = Workload.random(
        [arguments.prefix], arguments.rows, arguments.suffix, vocab_size, False
    )
    seconds: dict[str, list[float]] = {_OURS: [], _STOCK: []}
    tokens: dict[str, int] = {}
    logits: dict[str, Tensor] = {}
    label = f"{arguments.rows} x {arguments.prefix} + {arguments.suffix}, {arguments.dtype}"
    with tqdm(total=2 * arguments.repeats, desc=label, leave=False, disable=None) as bar:
        for _ in range(arguments.repeats):
            for name in seconds:
                with counted_tokens(model) as count:
                    start = time.perf_counter()
                    logits[name] = _first_logits(model, workload, name)
                    seconds[name].append(time.perf_counter() - start)
                tokens[name] = count[0]
                bar.update()
    agreement = Agreement()
    agreement.add(logits[_STOCK], logits[_OURS])
    check_agreement({_STOCK: agreement}, _OURS, TOLERANCES[model.dtype])
    rows = [measured("ttft", name, label, "ttft", "s", s) for name, s in seconds.items()]
    return rows + [
        measured("ttft", name, label, "tokens_computed", "", [n]) for name, n in tokens.items()
    ]


def _first_logits(model: PreTrainedModel, workload: Workload, name: str) -> Tensor:
    """Generates one token for each row; what it was chosen from `[num_rows, vocab_size]`."""
    model.set_attn_implementation("granikv" if name == _OURS else "sdpa")
    cache: Any = DynamicCache(config=model.config)
    if name == _OURS:
        cache = AsymmetricPagedCache(model.config)
        cache.prefill(model, workload.prefixes[0])
    generate: Any = model.generate
    out = generate(
        **workload.padded_prompts(),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{CACHE_ARGUMENT: cache},
    )
    logits: Tensor = out.logits[0]
    return logits


@contextmanager
def counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts the tokens that pass the embedding layer."""
    count = [0]

    def add(_: object, args: tuple[Tensor, ...]) -> None:
        count[0] += args[0].numel()

    handle = model.get_input_embeddings().register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()
