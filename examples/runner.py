"""Two turns of three agents over one shared text, and the tokens that were computed for them.

python examples/runner.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_granikv import MultiAgentRunner

DOCUMENT = "The mill turns when the tide turns. Margit was lowered in June, Bruna in August. " * 10


def tiny_model_and_tokenizer() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    vocab = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="granikv",
    )
    return LlamaForCausalLM(config).eval(), tokenizer


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
