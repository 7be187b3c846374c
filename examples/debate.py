"""A debate over one document: in every round each agent hears what the others said, and answers.

python examples/debate.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from _tiny import tiny_model_and_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import MultiAgentRunner

DOCUMENT = (
    "Minutes of the mill council. The sluice leaks, and mending it costs 900 crowns. The old wheel turns "
    "six hours a day, a new one would turn ten and costs 2,400. There are 2,600 crowns in the chest. "
    "The ferry may be let to Bruna for 300 a year. In a dry summer the mill stands still for two months. "
)
MOTION = "Shall the council buy the new wheel this year? Argue in two sentences."
SPEAKERS = {
    "miller": "You are the miller, and speak for the new wheel. ",
    "treasurer": "You keep the chest, and speak against spending it. ",
    "engineer": "You look after the sluice, and speak for mending it first. ",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
    else:
        model, tokenizer = tiny_model_and_tokenizer()

    told = kept = 0
    with MultiAgentRunner(model, tokenizer) as runner:
        document = runner.share(DOCUMENT * 3)
        for seed, (name, role) in enumerate(SPEAKERS.items()):
            runner.agent(name, document, role, max_new_tokens=48, do_sample=True, seed=seed)
        messages = dict.fromkeys(SPEAKERS, MOTION)
        for round_number in range(1, arguments.rounds + 1):
            said = {name: reply.text.strip() for name, reply in runner.run(messages).items()}
            print(f"round {round_number}")
            for name, text in said.items():
                print(f"  {name}: {text!r}")
            messages = {
                name: "".join(
                    f"The {other} said: {said[other]}\n" for other in said if other != name
                )
                + "Answer them in two sentences."
                for name in said
            }
            told += len(said) * document.num_tokens + runner.report().suffix_tokens
            kept += runner.report().kept_tokens
    computed = told - kept - (arguments.rounds * len(SPEAKERS) - 1) * document.num_tokens
    print(f"prompts of {told} tokens in all, {computed} of them computed; held before: {kept}")


if __name__ == "__main__":
    main()
