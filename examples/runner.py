"""Two turns of three agents over one shared text, and the tokens that were computed for them.

python examples/runner.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from _tiny import tiny_model_and_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import MultiAgentRunner

DOCUMENT = "The mill turns when the tide turns. Margit was lowered in June, Bruna in August. " * 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    arguments = parser.parse_args()

    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
    else:
        model, tokenizer = tiny_model_and_tokenizer()

    runner = MultiAgentRunner(model, tokenizer)
    prefix = runner.share(DOCUMENT)
    for name in ("historian", "engineer", "sceptic"):
        runner.agent(name, prefix, f"You are the {name}. ")
    for question in ("What was lowered in June?", "And in August?"):
        replies = runner.run(dict.fromkeys(runner.agents, question), max_new_tokens=24)
        for name, reply in replies.items():
            print(f"{name}: {reply.text!r}")
        print(f"{runner.report()}\n")


if __name__ == "__main__":
    main()
