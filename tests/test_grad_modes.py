"""Gradient modes of prefill and of what follows it, all nine pairs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import (
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefix_ids,
    suffixes,
    whole,
)
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

ROWS = whole(suffixes(*SUFFIX_LENGTHS))
MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("chunk_size", [None, 3], ids=["whole", "cut"])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_prefix_of_any_mode_serves_calls_of_any_mode(
    tiny_model: Callable[..., PreTrainedModel],
    first: Callable[[], Any],
    second: Callable[[], Any],
    chunk_size: int | None,
) -> None:
    model, want = tiny_model("llama"), alone(tiny_model("llama"), ROWS)
    cache = AsymmetricPagedCache(model.config)
    with first():
        prefix = cache.prefill(model, prefix_ids(), chunk_size=chunk_size)
    with second():
        options = {"prefill_chunk_size": chunk_size, **cached(cache)}
        assert new_tokens(model, left_padded(ROWS), **options) == want
        twin = copy.deepcopy(cache)
    with first():
        assert new_tokens(model, left_padded(ROWS), **options) == want
        assert new_tokens(model, left_padded(ROWS), **cached(twin)) == want
    cache.check_integrity()
    tensors = (*prefix.keys, *prefix.values)
    assert not any(t.requires_grad or t.is_inference() for t in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_made_in_inference_mode_is_served(mode: Callable[[], Any]) -> None:
    with torch.inference_mode():
        model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    want = alone(model, ROWS)
    cache = AsymmetricPagedCache(model.config)
    with mode():
        cache.prefill(model, prefix_ids())
        assert new_tokens(model, left_padded(ROWS), **cached(cache)) == want


def test_no_gradient_reaches_the_weights_through_a_prefix() -> None:
    """Tokens after the prefix are trained on as if its keys and values were constants."""
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix_ids())
    keys = [key.clone() for key in cache._state.prefixes.only.keys]
    logits = model(input_ids=torch.tensor(suffixes(5)), **cached(cache)).logits
    logits.log_softmax(-1)[..., 0].sum().backward()
    assert model.lm_head.weight.grad is not None
    assert all(map(torch.equal, cache._state.prefixes.only.keys, keys))
    # the graph is gone with the first backward; a second forward starts another
    model(input_ids=torch.tensor(suffixes(2)), **cached(cache)).logits.sum().backward()
