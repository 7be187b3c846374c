"""What was reported of prompts of ordinary size, on a trained model, whose pad and end are one id."""

import copy
from typing import Any

import pytest
import torch
from prompts import cached, left_padded, prefilled
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
TEXT = (
    "The pump house of Vaskelo keeps a log. On odd days Ilmari writes down the level of the lake, "
    "on even days Saara does, and on the last of a month they both sign. In 2016 the dam Margit was "
    "lowered, in 2018 the dam Bruna. Nobody has lowered the third one, which is the oldest. "
)
QUESTIONS = (
    "\nQuestion: Which dam was lowered last, and when?\nAnswer:",
    "\nQuestion: Who writes on even days?\nAnswer:",
)


@pytest.fixture(scope="module")
def model(real_model_folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        real_model_folder, dtype=torch.float32, attn_implementation="granikv"
    ).eval()


@pytest.fixture(scope="module")
def questions(real_model_folder: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    return [tokenizer(text)["input_ids"] for text in QUESTIONS]


@pytest.fixture(scope="module")
def text(real_model_folder: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(real_model_folder)(TEXT * 27)["input_ids"]
    assert len(ids) >= 2000
    return ids


def answered(
    model: PreTrainedModel,
    rows: list[list[int]],
    cache: Any = None,
    *,
    stock: DynamicCache | None = None,
    **options: Any,
) -> list[list[int]]:
    """Gives the new tokens of each row; without a cache of ours, those of the stock one."""
    inputs, held = left_padded(rows), cache or stock or DynamicCache(config=model.config)
    model.set_attn_implementation("granikv" if cache else "sdpa")
    out = model.generate(
        **inputs,
        **{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 2, **options},
        **cached(held),
    )
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def test_an_answer_leaves_before_the_next_question(
    model: PreTrainedModel, text: list[int], questions: list[list[int]]
) -> None:
    """Questions A, B, A: NVIDIA/kvpress #154."""
    text = text[:500]
    held, rows = prefilled(model, text), [[*text, *question] for question in questions]
    got = [answered(model, [row], held)[0] for row in (*rows, rows[0])]
    one, other = (answered(model, [row])[0] for row in rows)
    assert got == [one, other, one]
    assert one != other


def test_beams_are_those_of_the_stock_cache(
    model: PreTrainedModel, text: list[int], questions: list[list[int]]
) -> None:
    """huggingface/transformers #39682: two ragged requests, three beams each."""
    text = text[:500]
    held, rows = prefilled(model, text), [[*text, *question] for question in questions]
    options = {"num_beams": 3, "num_return_sequences": 2}
    want = [new for row in rows for new in answered(model, [row], **options)]
    got = answered(model, rows, held, **options)
    # a beam that has ended is filled up
    assert [[t for t in new if t != 2] for new in got] == [
        [t for t in new if t != 2] for new in want
    ]
    assert held.stats().hot_tokens == 500


def test_copies_over_a_long_prefix_are_one_answer(
    model: PreTrainedModel, text: list[int], questions: list[list[int]]
) -> None:
    """32 of one request and 18 of another over 2,000 tokens: vllm-project/vllm #22103."""
    text = text[:2000]
    held, rows = prefilled(model, text), [[*text, *question] for question in questions]
    got = answered(model, [rows[0]] * 32 + [rows[1]] * 18, held, max_new_tokens=5)
    stock = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(torch.tensor([text]), **cached(stock), logits_to_keep=1)
    one, other = (
        answered(model, [row], stock=copy.deepcopy(stock), max_new_tokens=5)[0] for row in rows
    )
    assert got == [one] * 32 + [other] * 18
