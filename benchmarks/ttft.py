"""Time and tokens to the first token of a batch, against stock batched prefill.

    python benchmarks/ttft.py --rows 16 --prefix 4096 --suffix 32

Tokens are counted where they enter the model: in its embedding layer. The first tokens are compared.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rows import finish, measured
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.demo_model import obtain_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="JSON lines file to append the rows to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model or obtain_model(print), dtype=dtype)
    model.eval()
    prefix = torch.randint(100, model.config.vocab_size, (1, args.prefix))
    suffixes = torch.randint(100, model.config.vocab_size, (args.rows, args.suffix))
    prompts = torch.cat([prefix.expand(args.rows, -1), suffixes], dim=1)
    seconds: dict[str, list[float]] = {"granikv": [], "DynamicCache": []}
    tokens: dict[str, int] = {}
    first: dict[str, torch.Tensor] = {}
    for _ in range(args.repeats):
        for name in seconds:
            model.set_attn_implementation("granikv" if name == "granikv" else "sdpa")
            with counted_tokens(model) as count:
                start = time.perf_counter()
                cache = DynamicCache(config=model.config)
                if name == "granikv":
                    cache = AsymmetricPagedCache(model.config)
                    cache.prefill(model, prefix)
                out = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=1,
                    do_sample=False,
                    **{CACHE_ARGUMENT: cache},
                )
                seconds[name].append(time.perf_counter() - start)
            tokens[name], first[name] = count[0], out[:, -1]
    if not torch.equal(first["granikv"], first["DynamicCache"]):
        raise SystemExit("the first tokens differ")
    workload = f"{args.rows} x {args.prefix} + {args.suffix}, {args.dtype}"
    rows = [measured("ttft", name, workload, "ttft", "s", s) for name, s in seconds.items()]
    print(f"\n{workload}")
    for row in rows:
        print(f"{row.peer:<14}{row.value:>9.2f} s to the first token{tokens[row.peer]:>9} tokens")
    ratio = rows[1].value / rows[0].value
    tokens_ratio = tokens["DynamicCache"] / tokens["granikv"]
    print(f"{ratio:.1f}x in time, {tokens_ratio:.1f}x in tokens computed")
    summary = {"bench": "ttft", "workload": workload, "time_ratio": round(ratio, 3)}
    finish(rows, out=args.out, summary={**summary, "tokens_ratio": round(tokens_ratio, 3)})


@contextmanager
def counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts the tokens that pass the embedding layer."""
    count = [0]

    def add(_: object, args: tuple[torch.Tensor, ...]) -> None:
        count[0] += args[0].numel()

    handle = model.get_input_embeddings().register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()


if __name__ == "__main__":
    main()
