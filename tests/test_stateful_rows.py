"""Rows with recurrent states: moved, copied, failed half-way, and gone on with."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    step,
    suffix_only,
    suffixes,
    whole,
)
from torch import nn
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import IntegrityError, TornStateError, UnannouncedForwardError

# states in front of attention and behind it; convolution alone; states and attention in one layer
FAMILIES = ("qwen3_next", "lfm2", "falcon_h1")
ROWS = suffixes(4, 4, 4)


@pytest.fixture(params=FAMILIES)
def model(tiny_model: Callable[..., PreTrainedModel], request: Any) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture
def cache(model: PreTrainedModel) -> AsymmetricPagedCache:
    cache = prefilled(model)
    step(model, cache, ROWS, attention_mask=suffix_only(ROWS)["attention_mask"])
    return cache


def goes_on(model: PreTrainedModel, cache: Any, held: list[list[int]]) -> bool:
    """Says whether three tokens, then one, give what each row alone gives."""
    first, second = [[7 + i, 8, 9] for i in range(len(held))], [[11 + i] for i in range(len(held))]
    got = torch.cat([step(model, cache, first), step(model, cache, second)], 1)
    ids = [PREFIX + row + a + b for row, a, b in zip(held, first, second, strict=True)]
    want = torch.stack([logits_alone(model, row, 4) for row in ids])
    return torch.allclose(got, want, atol=1e-4, rtol=1e-4)


MOVES: dict[str, tuple[Callable[[AsymmetricPagedCache], None], list[int]]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    "marked": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "crop_of_nothing": (lambda c: c.crop(0), [0, 1, 2]),
    "none": (lambda c: None, [0, 1, 2]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", MOVES)
def test_rows_that_were_moved_go_on_exactly(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str
) -> None:
    move, order = MOVES[name]
    move(cache)
    cache.check_integrity()
    assert goes_on(model, cache, [ROWS[i] for i in order])
    cache.check_integrity()


@pytest.mark.parametrize("copied", [copy.deepcopy, AsymmetricPagedCache.fork])
def test_a_copy_shares_the_prefix_and_nothing_else(
    model: PreTrainedModel, cache: AsymmetricPagedCache, copied: Callable[[Any], Any]
) -> None:
    twin = copied(cache)
    assert twin.stats().hot_bytes == cache.stats().hot_bytes
    assert twin._state.prefixes.only is cache._state.prefixes.only
    assert goes_on(model, cache, ROWS)
    assert goes_on(model, twin, ROWS)
    rows = whole(suffixes(2, 2))
    del cache
    assert new_tokens(model, left_padded(rows), **cached(twin)) == alone(model, rows)


def test_a_crop_is_refused_and_changes_nothing(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    with pytest.raises(ValueError, match=r"crop\(-1\) is not possible: layer 0 of .* cannot give"):
        cache.crop(-1)
    assert goes_on(model, cache, ROWS)


def test_a_reset_cache_starts_rows_from_the_prefix(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    cache.reset()
    assert goes_on(model, cache, [[], []])


def test_layers_leave_their_rows_to_the_cache(cache: AsymmetricPagedCache) -> None:
    layer: Any = cache.layers[0]
    for name, args in (("crop", (0,)), ("reset", ()), ("reorder_cache", (torch.tensor([0]),))):
        with pytest.raises(NotImplementedError, match="all layers share their rows"):
            getattr(layer, name)(*args)


def test_gradients_do_not_pile_up_in_states(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    for _ in range(3):
        model(input_ids=torch.tensor([[5], [6], [7]]), **cached(cache))
    layer: Any = cache.layers[0]
    assert layer.conv_states[0].grad_fn is None


def test_integrity_names_states_of_other_rows(cache: AsymmetricPagedCache) -> None:
    layer: Any = cache.layers[0]
    layer.conv_states[0] = layer.conv_states[0][:2]
    with pytest.raises(IntegrityError, match=r"conv_states\[0\] .* has 2 rows, the batch 3"):
        cache.check_integrity()


def test_integrity_notices_a_write_to_the_stored_states(cache: AsymmetricPagedCache) -> None:
    prefix = cache._state.prefixes.only
    assert prefix is not None
    next(iter(prefix.states[len(PREFIX)][0].values())).zero_()
    with pytest.raises(IntegrityError, match="written to or moved"):
        cache.check_integrity()


# ---- forwards that fail


class Broken(Exception):
    """Raised inside a forward."""


class failing:
    """Makes a module raise, in the body of the statement."""

    def __init__(self, module: nn.Module, error: type[BaseException] = Broken) -> None:
        self.module, self.error = module, error

    def __enter__(self) -> None:
        def fail(*args: Any) -> None:
            raise self.error

        self.hook = self.module.register_forward_pre_hook(fail)

    def __exit__(self, *args: object) -> None:
        self.hook.remove()


def places(model: PreTrainedModel) -> dict[str, nn.Module]:
    layers: Any = model.base_model.layers
    return {"second_layer": layers[1], "last_layer": layers[-1], "head": model.lm_head}


PLACES = ("second_layer", "last_layer", "head")
ERRORS = (Broken, KeyboardInterrupt)


@pytest.mark.smoke
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_torn_by_a_failure_are_refused_until_they_start_again(
    model: PreTrainedModel,
    cache: AsymmetricPagedCache,
    place: str,
    error: type[BaseException],
    count: int,
) -> None:
    with failing(places(model)[place], error), pytest.raises(error):
        step(model, cache, [[5] * count] * 3)
    for _ in range(2):
        with pytest.raises(TornStateError, match="start the rows again"):
            step(model, cache, [[5]] * 3)
    twin = cache.fork()
    with pytest.raises(TornStateError, match="start the rows again"):
        step(model, twin, [[5]] * 3)
    rows = whole(suffixes(2, 2))
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    twin.reset()
    assert goes_on(model, twin, [[]])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_first_forward_that_fails_leaves_no_rows(
    model: PreTrainedModel, cache: AsymmetricPagedCache, place: str, error: type[BaseException]
) -> None:
    with failing(places(model)[place], error), pytest.raises(error):
        new_tokens(model, left_padded(whole(suffixes(5, 5))), **cached(cache))
    cache.settle()  # torch shows no interrupt to hooks
    assert cache._state.row_states.num_bytes == 0
    assert goes_on(model, cache, [[], [], [], []])
    cache.check_integrity()


def test_a_failure_before_any_layer_is_taken_back(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    with failing(model.get_input_embeddings()), pytest.raises(Broken):
        step(model, cache, [[5]] * 3)
    assert goes_on(model, cache, ROWS)


@pytest.mark.parametrize("count", [1, 3])
def test_a_forward_past_the_hook_tears_the_rows(
    model: PreTrainedModel, cache: AsymmetricPagedCache, count: int
) -> None:
    ids = torch.tensor([[5] * count] * 3)
    with torch.no_grad(), pytest.raises(UnannouncedForwardError):
        model.forward(input_ids=ids, **cached(cache))
    with pytest.raises(TornStateError):
        step(model, cache, [[5]] * 3)
    cache.reset()
    assert goes_on(model, cache, [[], []])


@pytest.mark.parametrize(("family", "broken"), [("qwen3_next", 2), ("falcon_h1", 1)])
def test_rows_of_a_plain_cache_are_torn_too(
    tiny_model: Callable[..., PreTrainedModel], family: str, broken: int
) -> None:
    model = tiny_model(family)
    plain = AsymmetricPagedCache(model.config)
    plain.attach(model)
    rows = whole(ROWS)
    step(model, plain, rows)
    layers: Any = model.base_model.layers
    with failing(layers[broken]), pytest.raises(Broken):
        step(model, plain, [[5]] * 3)
    with pytest.raises(TornStateError):
        step(model, plain, [[5]] * 3)
    plain.reset()
    assert new_tokens(model, left_padded(rows), **cached(plain)) == alone(model, rows)
