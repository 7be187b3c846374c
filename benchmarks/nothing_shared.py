"""What `hf_granikv.generate` costs on a batch in which nothing is shared.

    python benchmarks/nothing_shared.py

Stock `generate` and `custom_generate=hf_granikv.generate` take turns on the same rows of random ids;
they are timed after their tokens were compared.
"""

import argparse
import json
import os
import time
from functools import partial
from statistics import median

import torch
from transformers import AutoModelForCausalLM

import hf_granikv
from hf_granikv.bench.rows import environment
from hf_granikv.demo_model import obtain_model


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        obtain_model(print), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    torch.manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (args.rows, args.prompt))
    mask = torch.ones_like(ids)
    run = partial(
        model.generate,
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=args.tokens,
        min_new_tokens=args.tokens,
        do_sample=False,
    )
    runs = {"generate": run, "hf_granikv": partial(run, custom_generate=hf_granikv.generate)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    expected = run()
    if not torch.equal(runs["hf_granikv"](), expected):
        raise SystemExit("the tokens differ")
    for turn in range(args.turns):
        order = list(runs) if turn % 2 else list(reversed(runs))
        for name in order:
            start = time.perf_counter()
            runs[name]()
            taken[name].append(time.perf_counter() - start)
    seconds = {name: round(median(times), 4) for name, times in taken.items()}
    pairs = zip(taken["hf_granikv"], taken["generate"], strict=True)
    ratio = median(ours / stock for ours, stock in pairs)
    print(f"{args.rows} rows of {args.prompt} tokens, {args.tokens} more: {seconds}, {ratio:.3f}x")
    summary = {"bench": "nothing_shared", "seconds": seconds, "ratio": round(ratio, 4)}
    print(json.dumps({**summary, **environment("SmolLM2-135M-Instruct")}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
