"""Arguments of `generate` that come with a tokenizer, over a prefix in store."""

from typing import Any

import pytest
import torch
from agents import SHARED, byte_tokenizer, llama
from transformers import TextStreamer

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

QUESTIONS = ["When is high water?", "Why is the log kept by him?"]
NUM_NEW = 12


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    made.padding_side = "left"
    return made


@pytest.fixture
def cache(model, tokenizer):
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, tokenizer(SHARED, return_tensors="pt").input_ids)
    return {CACHE_ARGUMENT: cache}


def prompts(tokenizer, questions=QUESTIONS) -> dict[str, Any]:
    texts = [SHARED + question for question in questions]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def stop_string(model, tokenizer) -> str:
    """Something that the first row says on its way."""
    encoded = prompts(tokenizer, QUESTIONS[:1])
    said = model.generate(**encoded, max_new_tokens=4, do_sample=False)[0, -1:]
    return str(tokenizer.decode(said))


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "streamer": {},
}


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_rows_where_stock_ends_them(model, tokenizer, cache, mode) -> None:
    questions = QUESTIONS[:1] if mode == "streamer" else QUESTIONS
    kwargs = {
        **prompts(tokenizer, questions),
        **MODES[mode],
        "max_new_tokens": NUM_NEW,
        "stop_strings": [stop_string(model, tokenizer)],
        "tokenizer": tokenizer,
    }
    if mode == "streamer":
        kwargs["streamer"] = TextStreamer(tokenizer)
    torch.manual_seed(0)
    want = model.generate(**kwargs)
    torch.manual_seed(0)
    got = model.generate(**kwargs, **cache)
    assert torch.equal(got, want)
    without = model.generate(**{**kwargs, "stop_strings": None, "streamer": None})
    assert mode == "sampling" or not torch.equal(want, without), "nothing was stopped"


def test_a_tokenizer_alone_changes_nothing(model, tokenizer, cache) -> None:
    kwargs = {**prompts(tokenizer), "max_new_tokens": NUM_NEW, "do_sample": False}
    assert torch.equal(
        model.generate(**kwargs, **cache, tokenizer=tokenizer), model.generate(**kwargs)
    )


def test_token_healing(model, tokenizer, cache) -> None:
    kwargs = {
        **prompts(tokenizer, ["When is high water?", "Who keeps the tide?"]),
        "max_new_tokens": NUM_NEW,
        "do_sample": False,
        "token_healing": True,
        "tokenizer": tokenizer,
    }
    assert torch.equal(model.generate(**kwargs, **cache), model.generate(**kwargs))


def test_an_assistant_with_a_tokenizer_of_its_own(model, tokenizer, cache) -> None:
    assistant, other = (
        llama(num_hidden_layers=1, vocab_size=261),
        byte_tokenizer(merges=[("i", "s")]),
    )
    kwargs = {
        **prompts(tokenizer, QUESTIONS[:1]),
        "max_new_tokens": NUM_NEW,
        "do_sample": False,
        "assistant_model": assistant,
        "tokenizer": tokenizer,
        "assistant_tokenizer": other,
    }
    assert torch.equal(model.generate(**kwargs, **cache), model.generate(**kwargs))
