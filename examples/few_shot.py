"""Few-shot evaluation: tasks of different length in one batch, each task's examples computed once.

python examples/few_shot.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse

import torch
from _tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

TASKS = {
    "add": [("2+3", "5"), ("7+1", "8"), ("4+4", "8"), ("1+6", "7"), ("5+3", "8")],
    "last letter": [("mill", "l"), ("tide", "e"), ("harbour", "r"), ("lamp", "p")],
}
QUESTIONS = {"add": ["1+1", "6+3", "2+5"], "last letter": ["pier", "cable"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    arguments = parser.parse_args()
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation="granikv"
        )
        encode, decode = tokenizer.encode, tokenizer.decode
    else:
        model, encode = tiny_model(), lambda text: list(text.encode())
        decode = lambda ids: bytes(ids.tolist()).decode(errors="replace")  # noqa: E731

    cache, names, prompts = AsymmetricPagedCache(model.config), [], []
    for task, shots in TASKS.items():
        examples = encode(f"{task}\n" + "".join(f"{q} -> {a}\n" for q, a in shots))
        prefix = cache.prefill(model, torch.tensor([examples]))
        print(f"{task}: {len(shots)} examples, {prefix.num_tokens} tokens, computed once")
        prompts += [examples + encode(f"{question} ->") for question in QUESTIONS[task]]
        names += [f"{task} {question}" for question in QUESTIONS[task]]

    # whole prompts of both tasks, padded on the left as usual
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    out = model.generate(
        **inputs, **{CACHE_ARGUMENT: cache.bind(**inputs)}, max_new_tokens=4, do_sample=False
    )
    for name, answer in zip(names, out[:, width:], strict=True):
        print(f"{name} -> {decode(answer)!r}")
    print(cache.explain().splitlines()[0])


if __name__ == "__main__":
    main()
