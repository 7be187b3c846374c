import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import (
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    step,
    suffixes,
    whole,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_granikv import AsymmetricPagedCache

P = len(PREFIX)
ROWS = whole(suffixes(*SUFFIX_LENGTHS))


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def cache(model: PreTrainedModel) -> AsymmetricPagedCache:
    return prefilled(model)


def assert_logits(got: Tensor, model: PreTrainedModel, rows: list[list[int]], last: int) -> None:
    want = torch.stack([logits_alone(model, row, last) for row in rows])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def generates_right(model: PreTrainedModel, cache: AsymmetricPagedCache) -> bool:
    return new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


# ---- lengths


def test_it_is_a_cache_of_the_given_layers(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    assert isinstance(cache, Cache)
    assert len(cache) == len(cache.layers) == model.config.num_hidden_layers
    assert (cache.is_compileable, cache.is_croppable) == (False, True)
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    assert cache.is_sliding == [False, False]


def test_lengths_are_ints_and_agree_between_layers(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    assert [cache.get_seq_length(i) for i in range(3)] == [P, P, 0]
    step(model, cache, suffixes(5, 5))
    assert [cache.get_seq_length(i) for i in range(2)] == [P + 5, P + 5]
    assert type(cache.get_seq_length()) is int
    assert cache.get_mask_sizes(3, 0) == cache.get_mask_sizes(3, 1) == (P + 8, 0)
    assert cache.batch_size == 2


def test_after_generate_the_cache_holds_all_but_the_last_token(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    rows = whole(suffixes(4, 4))
    out = model.generate(
        **left_padded(rows), **cached(cache), max_new_tokens=6, return_dict_in_generate=True
    )
    assert out.past_key_values is cache
    assert cache.get_seq_length() == P + 4 + 6 - 1


# ---- crop


@pytest.mark.parametrize("num_cropped", [0, 1, 3, 7, 7 + 4, 7 + P], ids=lambda n: f"crop_{n}")
@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_a_cropped_cache_goes_on_exactly(
    tiny_model: Callable[..., PreTrainedModel], attention: str, num_cropped: int
) -> None:
    """huggingface/transformers #33378 and #47720: counts are negative, and reach into the prefix."""
    model = tiny_model("llama", attention)
    cache, history, later = prefilled(model), suffixes(7, 7), suffixes(3, 3, seed=300)
    step(model, cache, history)
    cache.crop(-num_cropped)
    assert cache.get_seq_length() == P + 7 - num_cropped
    rows = [
        row[: P + 7 - num_cropped] + new for row, new in zip(whole(history), later, strict=True)
    ]
    assert_logits(step(model, cache, later), model, rows, 3)
    cache.check_integrity()


def test_a_crop_into_the_prefix_is_private(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    """huggingface/transformers #33378, where others read the same prefix."""
    other, bytes_before = cache.fork(), cache.stats().hot_bytes
    step(model, other, suffixes(2))
    cache.crop(-6)
    assert (cache.get_seq_length(), other.get_seq_length()) == (P - 6, P + 2)
    later = suffixes(4, seed=300)
    assert_logits(step(model, cache, later), model, [PREFIX[:-6] + later[0]], 4)
    assert_logits(step(model, other, later), model, [whole(suffixes(2))[0] + later[0]], 4)
    assert cache.stats().hot_bytes == bytes_before
    assert generates_right(model, cache)
    assert generates_right(model, other)


def test_reset_makes_a_cropped_prefix_whole(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    cache.crop(-6)
    cache.reset()
    later = suffixes(4)
    assert_logits(step(model, cache, later), model, whole(later), 4)


def test_a_crop_of_ragged_rows_counts_columns(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    """The last two columns hold tokens of both rows; the third holds a pad of the shorter one."""
    history = suffixes(5, 2)
    model(**left_padded(history) | {"attention_mask": ragged_mask(history)}, **cached(cache))
    cache.crop(-3)
    later = suffixes(2, 2, seed=300)
    rows = [PREFIX + history[0][:2] + later[0], PREFIX + later[1]]
    assert_logits(step(model, cache, later), model, rows, 2)


def ragged_mask(rows: list[list[int]]) -> Tensor:
    mask = left_padded(rows)["attention_mask"]
    return torch.cat([torch.ones(len(rows), P, dtype=torch.int64), mask], 1)


def test_a_crop_may_be_given_as_a_tensor(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    """As assisted decoding does before transformers 5.24; lengths stay plain ints."""
    step(model, cache, suffixes(3))
    cache.crop(torch.tensor(-5))
    assert type(cache.get_seq_length()) is int
    later = suffixes(2, seed=300)
    assert_logits(step(model, cache, later), model, [PREFIX[:-2] + later[0]], 2)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_positive_crop_is_refused(
    model: PreTrainedModel, cache: AsymmetricPagedCache, has_prefix: bool
) -> None:
    """huggingface/transformers #47720: it was a length once."""
    cache = cache if has_prefix else AsymmetricPagedCache(model.config)
    step(model, cache, suffixes(7))
    before = cache.stats(), cache.get_seq_length()
    with pytest.raises(ValueError, match=r"crop\(5\)"):
        cache.crop(5)
    assert (cache.stats(), cache.get_seq_length()) == before


def test_a_crop_beyond_everything_leaves_nothing(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    step(model, cache, suffixes(3, 3))
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    assert_logits(step(model, cache, ROWS[:1] * 2), model, ROWS[:1] * 2, len(ROWS[0]))


# ---- rows

SELECTIONS: dict[str, tuple[Callable[[AsymmetricPagedCache], None], list[int]]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "reorder_with_repeats": (lambda c: c.reorder_cache(torch.tensor([1, 1, 2, 1])), [1, 1, 2, 1]),
    "reorder_in_place": (lambda c: c.reorder_cache(torch.tensor([0, 1, 2])), [0, 1, 2]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select_by_bools": (
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
        [0, 2],
    ),
    "select_one": (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("has_prefix", [True, False], ids=["prefix", "plain"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_rows_that_were_moved_go_on_exactly(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str, has_prefix: bool
) -> None:
    history, (select, order) = suffixes(6, 6, 6), SELECTIONS[name]
    cache = cache if has_prefix else AsymmetricPagedCache(model.config)
    start = PREFIX if has_prefix else []
    step(model, cache, history)
    select(cache)
    assert cache.batch_size == len(order)
    rows = [start + history[i] for i in order]
    for seed in (300, 400):
        later = suffixes(*[2] * len(order), seed=seed)
        got = step(model, cache, later)
        rows = [row + new for row, new in zip(rows, later, strict=True)]
        assert_logits(got, model, rows, 2)
    cache.check_integrity()


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_padded_rows_that_were_moved_take_their_pads_along(
    tiny_model: Callable[..., PreTrainedModel], attention: str, name: str
) -> None:
    model, history, (select, order) = (
        tiny_model("llama", attention),
        suffixes(6, 1, 4),
        SELECTIONS[name],
    )
    cache, ids, mask = prefilled(model), left_padded(history)["input_ids"], ragged_mask(history)
    model(input_ids=ids, attention_mask=mask, **cached(cache))
    select(cache)
    later = suffixes(*[2] * len(order), seed=300)
    mask = torch.cat([mask[order], torch.ones(len(order), 2, dtype=torch.int64)], 1)
    rows = [PREFIX + history[i] + new for i, new in zip(order, later, strict=True)]
    assert_logits(step(model, cache, later, attention_mask=mask), model, rows, 2)


@pytest.mark.parametrize("order", [[3], [-1], [0, 7]], ids=str)
def test_rows_that_are_not_there_cannot_be_chosen(
    model: PreTrainedModel, cache: AsymmetricPagedCache, order: list[int]
) -> None:
    step(model, cache, suffixes(2, 2, 2))
    before = cache.stats()
    with pytest.raises(ValueError, match="the cache holds rows 0 to 2"):
        cache.batch_select_indices(torch.tensor(order))
    assert cache.stats() == before


def test_rows_may_be_chosen_before_there_are_any(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    cache.reorder_cache(torch.zeros(3, dtype=torch.int64))
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == -1
    assert generates_right(model, cache)


# ---- forks and copies


@pytest.mark.parametrize(
    "copied",
    [lambda c: c.fork(), copy.deepcopy, lambda c: c.fork().fork()],
    ids=["fork", "deepcopy", "fork_of_fork"],
)
def test_a_fork_shares_the_prefix_and_nothing_else(
    model: PreTrainedModel, cache: AsymmetricPagedCache, copied: Callable[[Any], Any]
) -> None:
    """huggingface/transformers #32681: a deep copy of a filled cache failed, or held it all twice."""
    history = suffixes(4, 4)
    step(model, cache, history)
    hot_bytes, twin = cache.stats().hot_bytes, copied(cache)
    assert twin._state.prefixes.only is cache._state.prefixes.only
    assert cache.stats().hot_bytes == twin.stats().hot_bytes == hot_bytes
    first, second = suffixes(3, 3, seed=300), suffixes(2, 2, seed=400)
    assert_logits(
        step(model, twin, first),
        model,
        [a + b for a, b in zip(whole(history), first, strict=True)],
        3,
    )
    assert_logits(
        step(model, cache, second),
        model,
        [a + b for a, b in zip(whole(history), second, strict=True)],
        2,
    )
    twin.reset()
    assert cache.get_seq_length() == P + 6
    assert generates_right(model, twin)
    assert generates_right(model, cache)


def test_a_fork_outlives_the_release_of_its_origin(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    prefix, twin = cache._state.prefixes.only, cache.fork()
    cache.release(prefix)
    assert cache.get_seq_length() == 0
    assert generates_right(model, twin)
    twin.release(prefix)
    assert twin.stats().hot_bytes == cache.stats().hot_bytes == 0


def test_a_fork_that_is_gone_no_longer_holds_the_prefix(cache: AsymmetricPagedCache) -> None:
    """Forks are dropped, not released, by those who make one per turn."""
    twin, prefix = cache.fork(), cache._state.prefixes.only
    memory = StorageWeakRef(prefix.keys[0].untyped_storage())
    del twin
    cache.release(prefix)
    del prefix
    assert memory.expired()


def test_a_plain_cache_can_be_copied_too(model: PreTrainedModel) -> None:
    cache, history, later = AsymmetricPagedCache(model.config), suffixes(9, 9), suffixes(2, 2)
    step(model, cache, history)
    twin = copy.deepcopy(cache)
    cache.reset()
    rows = [a + b for a, b in zip(history, later, strict=True)]
    assert_logits(step(model, twin, later), model, rows, 2)
