"""Plain `generate` over one shared prefix, and the bytes it holds beside a `DynamicCache`.

python examples/shared_prefix.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from _tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

DOCUMENT = "The mill turns when the tide turns. " * 40
QUESTIONS = ["Who turns the mill?", "When?", "And what does the tide do at night?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    arguments = parser.parse_args()

    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
        document = tokenizer(DOCUMENT)["input_ids"]
        questions = [tokenizer(q, add_special_tokens=False)["input_ids"] for q in QUESTIONS]
    else:
        model = tiny_model()
        document, *questions = [list(text.encode()) for text in (DOCUMENT, *QUESTIONS)]

    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, torch.tensor([document]))

    # whole prompts, padded on the left as usual
    prompts = [document + question for question in questions]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    model.generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
        **{CACHE_ARGUMENT: cache},
    )
    stats = cache.stats()
    print(f"{len(prompts)} rows over a prefix of {prefix.num_tokens} tokens")
    print(f"held: {stats.hot_bytes + stats.cold_bytes:,} bytes")
    print(f"a DynamicCache would hold: {stats.dense_equivalent_bytes:,} bytes")


if __name__ == "__main__":
    main()
