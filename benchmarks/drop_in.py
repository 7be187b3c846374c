"""An empty `AsymmetricPagedCache` in the place of `DynamicCache`: time per step, and bytes held.

    python benchmarks/drop_in.py --rows 16 --tokens 1000

Both caches decode the same tokens under sdpa, in turns, from a short prompt to the given length.
"""

import argparse
import os
import time

import torch
from peers import Dynamic, Peer
from rows import finish, measured
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.demo_model import obtain_model


class DropIn(Peer):
    """Ours, without a prefix."""

    name = "granikv-empty"

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        self.cache = AsymmetricPagedCache(self.model.config)
        self.step(suffixes)

    def bytes_held(self) -> int:
        return self.cache.stats().cold_bytes


class DynamicFromPrompt(Dynamic):
    """`DynamicCache` from a prompt per row."""

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.step(suffixes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model or obtain_model(print), dtype=dtype)
    model.eval()
    tokens = torch.randint(100, model.config.vocab_size, (args.tokens, args.rows, 1))
    prompts = tokens[: args.prompt, :, 0].T
    peers: list[Peer] = [DropIn(model), DynamicFromPrompt(model)]
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    with torch.no_grad():
        for peer in peers:
            peer.prepare(prompts[:, :0], prompts, args.tokens)
        for turn, ids in enumerate(tokens[args.prompt :]):
            # whoever goes second finds the weights in the processor's cache
            for peer in peers if turn % 2 else peers[::-1]:
                start = time.perf_counter()
                logits = peer.step(ids)
                seconds[peer.name].append(time.perf_counter() - start)
                if peer is peers[turn % 2]:
                    expected = logits
            if not torch.equal(logits.argmax(-1), expected.argmax(-1)):
                raise SystemExit(f"step {turn}: the caches disagree about the next token")
    workload = f"{args.rows} rows, {args.prompt} to {args.tokens} tokens, {args.dtype}"
    rows = [
        measured(
            "drop_in", peer.name, workload, "step", "ms", [s * 1e3 for s in seconds[peer.name]]
        )
        for peer in peers
    ]
    ratio, bytes_ratio = (
        rows[0].value / rows[1].value,
        peers[0].bytes_held() / peers[1].bytes_held(),
    )
    print(f"\n{workload}")
    for peer, row in zip(peers, rows, strict=True):
        print(f"{peer.name:<16}{row.value:>9.2f} ms/step{peer.bytes_held() / 1e6:>9.1f} MB held")
    print(f"ratio of medians {ratio:.3f}, of bytes {bytes_ratio:.4f}")
    summary = {"bench": "drop_in", "workload": workload, "time_ratio": round(ratio, 4)}
    finish(rows, out=args.out, summary={**summary, "bytes_ratio": round(bytes_ratio, 4)})


if __name__ == "__main__":
    main()
