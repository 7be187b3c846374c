"""What `stats()` and `explain()` say, against sums made by hand."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    whole,
)
from transformers import DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache

P = len(PREFIX)
# tiny llama: 2 layers, keys and values, 2 kv heads of 8 numbers, 4 bytes each
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
Build = Callable[..., PreTrainedModel]


def forward(model: PreTrainedModel, cache: Any, ids: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        model(input_ids=torch.as_tensor(ids), **cached(cache), **kwargs)


def test_an_empty_cache_holds_nothing(model: PreTrainedModel) -> None:
    stats = AsymmetricPagedCache(model.config).stats()
    assert (stats.hot_bytes, stats.cold_bytes, stats.peak_bytes) == (0, 0, 0)
    assert (stats.hot_tokens, stats.cold_tokens, stats.prefix_groups) == (0, 0, 0)
    assert (stats.dense_equivalent_bytes, stats.backend_steps) == (0, {})


def test_a_prefix_costs_its_own_bytes_once(model: PreTrainedModel) -> None:
    stats = prefilled(model).stats()
    assert stats.hot_bytes == P * TOKEN_BYTES
    assert (stats.hot_tokens, stats.cold_tokens, stats.cold_bytes) == (P, 0, 0)
    # no row reads it yet
    assert (stats.prefix_groups, stats.dense_equivalent_bytes) == (0, 0)


def test_even_rows_are_counted_token_by_token(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    forward(model, cache, suffixes(4, 4, 4))
    stats = cache.stats()
    assert (stats.hot_bytes, stats.hot_tokens, stats.cold_tokens) == (P * TOKEN_BYTES, P, 12)
    assert stats.dense_equivalent_bytes == 3 * (P + 4) * TOKEN_BYTES
    assert stats.prefix_groups == 1
    # slots for 12 tokens and some room, and the table
    assert 12 * TOKEN_BYTES <= stats.cold_bytes <= (12 + 3 * 16) * TOKEN_BYTES + 1024
    assert stats.peak_bytes == stats.hot_bytes + stats.cold_bytes


def test_pads_and_repeated_prefix_tokens_are_not_counted(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7, 5))), num_new=4, **cached(cache))
    # the last new token of each row is never computed
    assert cache.stats().cold_tokens == 3 + 7 + 5 + 3 * 3
    assert cache.stats().dense_equivalent_bytes == 3 * (P + 7 + 3) * TOKEN_BYTES


def test_a_row_that_is_the_prefix_computes_its_last_token_again(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(0, 4))), num_new=1, **cached(cache))
    # every row then sees one prefix token less, and owns that one
    assert cache.stats().cold_tokens == 1 + (1 + 4)
    assert cache.stats().hot_tokens == P


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_the_dense_equivalent_is_what_the_stock_cache_holds(
    tiny_model: Build, attention: str
) -> None:
    model = tiny_model("llama", attention)
    rows, cache, stock = (
        whole(suffixes(4, 4, 4)),
        prefilled(model),
        DynamicCache(config=model.config),
    )
    new_tokens(model, left_padded(rows), **cached(cache))
    new_tokens(model, left_padded(rows), **cached(stock))
    held = sum(t.nbytes for layer in stock.layers for t in (layer.keys, layer.values))
    assert cache.stats().dense_equivalent_bytes == held


def test_tokens_that_beams_share_are_counted_once(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    forward(model, cache, suffixes(6))
    cache.batch_repeat_interleave(4)
    assert cache.stats().cold_tokens == 6
    forward(model, cache, suffixes(1, 1, 1, 1))
    assert cache.stats().cold_tokens == 6 + 4
    cache.reorder_cache(torch.tensor([2, 2, 0, 0]))
    assert cache.stats().cold_tokens == 6 + 2


LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_row": (1, {}),
    "sixteen_rows": (16, {}),
    "eight_beams": (1, {"num_beams": 8}),
    "six_samples": (1, {"do_sample": True, "num_return_sequences": 6}),
}


@pytest.mark.parametrize("load", LOADS)
def test_bytes_of_the_prefix_do_not_depend_on_its_readers(
    model: PreTrainedModel, load: str
) -> None:
    num_rows, options = LOADS[load]
    cache = prefilled(model)
    new_tokens(
        model, left_padded(whole(suffixes(*[3] * num_rows))), num_new=4, **cached(cache), **options
    )
    forks = [cache.fork() for _ in range(3)]
    assert {c.stats().hot_bytes for c in (cache, *forks)} == {P * TOKEN_BYTES}


def test_the_same_call_five_times_changes_nothing(model: PreTrainedModel) -> None:
    """Tokens, the prefix to the bit and to the address; and after reset no private byte is left."""
    cache, inputs = prefilled(model), left_padded(whole(suffixes(3, 7, 0, 5)))
    tensors = (*cache._state.prefixes.only.keys, *cache._state.prefixes.only.values)

    def seen() -> list[tuple[int, str]]:
        digests = [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in tensors]
        return list(zip([t.data_ptr() for t in tensors], digests, strict=True))

    before, outs, sizes = seen(), [], []
    for _ in range(5):
        outs.append(new_tokens(model, inputs, **cached(cache)))
        sizes.append(
            (cache.stats().cold_bytes, cache.stats().cold_tokens, cache.stats().peak_bytes)
        )
    assert outs == [alone(model, whole(suffixes(3, 7, 0, 5)))] * 5
    assert len(set(sizes)) == 1
    assert seen() == before
    cache.reset()
    assert (cache.stats().cold_bytes, cache.stats().cold_tokens) == (0, 0)
    assert seen() == before
    cache.check_integrity()


def test_the_peak_remembers_the_largest_batch_until_reset(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(*[30] * 8))), num_new=2, **cached(cache))
    peak = cache.stats().peak_bytes
    assert peak >= P * TOKEN_BYTES + 8 * 31 * TOKEN_BYTES
    new_tokens(model, left_padded(whole(suffixes(3))), num_new=2, **cached(cache))
    assert cache.stats().peak_bytes >= peak
    cache.reset()
    assert cache.stats().peak_bytes == P * TOKEN_BYTES


@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_forward_over_the_prefix_is_counted_once(
    model: PreTrainedModel, num_rows: int
) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(*[4] * num_rows))), num_new=6, **cached(cache))
    assert sum(cache.stats().backend_steps.values()) == 6
    forward(model, cache, suffixes(*[2] * num_rows))
    assert sum(cache.stats().backend_steps.values()) == 7


@pytest.mark.parametrize("name", ["cascade", "batched_gemm", "per_row"])
def test_a_forced_backend_is_the_one_that_runs(model: PreTrainedModel, name: str) -> None:
    cache = prefilled(model, dispatch=name)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=4, **cached(cache))
    assert cache.stats().backend_steps == {name: 4}
    report = cache.explain()
    assert re.search(rf"^2 rows over a prefix of 20 tokens, dispatch='{name}'", report)
    assert f"backend {name}: 4 forward passes; last: 2 rows x 1 token over 20" in report
    assert re.search(rf"predicted per layer: .*{name} \d+ us", report)
    assert "dense route" not in report


def test_stats_are_a_snapshot(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    before = cache.stats()
    new_tokens(model, left_padded(whole(suffixes(3))), num_new=2, **cached(cache))
    assert before.backend_steps == {}
    assert before.cold_tokens == 0


def test_the_dense_route_is_told_with_numbers(tiny_model: Build) -> None:
    model = tiny_model("llama", "sdpa")
    cache, inputs = prefilled(model), suffix_only(suffixes(3, 7))
    forward(model, cache, inputs.pop("input_ids"), **inputs)
    report = cache.explain()
    assert (
        "dense route: keys or values of 2 layers were put together 4 times, asked for by" in report
    )
    assert cache.stats().backend_steps == {}


def test_a_cache_that_has_done_nothing_says_so(model: PreTrainedModel) -> None:
    assert AsymmetricPagedCache(model.config).explain().startswith("0 rows over no prefix")
    assert "no forward pass has read a prefix yet" in prefilled(model).explain()


def test_a_fork_starts_counting_anew(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3))), num_new=2, **cached(cache))
    assert cache.fork().stats().backend_steps == {}
    assert sum(cache.stats().backend_steps.values()) == 2


@pytest.mark.parametrize(
    "options",
    [{"dispatch": "fastest"}, {"cold_slots": 0}, {"cold_slots": 2.5}, {"cold_slots": True}],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=rf"{name} (is )?{value!r}"):
        AsymmetricPagedCache(model.config, **options)
