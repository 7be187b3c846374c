"""Without a prefix the cache stands in for `DynamicCache`: same tokens, same logits, same bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import alone, cached, left_padded, new_tokens, suffixes
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, set_seed

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
EVEN, RAGGED = suffixes(12, 12), suffixes(5, 12, 1)


@pytest.fixture(params=["granikv", "eager"])
def model(tiny_model: Build, request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("llama", request.param)


def ours(model: PreTrainedModel) -> AsymmetricPagedCache:
    return AsymmetricPagedCache(model.config)


def stock(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def stock_bytes(cache: DynamicCache) -> int:
    return sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "three_samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "two_of_four_beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "repetition_penalty": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "prompt_in_chunks": {"prefill_chunk_size": 5},
}
ONE_ROW_MODES: dict[str, dict[str, Any]] = {"prompt_lookup": {"prompt_lookup_num_tokens": 3}}


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_the_stock_cache(
    model: PreTrainedModel, mode: str, rows: list[list[int]]
) -> None:
    inputs = left_padded(rows)
    set_seed(5)
    want = new_tokens(model, inputs, **cached(stock(model)), **MODES[mode])
    set_seed(5)
    cache = ours(model)
    assert new_tokens(model, inputs, **cached(cache), **MODES[mode]) == want
    cache.check_integrity()


@pytest.mark.parametrize("mode", ONE_ROW_MODES)
def test_modes_of_one_row_give_the_tokens_of_the_stock_cache(
    model: PreTrainedModel, mode: str
) -> None:
    # repetition gives the lookup something to find
    inputs = left_padded([EVEN[0] * 2])
    want = new_tokens(model, inputs, **cached(stock(model)), **ONE_ROW_MODES[mode])
    assert new_tokens(model, inputs, **cached(ours(model)), **ONE_ROW_MODES[mode]) == want


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "opt", "bloom", "gpt_neo", "falcon", "deepseek_v3"]
)
def test_other_families_give_the_tokens_of_the_stock_cache(tiny_model: Build, family: str) -> None:
    model = tiny_model(family, "eager")
    assert new_tokens(model, left_padded(RAGGED), **cached(ours(model))) == alone(model, RAGGED)


@pytest.mark.parametrize("lengths", [(12, 12), (5, 12, 1)], ids=["even", "ragged"])
def test_calls_that_go_on_give_the_tokens_of_the_stock_cache(
    model: PreTrainedModel, lengths: tuple[int, ...]
) -> None:
    caches, outs = [ours(model), stock(model)], []
    for cache in caches:
        inputs = left_padded(suffixes(*lengths))
        for turn in range(3):
            out = model.generate(**inputs, **cached(cache), max_new_tokens=4, do_sample=False)
            message = torch.tensor(suffixes(*[2] * len(lengths), seed=50 * turn))
            mask = torch.ones(len(lengths), 4 + 2, dtype=torch.int64)
            inputs = {
                "input_ids": torch.cat([out, message], 1),
                "attention_mask": torch.cat([inputs["attention_mask"], mask], 1),
            }
        outs.append(inputs["input_ids"].tolist())
    assert outs[0] == outs[1]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("route", ["model", "base_model", "forward_method"])
def test_nothing_has_to_be_declared(model: PreTrainedModel, route: str) -> None:
    forward = {"model": model, "base_model": model.base_model, "forward_method": model.forward}[
        route
    ]
    first, second = left_padded(RAGGED), torch.tensor(suffixes(2, 2, 2, seed=9))
    mask = torch.cat([first["attention_mask"], torch.ones_like(second)], 1)
    outs = []
    for cache in (ours(model), stock(model)):
        with torch.no_grad():
            forward(**first, **cached(cache))
            outs.append(forward(input_ids=second, attention_mask=mask, **cached(cache))[0])
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)


# ---- the contract, tensor by tensor

VERBS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda c: None,
    "crop": lambda c: c.crop(-3),
    "crop_nothing": lambda c: c.crop(0),
    "crop_all": lambda c: c.crop(-6),
    "reorder": lambda c: c.reorder_cache(torch.tensor([2, 0, 0])),
    "select": lambda c: c.batch_select_indices(torch.tensor([2, 1])),
    "select_by_bools": lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
}


def states(num_rows: int, q_len: int, *, layer_idx: int) -> tuple[Tensor, Tensor]:
    # gpt-like layouts hand over transposed tensors
    keys = torch.randn(num_rows, q_len, 2, 8).transpose(1, 2) + layer_idx
    return keys, torch.randn(num_rows, 2, q_len, 5)


@pytest.mark.parametrize("q_len", [1, 4, 40], ids=lambda n: f"then_{n}")
@pytest.mark.parametrize("verb", VERBS)
def test_updates_return_what_the_stock_cache_returns(
    tiny_model: Build, verb: str, q_len: int
) -> None:
    caches = [ours(tiny_model("llama")), stock(tiny_model("llama"))]
    for num_new in (6, q_len, 1, 1):
        num_rows = max(3, caches[0].batch_size) if num_new == 6 else caches[0].batch_size
        for layer_idx in range(2):
            new = states(num_rows, num_new, layer_idx=layer_idx)
            sizes = [cache.get_mask_sizes(num_new, layer_idx) for cache in caches]
            got, want = (cache.update(*new, layer_idx) for cache in caches)
            assert sizes[0] == sizes[1]
            assert all(map(torch.equal, got, want))
            assert not any(t.requires_grad for t in got)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
        if num_new == 6:
            for cache in caches:
                VERBS[verb](cache)
            assert caches[0].batch_size == caches[1].layers[0].keys.shape[0]
    caches[0].check_integrity()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes_may_change_between_steps(
    tiny_model: Build, mode: Callable[[], Any]
) -> None:
    model, caches = tiny_model("llama"), [ours(tiny_model("llama")), stock(tiny_model("llama"))]
    outs: list[list[Tensor]] = [[], []]
    for cache, out in zip(caches, outs, strict=True):
        ids = torch.tensor(suffixes(3, 3))
        with torch.inference_mode():
            out.append(model(input_ids=ids, **cached(cache)).logits)
        for later in (mode, torch.no_grad, mode, torch.enable_grad):
            with later():
                out.append(model(input_ids=ids[:, :1], **cached(cache)).logits.detach())
    torch.testing.assert_close(torch.cat(outs[0], 1), torch.cat(outs[1], 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_it_holds_no_more_than_the_stock_cache(tiny_model: Build, num_rows: int) -> None:
    """1,000 tokens per row, written one by one after a prompt of 100."""
    caches = [ours(tiny_model("llama")), stock(tiny_model("llama"))]
    for num_new in (100, *[1] * 900):
        for layer_idx in range(2):
            new = states(num_rows, num_new, layer_idx=layer_idx)
            for cache in caches:
                cache.update(*new, layer_idx)
    stats, held = caches[0].stats(), stock_bytes(caches[1])
    assert stats.dense_equivalent_bytes == held
    # at most 1 % of room to grow, and per token one number of the table
    assert stats.cold_bytes <= held * 1.01 + 9 * stats.cold_tokens
    assert stats.cold_tokens == num_rows * 1000


def test_reset_gives_everything_back(model: PreTrainedModel) -> None:
    cache = ours(model)
    want = new_tokens(model, left_padded(RAGGED), **cached(cache))
    cache.reset()
    assert (cache.stats().cold_bytes, cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
    assert new_tokens(model, left_padded(RAGGED), **cached(cache)) == want


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_are_not_those_held_are_refused(model: PreTrainedModel, num_rows: int) -> None:
    cache = ours(model)
    model(input_ids=torch.tensor(EVEN), **cached(cache))
    before = cache.stats()
    with pytest.raises(ValueError, match=f"has {num_rows} rows?, the cache holds 2"):
        model(input_ids=torch.tensor(suffixes(*[1] * num_rows)), **cached(cache))
    assert cache.stats() == before


@pytest.mark.parametrize("other", ["heads", "width", "dtype"])
def test_states_of_another_kind_are_refused(tiny_model: Build, other: str) -> None:
    cache = ours(tiny_model("llama"))
    for layer_idx in range(2):
        cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), layer_idx)
    heads, width = (4 if other == "heads" else 2), (6 if other == "width" else 8)
    states = torch.randn(1, heads, 1, width)
    states = states.bfloat16() if other == "dtype" else states
    before = cache.stats(), cache.get_seq_length()
    with pytest.raises(ValueError, match="layer 0 brings keys of"):
        cache.update(states, states, 0)
    assert (cache.stats(), cache.get_seq_length()) == before
