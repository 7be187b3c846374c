"""GRPO-style rollouts: G completions for each of P prompts, every prompt computed and kept once.

python examples/grpo.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse
import logging
import sys

import torch
from _tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_granikv

SYSTEM = "Think step by step, and end with the answer alone on the last line. " * 4
PROMPTS = [
    "A tide turns every six hours and twelve minutes. How often in a week?",
    "The mill turns at 3.1 metres per second. How far in an hour?",
]
GROUP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("hf_granikv").setLevel(logging.INFO)

    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
        encode = AutoTokenizer.from_pretrained(arguments.model).encode
    else:
        model, encode = tiny_model(), lambda text: list(text.encode())
    prompts = [encode(SYSTEM + prompt) for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        custom_generate=hf_granikv.generate,
        min_shared_tokens=16,  # leave it out to share where the cost model predicts a gain
        num_return_sequences=GROUP,
        do_sample=True,
        max_new_tokens=24,
        pad_token_id=0,
    )
    groups = out[:, width:].unflatten(0, (len(PROMPTS), GROUP))
    rewards = (groups % 7 == 0).float().mean(-1)  # yours: [prompts, completions]
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    print(f"advantages of {tuple(advantages.shape)} completions: {advantages.numpy().round(2)}")


if __name__ == "__main__":
    main()
