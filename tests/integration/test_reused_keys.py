"""Layers that read another layer's keys: Gemma 3n's and 4's last ones.

From 5.24 on, Gemma 4 hands these layers only the queries that logits are asked of.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from families import LOCAL, VOCAB_SIZE, Family
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache

_PAIRS = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
FAMILIES = {
    "gemma3n": LOCAL["gemma3n"],
    "gemma4": Family("Gemma4TextConfig", {**_PAIRS, "global_head_dim": 16}),
}
ATTENTIONS = ("granikv", "sdpa", "eager")
RAGGED, EVEN = (3, 7, 0, 5), (5, 5)
# prompt lookup finds something to propose in it, in its first forward already
REPEATING = [*tokens(3, seed=9) * 6, *tokens(2, seed=59), *tokens(3, seed=9)]
LOOKUP = {"prompt_lookup_num_tokens": 4, "num_new": 12}

every_case = pytest.mark.parametrize("attention", ATTENTIONS)
every_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def built(family: str, attention: str) -> PreTrainedModel:
    return FAMILIES[family].model(attn_implementation=attention)


@cache
def expected(family: str, lengths: tuple[int, ...]) -> list[list[int]]:
    return alone(built(family, "eager"), whole(suffixes(*lengths)))


@pytest.mark.smoke
@every_case
@every_family
@pytest.mark.parametrize("lengths", [RAGGED, EVEN], ids=["ragged", "even"])
def test_rows_get_the_tokens_they_have_alone(
    family: str, attention: str, lengths: tuple[int, ...]
) -> None:
    model, rows = built(family, attention), suffixes(*lengths)
    held = prefilled(model)
    assert new_tokens(model, left_padded(whole(rows)), **cached(held)) == expected(family, lengths)
    assert new_tokens(model, suffix_only(rows), **cached(held)) == expected(family, lengths)
    held.check_integrity()


@pytest.mark.smoke
@every_case
@every_family
@pytest.mark.parametrize("kept", [0, 1, 3], ids=lambda n: f"logits_of_{n or 'all'}")
def test_logits_stay_within_rounding_whatever_is_kept_of_them(
    family: str, attention: str, kept: int
) -> None:
    """Several padded tokens at once, then one, then several: cf. ml-explore/mlx-lm #1702 and
    google/gemma.cpp #1012, where such layers read another length than was written."""
    model, stock = built(family, attention), built(family, "eager")
    held, first, rows = prefilled(model), suffix_only(suffixes(3, 6)), whole(suffixes(3, 6))
    mask, ids = first["attention_mask"], first["input_ids"]
    for count in (6, 1, 4):
        if count < 6:
            ids = torch.tensor([tokens(count, seed=7 + row) for row in range(2)])
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            rows = [row + new for row, new in zip(rows, ids.tolist(), strict=True)]
        with torch.no_grad():
            got = model(
                input_ids=ids, attention_mask=mask, logits_to_keep=kept, **cached(held)
            ).logits
        for row, whole_row in enumerate(rows):
            num = min(3 if count == 6 and row == 0 else count, kept or count)
            want = logits_alone(stock, whole_row, num)
            torch.testing.assert_close(got[row, -num:], want, atol=1e-4, rtol=1e-4)


@every_case
@every_family
@pytest.mark.parametrize("prefix_len", [1, 5, 20])
def test_candidates_are_judged_right(family: str, attention: str, prefix_len: int) -> None:
    model, rows = built(family, attention), [REPEATING]
    held = prefilled(model, REPEATING[:prefix_len])
    got = new_tokens(model, left_padded(rows), **LOOKUP, **cached(held))
    assert got == alone(built(family, "eager"), rows, num_new=12)


@every_family
def test_the_layers_that_read_elsewhere_hold_nothing(family: str) -> None:
    model = built(family, "granikv")
    held, stock = prefilled(model), DynamicCache(config=model.config)
    inputs = left_padded(whole(suffixes(*EVEN)))
    new_tokens(model, inputs, **cached(held))
    new_tokens(model, inputs, **cached(stock))
    assert [keys.numel() > 0 for keys in held._state.prefixes.only.keys[:2]] == [True, True]
    assert not any(keys.numel() for keys in held._state.prefixes.only.keys[2:])
    layers: list[Any] = stock.layers[:2]
    num_bytes = sum(t.nbytes for layer in layers for t in (layer.keys, layer.values))
    assert held.stats().dense_equivalent_bytes == num_bytes


def test_every_step_after_the_prompt_takes_the_shared_path() -> None:
    model = built("gemma4", "granikv")
    held = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(*RAGGED))), **cached(held))
    assert sum(held.stats().backend_steps.values()) == 10
    report = held.explain()
    # at most the two reused pairs of keys and values, in the forward that reads the prompts
    assert "dense route" not in report or "were put together 4 times" in report


def queries_of_last_layer(model: PreTrainedModel) -> list[int]:
    seen: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    model.model.layers[-1].register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.fixture
def cut_queries() -> None:
    model = FAMILIES["gemma4"].model(attn_implementation="granikv")
    seen = queries_of_last_layer(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([PREFIX]), use_cache=False, logits_to_keep=3)
    if seen != [3]:
        pytest.skip("this transformers version hands every layer all queries")


CACHES: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "none": lambda model: {"use_cache": False},
    "dynamic": lambda model: cached(DynamicCache(config=model.config)),
    "ours": lambda model: cached(AsymmetricPagedCache(model.config)),
}


@pytest.mark.usefixtures("cut_queries")
@pytest.mark.parametrize("name", CACHES)
def test_the_last_queries_of_a_prompt_see_all_before_them_without_a_prefix(name: str) -> None:
    """An attention that loses a mask on the way is silently wrong: huggingface/transformers
    #46132. Stock SDPA is kept from it by its name, in transformers' own code."""
    model, ids = built("gemma4", "granikv"), PREFIX
    with torch.no_grad():
        got = model(input_ids=torch.tensor([ids]), logits_to_keep=3, **CACHES[name](model)).logits
    want = logits_alone(built("gemma4", "eager"), ids, 3)
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("cut_queries")
@pytest.mark.parametrize("kept", [1, 3])
def test_the_last_queries_over_a_prefix_that_was_cropped_away(kept: int) -> None:
    model, ids = built("gemma4", "granikv"), tokens(9, seed=4)
    held = prefilled(model, PREFIX[:5])
    held.crop(-5)
    with torch.no_grad():
        got = model(input_ids=torch.tensor([ids]), logits_to_keep=kept, **cached(held)).logits[0]
    want = logits_alone(built("gemma4", "eager"), ids, kept)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
