"""Three turns of three agents and a stranger over one prefix, on models of every kind."""

import pytest
import torch
from agents import byte_tokenizer
from prompts import PREFIX, prefix_ids, tokens

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.options import EngineOptions

GREEDY = {"max_new_tokens": 4, "eos_token_id": None}
WAYS = [
    (None, GREEDY),
    (3, {**GREEDY, "do_sample": True, "top_k": 5, "repetition_penalty": 1.2}),
    (None, {**GREEDY, "max_new_tokens": 2}),
]
# packed, local layers, latents, no position_ids, other attention, layers with states
MODELS = [
    ("gpt_neox", "granikv"),
    ("gemma3", "granikv"),
    ("gpt_oss", "granikv"),
    ("deepseek_v3", "granikv"),
    ("bloom", "eager"),
    ("llama", "sdpa"),
    ("lfm2", "granikv"),
    ("qwen3_next", "granikv"),
]


def alone(model, ids, seed, options):
    if seed is not None:
        torch.manual_seed(seed)
    inputs = torch.tensor([ids])
    # the ids of an answer may contain the padding id
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), use_cache=False, **options)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_conversations_give_what_each_turn_gives_alone(tiny_model, family, attention):
    model = tiny_model(family, attention)
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids())
    held = [[], [], []]
    with Engine(model, cache, byte_tokenizer(), EngineOptions(max_step_tokens=9)) as engine:
        memories = [engine.memory(prefix) for _ in WAYS]
        for number in range(3):
            asked = []
            for i, (memory, (seed, options)) in enumerate(zip(memories, WAYS, strict=True)):
                ids = [*PREFIX, *held[i], *tokens(3 + 2 * i, seed=10 * number + i)]
                turn = engine.submit(ids, memory=memory, seed=seed, **options)
                asked.append((ids, seed, options, turn))
            stranger = tokens(5, seed=number)
            asked.append((stranger, None, GREEDY, engine.submit(stranger, **GREEDY)))
            replies = [list(turn.result(60).token_ids) for *_, turn in asked]
            for (ids, seed, options, _), given in zip(asked, replies, strict=True):
                assert given == alone(model, ids, seed, options)
            held = [
                [*ids[len(PREFIX) :], *given]
                for (ids, *_), given in zip(asked[:3], replies, strict=False)
            ]
        engine.check_integrity()
    # of what was said before, only the last token of each answer
    assert engine.figures.kept_tokens > 0
    assert all(turn.computed_tokens == 4 + 2 * i for i, (*_, turn) in enumerate(asked[:3]))
