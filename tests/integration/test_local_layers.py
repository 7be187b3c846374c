"""Sliding and chunked layers, sinks and soft-capping: by position, on the prefix too."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from families import LOCAL
from hypothesis import given
from hypothesis import strategies as st
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    middle_padded,
    new_tokens,
    prefilled,
    right_padded,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from transformers import DynamicCache, PreTrainedModel, set_seed

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
WINDOW = 8
# soft-capping and sinks are not for SDPA
WITHOUT_SDPA = ("gemma2", "gpt_oss")
CASES = [
    (family, attention)
    for family in LOCAL
    for attention in ("granikv", "sdpa", "eager")
    if attention != "sdpa" or family not in WITHOUT_SDPA
]
ROWS = whole(suffixes(3, 7, 0, 5))
LONG = 30  # new tokens, after which every window has left the prefix


@cache
def expected(family: str) -> list[list[int]]:
    return alone(LOCAL[family].model(attn_implementation="eager"), ROWS, num_new=LONG)


def assert_logits(
    model: PreTrainedModel, got: torch.Tensor, rows: Sequence[Sequence[int]], last: Sequence[int]
) -> None:
    """Compares the last logits of each row with those of the row alone under stock attention."""
    for row, (ids, num) in enumerate(zip(rows, last, strict=True)):
        want = logits_alone(model, ids, num)
        torch.testing.assert_close(got[row, -num:], want, atol=1e-4, rtol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_ragged_batch_gives_each_row_alone(
    tiny_model: Build, family: str, attention: str
) -> None:
    model = tiny_model(family, attention)
    held = prefilled(model)
    for _ in range(2):
        got = new_tokens(model, left_padded(ROWS), num_new=LONG, **cached(held))
        assert got == expected(family)
    held.check_integrity()
    assert ("dense route" in held.explain()) == (attention != "granikv")


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_logits_stay_within_rounding_through_forwards_by_hand(
    tiny_model: Build, family: str, attention: str
) -> None:
    """Several new tokens at once, one at a time, and several again, past the window."""
    model, stock = tiny_model(family, attention), tiny_model(family, "eager")
    held, rows = prefilled(model), suffixes(3, 6)
    with torch.no_grad():
        inputs = suffix_only(rows)
        mask = inputs["attention_mask"]
        got = model(**inputs, **cached(held)).logits
        whole_rows = [PREFIX + row for row in rows]
        assert_logits(stock, got, whole_rows, [len(row) for row in rows])
        for count in (1, 5, 1, 4):
            new = torch.tensor([tokens(count, seed=7 + row) for row in range(2)])
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            got = model(input_ids=new, attention_mask=mask, **cached(held)).logits
            whole_rows = [row + ids.tolist() for row, ids in zip(whole_rows, new, strict=True)]
            assert_logits(stock, got, whole_rows, [count, count])


@pytest.mark.parametrize("prefix_len", [1, 7, 8, 9, 15, 16, 17, 24])
@pytest.mark.parametrize("family", ["mistral", "llama4", "gpt_oss"])
def test_any_length_of_prefix_against_the_window(
    tiny_model: Build, family: str, prefix_len: int
) -> None:
    """Rows that are exactly the prefix among them, alone too: raullenchai/Rapid-MLX #1124, where an
    exact hit on a window that had gone round drifted."""
    model, ids = tiny_model(family), tokens(prefix_len, seed=3)
    held = prefilled(model, ids)
    for lengths in ((0, 1, 9), (0,), (12, 2)):
        rows = whole(suffixes(*lengths), ids)
        assert new_tokens(model, left_padded(rows), **cached(held)) == alone(model, rows)


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@given(
    window=st.integers(1, 12),
    prefix_len=st.integers(1, 30),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 6), max_size=3),
)
def test_any_window_by_position(
    attention: str, window: int, prefix_len: int, lengths: list[int], steps: list[int]
) -> None:
    model = mistral(window, attention)
    ids = tokens(prefix_len, seed=3)
    held, rows = prefilled(model, ids), whole(suffixes(*lengths), ids)
    got = new_tokens(model, left_padded(rows), num_new=3, **cached(held))
    assert got == alone(model, rows, num_new=3)
    # the last token of generate is not in the cache
    rows = [row + new[:-1] for row, new in zip(rows, got, strict=True)]
    with torch.no_grad():
        for count in steps:
            new = torch.tensor([tokens(count, seed=row) for row in range(len(rows))])
            out = model(input_ids=new, **cached(held)).logits
            rows = [row + more.tolist() for row, more in zip(rows, new, strict=True)]
            assert_logits(mistral(window, "eager"), out, rows, [count] * len(rows))


@cache
def mistral(window: int, attention: str) -> PreTrainedModel:
    return LOCAL["mistral"].model(attn_implementation=attention, sliding_window=window)


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True},
    "three_samples_each": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "repetition_penalty": {"repetition_penalty": 1.8},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3n", "gpt_oss", "llama4"])
def test_modes_give_the_tokens_of_no_cache(tiny_model: Build, family: str, mode: str) -> None:
    """Rows of one length: stock transformers counts columns in windows, and so has no right value
    for padded rows to compare with."""
    model, held = tiny_model(family), prefilled(tiny_model(family))
    inputs = left_padded(whole(suffixes(5, 5)))
    set_seed(11)
    want = new_tokens(model, inputs, num_new=15, use_cache=False, **MODES[mode])
    set_seed(11)
    assert new_tokens(model, inputs, num_new=15, **cached(held), **MODES[mode]) == want


@pytest.mark.parametrize("lay_out", [suffix_only, middle_padded])
@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "llama4", "cohere2"])
def test_other_layouts_mean_the_same(
    tiny_model: Build, family: str, attention: str, lay_out: Callable[..., Any]
) -> None:
    model, rows = tiny_model(family, attention), suffixes(3, 7, 5)
    got = new_tokens(model, lay_out(rows), **cached(prefilled(model)))
    assert got == alone(model, whole(rows))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama4"])
def test_prompt_lookup_crops_past_the_window(tiny_model: Build, family: str) -> None:
    model, held = tiny_model(family), prefilled(tiny_model(family))
    row = whole([tokens(3, seed=5) * 4])
    got = new_tokens(
        model, left_padded(row), num_new=20, prompt_lookup_num_tokens=3, **cached(held)
    )
    assert got == alone(model, row, num_new=20)


def test_an_assistant_drafts_past_the_window(tiny_model: Build) -> None:
    model, row = tiny_model("mistral"), whole(suffixes(5))
    held = prefilled(model)
    got = new_tokens(
        model, left_padded(row), num_new=20, assistant_model=mistral(WINDOW, "sdpa"), **cached(held)
    )
    assert got == alone(model, row, num_new=20)


# ---- storage


def test_a_local_layer_keeps_of_the_prefix_what_its_window_can_see(tiny_model: Build) -> None:
    """The window of the prefix's last token, which a row that is exactly the prefix asks again."""
    state = prefilled(tiny_model("gemma2"))._state
    local, full = state.prefixes.only.keys
    assert (local.shape, full.shape) == ((2, WINDOW, 8), (2, 20, 8))
    assert state.prefixes.only.num_bytes == 2 * 4 * 2 * 8 * (WINDOW + 20)
    chunked = prefilled(tiny_model("llama4"))._state.prefixes.only.keys[0]
    assert chunked.shape == (2, 4, 8), "the third chunk of 8 begins at 16"


def test_a_layer_that_reads_another_layers_keys_stores_nothing(tiny_model: Build) -> None:
    held = prefilled(tiny_model("gemma3n"))
    new_tokens(tiny_model("gemma3n"), left_padded(ROWS), **cached(held))
    stored = [keys.numel() > 0 for keys in held._state.prefixes.only.keys]
    assert stored[:2] == [True, True]
    assert not any(stored[2:])
    assert all(held._state.cold.storage(i) is None for i in range(2, len(stored)))


def test_stats_count_what_dynamic_cache_would_hold(tiny_model: Build) -> None:
    model = tiny_model("gemma2")
    held, stock = prefilled(model), DynamicCache(config=model.config)
    inputs = left_padded(whole(suffixes(4, 4)))
    new_tokens(model, inputs, **cached(held))
    new_tokens(model, inputs, **cached(stock))
    layers: list[Any] = stock.layers
    num_bytes = sum(t.numel() * 4 for layer in layers for t in (layer.keys, layer.values))
    assert held.stats().dense_equivalent_bytes == num_bytes


# ---- what cannot be right


def test_a_crop_to_where_the_window_has_forgotten_is_refused(tiny_model: Build) -> None:
    model, held = tiny_model("mistral"), prefilled(tiny_model("mistral"))
    with torch.no_grad():
        model(**suffix_only(suffixes(4)), **cached(held))
    with pytest.raises(ValueError, match=r"after 18 of the 20 tokens .* window of 8"):
        held.crop(-6)
    assert held.get_seq_length() == 24
    held.crop(-5)
    with torch.no_grad():
        got = model(input_ids=torch.tensor([PREFIX[-1:]]), **cached(held)).logits
    assert_logits(tiny_model("mistral", "eager"), got, [PREFIX], [1])


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_pads_that_follow_tokens_are_exact_or_refused(tiny_model: Build, attention: str) -> None:
    model, rows = tiny_model("mistral", attention), suffixes(3, 6)
    held, inputs = prefilled(model), right_padded(rows)
    inputs["attention_mask"] = torch.cat(
        [torch.ones(2, 20, dtype=torch.long), inputs["attention_mask"]], 1
    )
    with torch.no_grad():
        if attention == "sdpa":
            with pytest.raises(ValueError, match="Pad on the left"):
                model(**inputs, **cached(held))
            assert held.get_seq_length() == 20
            return
        got = model(**inputs, **cached(held)).logits
    for row, ids in enumerate(rows):
        want = logits_alone(model, PREFIX + ids, len(ids))
        torch.testing.assert_close(got[row, : len(ids)], want, atol=1e-4, rtol=1e-4)


def test_a_model_with_another_window_is_refused(tiny_model: Build) -> None:
    held = prefilled(tiny_model("mistral"))
    with pytest.raises(ValueError, match=r"layer 0 of .* build the cache from model.config"):
        held.attach(mistral(4, "granikv"))


# ---- other caches under our attention


@pytest.mark.smoke
@pytest.mark.parametrize("family", LOCAL)
def test_stock_caches_and_none_are_exact_under_our_attention(
    tiny_model: Build, family: str
) -> None:
    model, plain = tiny_model(family), tiny_model(family, "eager")
    inputs = left_padded(whole(suffixes(4, 9)))
    want = new_tokens(plain, inputs, num_new=15, use_cache=False)
    assert new_tokens(model, inputs, num_new=15, use_cache=False) == want
    stock = new_tokens(plain, inputs, num_new=15, **cached(DynamicCache(config=plain.config)))
    caches = DynamicCache(config=model.config), AsymmetricPagedCache(model.config)
    for held in caches:
        assert new_tokens(model, inputs, num_new=15, **cached(held)) == stock


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_dropout_beside_sinks_or_soft_capping_is_refused(family: str) -> None:
    model = LOCAL[family].model(attn_implementation="granikv", attention_dropout=0.5).train()
    with pytest.raises(NotImplementedError, match="eager"):
        model(input_ids=torch.tensor([PREFIX]))
