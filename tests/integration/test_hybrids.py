"""Hybrids over one stored prefix: what uncached generation of each row alone gives."""

import copy
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from families import HYBRIDS
from prompts import (
    PREFIX,
    alone,
    as_generate,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    prefix_ids,
    suffix_only,
    suffixes,
    whole,
)
from transformers import DynamicCache, PreTrainedModel, set_seed

from hf_granikv import AsymmetricPagedCache
from hf_granikv.hybrids import EXACT_HYBRIDS

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]
# recurrent and convolution, convolution alone, mixed layers, a group of mixed layers with one weight
KINDS = ("qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "zamba2")
SMOKE = [pytest.param(name, marks=pytest.mark.smoke) for name in KINDS]
ATTENTIONS = ("granikv", "sdpa", "eager")
OTHERS = sorted(set(HYBRIDS) - set(KINDS))
every_family = pytest.mark.parametrize("family", [*SMOKE, *OTHERS])
each_kind = pytest.mark.parametrize("family", KINDS)


@pytest.fixture
def model(tiny_model: Build, family: str) -> PreTrainedModel:
    return tiny_model(family)


def stored(cache: AsymmetricPagedCache) -> list[tuple[int, str]]:
    """Gives address and content of everything that is stored of the prefix."""
    prefix = cache._state.prefixes.only
    assert prefix is not None
    assert prefix.states
    return [
        (t.data_ptr(), hashlib.sha256(t.numpy().tobytes()).hexdigest()) for t in prefix.tensors()
    ]


def seeded(model: PreTrainedModel, rows: list[list[int]], **kwargs: Any) -> list[list[int]]:
    set_seed(11)
    return new_tokens(model, left_padded(rows), **kwargs)


def test_every_family_that_is_served_is_tested() -> None:
    configs = {name: family.config() for name, family in HYBRIDS.items()}
    assert {config.model_type for config in configs.values()} == set(EXACT_HYBRIDS)
    assert list(configs) == [config.model_type for config in configs.values()]


# ---- tokens


@cache
def one_alone(family: str, row: tuple[int, ...]) -> list[int]:
    """Gives the tokens of a row by itself without a cache, once for all attentions."""
    return alone(HYBRIDS[family].model(attn_implementation="sdpa"), [row])[0]


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *(pytest.param(f, a, marks=pytest.mark.smoke) for f in KINDS for a in ATTENTIONS),
        *((family, "granikv") for family in OTHERS),
    ],
)
def test_one_prefix_serves_batch_after_batch(
    tiny_model: Build, family: str, attention: str
) -> None:
    """Of one row, three rows and five; of the prefix itself; and again.

    huggingface/transformers #45513: several tokens after a cached state lost that state.
    """
    model = tiny_model(family, attention)
    cache = prefilled(model)
    before = stored(cache)
    batches = [suffixes(*lengths) for lengths in ((3,), (5, 5, 5), (0, 0), (1,) * 4, (5, 5, 5))]
    for batch in batches:
        rows = whole(batch)
        got = seeded(model, rows, **cached(cache))
        assert got == [one_alone(family, tuple(row)) for row in rows]
        cache.check_integrity()
    assert stored(cache) == before


@every_family
def test_logits_stay_within_rounding_of_each_row_alone(model: PreTrainedModel, family: str) -> None:
    rows, held = suffixes(6, 6, 6), prefilled(model)
    with torch.no_grad():
        got = model(**suffix_only(rows), **cached(held)).logits
    for row, ids in enumerate(rows):
        want = logits_alone(model, PREFIX + ids, len(ids))
        torch.testing.assert_close(got[row, -len(ids) :], want, atol=1e-4, rtol=1e-4)


@each_kind
def test_suffixes_alone_are_taken_under_a_mask_over_everything(
    model: PreTrainedModel, family: str
) -> None:
    rows, held = suffixes(4, 4), prefilled(model)
    for _ in range(2):
        assert new_tokens(model, suffix_only(rows), **cached(held)) == alone(model, whole(rows))


@each_kind
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_prefix_is_served_with_and_without_a_suffix(
    model: PreTrainedModel, family: str, length: int
) -> None:
    held = prefilled(model, PREFIX[:length])
    for batch in (suffixes(0, 0), suffixes(2, 2)):
        rows = whole(batch, PREFIX[:length])
        assert seeded(model, rows, **cached(held)) == alone(model, rows)


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_around_equal_rows_do_not_matter(
    model: PreTrainedModel, family: str, side: str
) -> None:
    rows = whole(suffixes(3, 3))
    inputs = left_padded(rows, extra=2)
    if side == "right":
        inputs = {name: t.roll(-2, dims=1) for name, t in inputs.items()}
    assert new_tokens(model, inputs, **cached(prefilled(model))) == alone(model, rows)


def test_a_prefix_is_read_as_the_stock_cache_reads_a_prompt() -> None:
    """Zamba2 clamps the time steps of several tokens, and not those of one.

    With its ordinary limits a prefix that ended in a step of one token would not be what the stock
    cache holds of the same prompt, nor would a repeated last token.
    """
    model = HYBRIDS["zamba2"].model(attn_implementation="granikv", time_step_min=1.0)
    for batch, last in ((suffixes(4, 4), [[5], [6]]), ([[], []], [[5], [6]])):
        stock = DynamicCache(config=model.config)
        held = prefilled(model)
        with torch.no_grad():
            first = model(torch.tensor(whole(batch)), **cached(stock)).logits[:, -1:]
            want = torch.cat([first, model(torch.tensor(last), **cached(stock)).logits], 1)
            positions = torch.arange(P + len(batch[0])).expand(2, -1)
            ids = torch.tensor(whole(batch))
            with as_generate(held):
                first = model(ids, position_ids=positions, **cached(held)).logits[:, -1:]
            got = torch.cat([first, model(torch.tensor(last), **cached(held)).logits], 1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True},
    "three_samples_each": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam_sampling": {"num_beams": 3, "do_sample": True, "top_k": 30},
    "end_tokens": {"eos_token_id": [2, 5, 13, 44, 58]},
}


@pytest.mark.parametrize("family", SMOKE)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_no_cache(
    model: PreTrainedModel, family: str, mode: str
) -> None:
    rows, cache = whole(suffixes(4, 4)), prefilled(model)
    want = seeded(model, rows, use_cache=False, **MODES[mode])
    before = stored(cache)
    for _ in range(2):
        assert seeded(model, rows, **cached(cache), **MODES[mode]) == want
        cache.check_integrity()
    assert stored(cache) == before


@each_kind
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "prefix"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["as_they_are", "reordered"])
def test_rows_of_inference_mode_go_on_outside(
    model: PreTrainedModel, family: str, is_plain: bool, order: list[int]
) -> None:
    rows = suffixes(4, 4)
    held = AsymmetricPagedCache(model.config) if is_plain else prefilled(model)
    inputs = {"input_ids": torch.tensor(whole(rows))} if is_plain else suffix_only(rows)
    with torch.inference_mode():
        model(**inputs, **cached(held))
        if order != [0, 1]:
            held.reorder_cache(torch.tensor(order))
    got = model(input_ids=torch.tensor([[7], [9]]), **cached(held)).logits.detach()
    for row, last in enumerate((7, 9)):
        want = logits_alone(model, [*PREFIX, *rows[order[row]], last], 1)
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)


# ---- without a prefix


@every_family
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_an_empty_cache_gives_the_tokens_of_the_stock_cache(
    model: PreTrainedModel, family: str, options: dict[str, Any]
) -> None:
    rows = whole(suffixes(2, 7, 4))
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    want = seeded(model, rows, **cached(stock), **options)
    cache = AsymmetricPagedCache(model.config)
    assert seeded(model, rows, **cached(cache), **options) == want
    cache.check_integrity()


@each_kind
def test_a_plain_cache_can_be_reset_and_copied(model: PreTrainedModel, family: str) -> None:
    rows = whole(suffixes(3, 3))
    cache = AsymmetricPagedCache(model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor(rows), **cached(cache))
        twin = copy.deepcopy(cache)
        want = model(input_ids=torch.tensor([[5], [6]]), **cached(cache)).logits
        got = model(input_ids=torch.tensor([[5], [6]]), **cached(twin)).logits
    assert torch.equal(got, want)
    cache.reset()
    assert seeded(model, rows, **cached(cache)) == alone(model, rows)


# ---- what is refused


@each_kind
@pytest.mark.parametrize("lengths", [(3, 7, 5), (0, 4)])
def test_rows_of_different_length_are_refused_by_layer_and_change_nothing(
    model: PreTrainedModel, family: str, lengths: tuple[int, ...]
) -> None:
    """huggingface/transformers #47086: states read pads as tokens."""
    cache, rows = prefilled(model), whole(suffixes(*lengths))
    kind = "conv" if family == "lfm2" else "hybrid" if family == "falcon_h1" else "linear_attention"
    with pytest.raises(ValueError, match=rf"layer 0 of {family} \({kind}\) .* equal length"):
        seeded(model, rows, **cached(cache))
    equal = whole(suffixes(4, 4))
    assert seeded(model, equal, **cached(cache)) == alone(model, equal)
    for row in rows:
        assert seeded(model, [row], **cached(cache)) == alone(model, [row])


@each_kind
def test_candidates_are_refused_before_any_token(model: PreTrainedModel, family: str) -> None:
    cache = prefilled(model)
    with pytest.raises(ValueError, match=r"stateful models|assisted decoding is not possible"):
        seeded(model, [PREFIX * 2], prompt_lookup_num_tokens=3, **cached(cache))
    assert cache.batch_size == -1
    seeded(model, [PREFIX], **cached(cache))
    assert not cache.is_croppable


def test_a_prefix_serves_all_that_logits_are_asked_of(tiny_model: Build) -> None:
    """A generate loop may ask for more logits than the stored states leave tokens for."""
    model, rows = tiny_model("lfm2"), whole(suffixes(1, 1))
    cache = prefilled(model)
    ids = torch.tensor(rows)
    positions = torch.arange(P + 1).expand(2, -1)
    with torch.no_grad(), as_generate(cache):
        out = model(ids, position_ids=positions, logits_to_keep=6, **cached(cache)).logits
    for row, ids in enumerate(rows):
        torch.testing.assert_close(out[row], logits_alone(model, ids, 6), atol=1e-4, rtol=0)


# ---- bytes


@each_kind
def test_states_are_counted_where_they_are_held(model: PreTrainedModel, family: str) -> None:
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    rows = whole(suffixes(4, 4, 4))
    with torch.no_grad():
        model(input_ids=torch.tensor(rows), **cached(stock))
    held = [
        t
        for layer in stock.layers
        for sort in ("conv_states", "recurrent_states")
        for t in getattr(layer, sort, {}).values()
        if t is not None
    ]
    state_bytes = sum(t.nbytes for t in held) // 3
    kv = [t for layer in stock.layers for t in (getattr(layer, "keys", None),) if t is not None]
    kv_bytes = 2 * sum(t.nbytes for t in kv) // 3 // (P + 4)
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix_ids())
    stats = cache.stats()
    # after all tokens of the prefix, and after all but the two that its exact copies repeat
    assert stats.hot_bytes == P * kv_bytes + 2 * state_bytes
    assert stats.cold_bytes < state_bytes
    with torch.no_grad():
        model(**suffix_only(suffixes(4, 4, 4)), **cached(cache))
    stats = cache.stats()
    assert stats.cold_bytes >= 3 * (4 * kv_bytes + state_bytes)
    assert stats.dense_equivalent_bytes == 3 * ((P + 4) * kv_bytes + state_bytes)
    many = stats.peak_bytes
    assert many == stats.hot_bytes + stats.cold_bytes
    seeded(model, [PREFIX], num_new=2, **cached(cache))
    assert cache.stats().cold_bytes < many - stats.hot_bytes
    assert cache.stats().peak_bytes == many
    cache.reset()
    assert cache.stats().cold_bytes < state_bytes
