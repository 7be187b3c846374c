"""What a decode step spends in Python of ours: in each layer, and once per step.

    python benchmarks/python_cost.py --rows 1 --prefix 128

Kernels are taken off: the compiled passes, torch's fused attention, and its copies of the new tokens
to the pool, where these serve. The second column is a model with the same heads and next to no
weights: what the same code takes while it stays in the cores' caches. In the first one the weights
of a layer drive it out before the next.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hf_granikv
from hf_granikv import attention, step_attention
from hf_granikv.attention import ATTENTION_NAME
from hf_granikv.bench.rows import environment
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.demo_model import obtain_model
from hf_granikv.kernels import compiled, cpu
from hf_granikv.layer import AsymmetricPagedLayer
from hf_granikv.pools.cold_write import Places
from hf_granikv.state import CacheState

KERNELS, COPIES = "kernels", "copies"
# `begin_step` is in the first update, `prepare` in the first attention
OF_LAYERS = ("update", "attention", KERNELS, COPIES)
OF_STEPS = ("announce", "settle", "begin_step", "prepare")

Seconds = dict[str, float]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    spent: Seconds = defaultdict(float)
    watch(spent)
    model = AutoModelForCausalLM.from_pretrained(
        obtain_model(print), dtype=dtype, attn_implementation=ATTENTION_NAME
    ).eval()
    columns = {
        name: medians(each, args.rows, args.prefix, args.steps, spent)
        for name, each in {"in the model": model, "in caches": thin(model)}.items()
    }
    print(f"{args.rows} x {args.prefix}, {args.dtype}, microseconds; medians of {args.steps} steps")
    print(f"{'':<24}{''.join(f'{name:>14}' for name in columns)}")
    for what, names in {"per layer": (*OF_LAYERS, "Python"), "per step": OF_STEPS}.items():
        for name in names:
            numbers = "".join(f"{column[name]:>14.0f}" for column in columns.values())
            print(f"{what}, {name:<13}{numbers}")
    rounded = {
        name: {key: round(us, 1) for key, us in column.items()} for name, column in columns.items()
    }
    print(json.dumps({"bench": "python_cost", **rounded, **environment("SmolLM2-135M-Instruct")}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def watch(spent: Seconds) -> None:
    """Adds up the time that is spent in what is reported, by its name."""
    for name, owner in {
        "update": AsymmetricPagedLayer,
        "announce": AsymmetricPagedCache,
        "settle": AsymmetricPagedCache,
        "begin_step": CacheState,
        "prepare": step_attention,
    }.items():
        setattr(owner, name, timed(getattr(owner, name), spent, name))
    compiled.run = timed(compiled.run, spent, KERNELS)
    cpu.flash_attention = timed(cpu.flash_attention, spent, KERNELS)
    Places.put = timed(Places.put, spent, COPIES)
    AttentionInterface.register(
        ATTENTION_NAME, timed(attention.granikv_attention, spent, "attention")
    )


def timed(function: Callable[..., Any], spent: Seconds, name: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent[name] += time.perf_counter() - start
        return result

    return run


def thin(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the heads of another, and hidden states of one number per head."""
    like: Any = model.config
    config = LlamaConfig(
        hidden_size=like.num_attention_heads,
        intermediate_size=8,
        vocab_size=64,
        num_hidden_layers=like.num_hidden_layers,
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.num_key_value_heads,
        head_dim=like.head_dim,
    )
    made: PreTrainedModel = LlamaForCausalLM._from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=model.dtype
    )
    return made.eval()


@torch.no_grad()
def medians(
    model: PreTrainedModel, num_rows: int, prefix_len: int, num_steps: int, spent: Seconds
) -> Seconds:
    """Microseconds per layer and per step; the first steps compile and are left out."""
    config: Any = model.config
    torch.manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randint(2, config.vocab_size, size)

    cache = hf_granikv.AsymmetricPagedCache(config)
    cache.prefill(model, draw(1, prefix_len))
    mask, taken = torch.ones(num_rows, prefix_len, dtype=torch.int64), defaultdict(list)
    for step in range(-5, num_steps):
        ids = draw(num_rows, 64 if step == -5 else 1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        spent.clear()
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        if step < 0:
            continue
        for name in (*OF_LAYERS, *OF_STEPS):
            per = config.num_hidden_layers if name in OF_LAYERS else 1
            taken[name].append(1e6 * spent[name] / per)
        update, attend, kernels, copies = (taken[name][-1] for name in OF_LAYERS)
        taken["Python"].append(update + attend - kernels - copies)
    return {name: median(times) for name, times in taken.items()}


if __name__ == "__main__":
    main()
