"""One of two processes that share a tiny llama: run by `integration/test_tensor_parallel.py`.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/two_ranks.py <folder>
"""

import sys

import torch
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    suffixes,
    whole,
)
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig


def main() -> None:
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    for attention in ("granikv", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation=attention,
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_plan="auto"),
        )
        check(model, plain)
    torch.distributed.destroy_process_group()


def check(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    held, rows = prefilled(model), whole(suffixes(3, 7, 0, 5))
    shapes = {tuple(keys.shape) for keys in held._state.prefixes.only.keys}
    assert shapes == {(1, len(PREFIX), 8)}, f"a rank holds its heads only, not {shapes}"
    for _ in range(2):
        assert new_tokens(model, left_padded(rows), **cached(held)) == alone(plain, rows)
    want = new_tokens(plain, left_padded(rows[:2]), num_beams=2, use_cache=False)
    assert new_tokens(model, left_padded(rows[:2]), num_beams=2, **cached(held)) == want
    held.check_integrity()


if __name__ == "__main__":
    main()
