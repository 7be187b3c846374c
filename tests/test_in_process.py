"""What a cache refuses because no answer would be right."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import (
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    suffixes,
    whole,
)
from refusals import observed
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

ROWS = whole(suffixes(*SUFFIX_LENGTHS))


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pickle": (pickle.dumps, r"cannot be pickled.*cache.prefill\(model, ids\).*cache.fork\(\)"),
    "pickle_inside": (lambda c: pickle.dumps({"cache": [c]}), "cannot be pickled"),
    "old_protocol": (lambda c: pickle.dumps(c, protocol=0), "cannot be pickled"),
    "save": (lambda c: torch.save(c, io.BytesIO()), "cannot be pickled"),
    "iterate": (list, "AsymmetricPagedCache is not iterable.*cache.layers"),
    "unpack": (lambda c: dict(enumerate(c)), "is not iterable"),
}


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(
    model: PreTrainedModel, name: str, has_prefix: bool
) -> None:
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    act, message = REFUSED[name]
    before = observed(cache)
    with pytest.raises(TypeError, match=message):
        act(cache)
    assert observed(cache) == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_independent_and_share_the_prefix(
    model: PreTrainedModel, copied: Callable[[Any], Any]
) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(ROWS[:2]), num_new=3, **cached(cache))
    before, twin = observed(cache), copied(cache)
    assert type(twin) is AsymmetricPagedCache
    assert twin._state.prefixes.only is cache._state.prefixes.only
    assert new_tokens(model, left_padded(ROWS), **cached(twin)) == alone(model, ROWS)
    twin.invalidate()
    assert observed(cache) == before
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_it_has_as_many_layers_as_its_model(model: PreTrainedModel, has_prefix: bool) -> None:
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    assert len(cache) == len(cache.layers) == model.config.num_hidden_layers
    # whoever asks whether there is a cache does not ask whether it holds anything
    assert bool(cache)
