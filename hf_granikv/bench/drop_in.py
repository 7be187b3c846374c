"""An empty `AsymmetricPagedCache` in the place of `DynamicCache`: time per step, and bytes held.

Both caches decode the same tokens under sdpa, in turns, from a short prompt to the given length, and
their logits are compared in every step.
"""

import argparse
import time

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.bench.agreement import TOLERANCES, Agreement, check_agreement
from hf_granikv.bench.options import add_common, loaded_model, positive
from hf_granikv.bench.peers import OnePrefixPeer, storage_bytes
from hf_granikv.bench.race import Timing
from hf_granikv.bench.rows import Row
from hf_granikv.bench.step_rows import step_rows
from hf_granikv.bench.workload import Workload, random_ids

HELP = "an empty cache of ours in the place of DynamicCache"


class DropIn(OnePrefixPeer):
    """Ours, without a prefix."""

    name = "granikv-empty"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.cache = AsymmetricPagedCache(self.model.config)
        self.step(workload.suffixes)

    def bytes_held(self) -> int:
        return self.cache.stats().cold_bytes


class DynamicFromPrompt(OnePrefixPeer):
    """`DynamicCache` from a prompt per row."""

    name = "DynamicCache"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.step(workload.suffixes)

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this section."""
    add_common(parser)
    parser.add_argument("--rows", type=positive, default=16, metavar="N")
    parser.add_argument("--prompt", type=positive, default=960, metavar="TOKENS")
    parser.add_argument("--tokens", type=positive, default=1000, metavar="TOKENS")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measures both caches.

    Raises:
        ValueError: There is nothing to decode.
        ResultsDiffer: They do not give the same logits.
    """
    if arguments.tokens <= arguments.prompt:
        raise ValueError(
            f"--tokens {arguments.tokens} is the length to decode to, and --prompt "
            f"{arguments.prompt} where it begins; give more tokens."
        )
    model = loaded_model(arguments)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = random_ids(vocab_size, (arguments.tokens, arguments.rows, 1))
    prompts = tokens[: arguments.prompt, :, 0].T
    workload = Workload((prompts[:1, :0],), prompts, (0,) * arguments.rows)
    label = f"{arguments.rows} rows, {arguments.prompt} to {arguments.tokens} tokens, "
    label += arguments.dtype
    peers: list[OnePrefixPeer] = [DropIn(model), DynamicFromPrompt(model)]
    with torch.no_grad():
        for peer in peers:
            peer.prepare(workload, len(tokens))
        timings, agreement = _decode(peers, tokens[arguments.prompt :], label)
    agreements = {DynamicFromPrompt.name: agreement}
    check_agreement(agreements, DropIn.name, TOLERANCES[model.dtype])
    return step_rows("drop_in", label, peers, timings, agreements, {})


def _decode(
    peers: list[OnePrefixPeer], tokens: Tensor, label: str
) -> tuple[dict[str, Timing], Agreement]:
    timings, agreement = {peer.name: Timing() for peer in peers}, Agreement()
    steps = tqdm(tokens, desc=label, unit="step", leave=False, disable=None)
    for turn, ids in enumerate(steps):
        logits = []
        # whoever goes second finds the weights in the processor's cache
        for peer in peers if turn % 2 else peers[::-1]:
            start = time.perf_counter()
            logits.append(peer.step(ids))
            timings[peer.name].seconds.append(time.perf_counter() - start)
        agreement.add(*logits)
    return timings, agreement
