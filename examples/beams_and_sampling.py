"""Beams and samples of one prompt share its prefix: the bytes of the prefix do not grow with them.

python examples/beams_and_sampling.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from _tiny import tiny_model
from transformers import AutoModelForCausalLM

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

WAYS = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "16 beams": {"do_sample": False, "num_beams": 16},
    "8 samples": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
    else:
        model = tiny_model()
    ids = torch.randint(3, 250, (1, 512))
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, ids[:, :-8])

    print(f"{'':10}{'sequences':>10}{'prefix bytes':>14}{'private bytes':>15}{'dense bytes':>14}")
    for name, kwargs in WAYS.items():
        sequences = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            pad_token_id=0,
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )
        stats = cache.stats()
        print(
            f"{name:10}{len(sequences):>10}{stats.hot_bytes:>14,}{stats.cold_bytes:>15,}"
            f"{stats.dense_equivalent_bytes:>14,}"
        )


if __name__ == "__main__":
    main()
