"""A pool that may not grow: what needs too many slots is refused before anything changes."""

from collections.abc import Callable

import pytest
import torch
from prompts import (
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
from transformers import PreTrainedModel

from hf_granikv.errors import ColdPoolFullError


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


def test_a_call_that_needs_too_many_slots_is_refused_whole(model: PreTrainedModel) -> None:
    cache = prefilled(model, cold_slots=12)
    step(model, cache, suffixes(4, 4))
    before = cache.stats(), cache.get_seq_length()
    with pytest.raises(ColdPoolFullError, match="4 free slots of cold_slots=12, 6 needed"):
        step(model, cache, suffixes(3, 3))
    assert (cache.stats(), cache.get_seq_length()) == before
    later = suffixes(2, 2, seed=300)
    rows = [a + b for a, b in zip(whole(suffixes(4, 4)), later, strict=True)]
    want = torch.stack([logits_alone(model, row, 2) for row in rows])
    torch.testing.assert_close(step(model, cache, later), want, atol=1e-4, rtol=0)
    with pytest.raises(ColdPoolFullError, match="0 free slots"):
        step(model, cache, suffixes(1, 1))


def test_generating_past_the_limit_stops_there_and_the_cache_stays_usable(
    model: PreTrainedModel,
) -> None:
    rows = whole(suffixes(3, 5))
    # 3 + 5 prompt tokens, and 9 of the 10 new ones per row
    cache = prefilled(model, cold_slots=8 + 18)
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    with pytest.raises(ColdPoolFullError):
        new_tokens(model, left_padded(rows), num_new=11, **cached(cache))
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    cache.check_integrity()


def test_beams_need_slots_only_for_what_they_do_not_share(model: PreTrainedModel) -> None:
    """One row of 6 tokens and four beams: 6 + 4 slots, not 4 * 7."""
    cache = prefilled(model, cold_slots=10)
    step(model, cache, suffixes(6))
    cache.batch_repeat_interleave(4)
    step(model, cache, suffixes(1, 1, 1, 1))
    assert cache.stats().cold_tokens == 10
    with pytest.raises(ColdPoolFullError, match="0 free slots of cold_slots=10, 4 needed"):
        step(model, cache, suffixes(1, 1, 1, 1))
    cache.check_integrity()
