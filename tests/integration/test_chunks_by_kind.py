"""Prompts and prefixes in chunks, where layers are local or keep states.

Chunks that restart positions, or windows that forget between two of them, were reported for stock
generation: huggingface/transformers #43082.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from families import HYBRIDS, LOCAL
from prompts import (
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    whole,
)
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

Build = Callable[..., PreTrainedModel]
NUM_NEW = 6
RAGGED, EVEN = (3, 7, 0, 5), (5, 5)
KINDS = ("qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "zamba2")


@cache
def expected(family: str, lengths: tuple[int, ...]) -> list[list[int]]:
    model = {**LOCAL, **HYBRIDS}[family].model(attn_implementation="eager")
    return alone(model, whole(suffixes(*lengths)), num_new=NUM_NEW)


def in_chunks(model: PreTrainedModel, chunk_size: int) -> AsymmetricPagedCache:
    held = AsymmetricPagedCache(model.config)
    held.prefill(model, prefix_ids(), chunk_size=chunk_size)
    return held


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("family", LOCAL)
def test_a_prefix_in_chunks_is_the_prefix_of_local_layers(
    tiny_model: Build, family: str, chunk_size: int
) -> None:
    """Chunks shorter than the window of 8, and nearly as long; the prefix is of 20 tokens."""
    model = tiny_model(family)
    held, want = in_chunks(model, chunk_size), prefilled(model)._state.prefixes.only
    prefix = held._state.prefixes.only
    assert prefix is not None
    for got, expected_part in zip(prefix.tensors(), want.tensors(), strict=True):
        torch.testing.assert_close(got, expected_part, atol=1e-5, rtol=1e-5)
    inputs = left_padded(whole(suffixes(*RAGGED)))
    assert new_tokens(model, inputs, num_new=NUM_NEW, **cached(held)) == expected(family, RAGGED)


@pytest.mark.parametrize("family", LOCAL)
def test_prompts_in_chunks_are_exact_under_local_layers(tiny_model: Build, family: str) -> None:
    model, inputs = tiny_model(family), left_padded(whole(suffixes(*RAGGED)))
    got = new_tokens(
        model, inputs, num_new=NUM_NEW, prefill_chunk_size=3, **cached(prefilled(model))
    )
    assert got == expected(family, RAGGED)


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("family", KINDS)
def test_a_prefix_in_chunks_is_the_prefix_of_states(
    tiny_model: Build, family: str, chunk_size: int
) -> None:
    """Rows start after all of it, or, where they are the prefix, before its last tokens."""
    model = tiny_model(family)
    held = in_chunks(model, chunk_size)
    for lengths in (EVEN, (0, 0)):
        inputs = left_padded(whole(suffixes(*lengths)))
        got = new_tokens(model, inputs, num_new=NUM_NEW, **cached(held))
        assert got == expected(family, lengths)


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 3, 30])
@pytest.mark.parametrize("family", KINDS)
def test_prompts_in_chunks_are_exact_or_refused_where_layers_keep_states(
    tiny_model: Build, family: str, chunk_size: int
) -> None:
    """Versions that send every chunk, also those that the prefix holds, leave nothing for some."""
    model, inputs = tiny_model(family), left_padded(whole(suffixes(*EVEN)))
    held, options = prefilled(model), {"num_new": NUM_NEW, "prefill_chunk_size": chunk_size}
    if CACHE_ARGUMENT != "cache" and chunk_size < 30:
        with pytest.raises(ValueError, match="keeps a state"):
            new_tokens(model, inputs, **options, **cached(held))
        assert held.batch_size == -1
        return
    assert new_tokens(model, inputs, **options, **cached(held)) == expected(family, EVEN)
