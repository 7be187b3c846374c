"""An agent that joins while others are being answered: how long each waits for its tokens.

python examples/living_batch.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse
from itertools import pairwise
from time import perf_counter

import torch
from _tiny import tiny_model_and_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import MultiAgentRunner

DOCUMENT = "The mill turns when the tide turns. Margit was lowered in June, Bruna in August. " * 10
LETTER = "I write to you about the sluice, which has not been mended since the spring. " * 6


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
    with MultiAgentRunner(model, tokenizer, max_step_tokens=64) as runner:
        prefix = runner.share(DOCUMENT)
        for name in ("historian", "engineer", "newcomer"):
            runner.agent(name, prefix, max_new_tokens=40, do_sample=True, seed=7)
        early = [runner.submit(name, "What turns?") for name in ("historian", "engineer")]
        came_s: list[float] = []
        early[0].listen(lambda: came_s.append(perf_counter()))
        next(iter(early[0]))
        late = runner.submit("newcomer", LETTER, max_new_tokens=8)
        for turn in (*early, late):
            print(f"{turn.name}: {turn.result().text[:40]!r}")
        gaps_ms = sorted(1000 * (after - before) for before, after in pairwise(came_s))
        waited = f"{gaps_ms[20]:.1f} ms for a token, at most {gaps_ms[-1]:.1f} ms"
        print(f"historian: {waited}; the newcomer's {late.computed_tokens} tokens came meanwhile")


if __name__ == "__main__":
    main()
