"""A byte tokenizer, chat templates, and a runner with three agents over one text."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_granikv.multi_agent import MultiAgentRunner

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ '<bos>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] | trim + '<eos>' }}{% endfor %}"
)
# puts a system message into the last user message, so it is at the head of the first turn only
LAST_USER_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] + ' ' %}{% elif loop.last and m['role'] == 'user' %}"
    "{{ '[user]' + ns.system + m['content'] }}{% else %}{{ '[' + m['role'] + ']' + m['content'] }}"
    "{% endif %}{% endfor %}"
)
SHARED = "The tide table of Vaskelo, in four parts. "
MESSAGES = {"ann": "When is high water?", "bo": "Why?", "cy": "Who keeps the log of the pumps?"}


def byte_tokenizer(chat_template=None, pad_token="<pad>", merges=()):
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>"]
    vocab = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = chat_template
    return fast


def llama(attention="granikv", **options):
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": attention,
    }
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **options})).eval()


def new_runner(model, tokenizer, **kwargs):
    runner = MultiAgentRunner(model, tokenizer, **kwargs)
    prefix = runner.share(SHARED)
    for name in MESSAGES:
        runner.agent(name, prefix)
    return runner
