"""What it means to refuse: nothing computed, nothing changed, the right error."""

from collections.abc import Callable
from typing import Any

import pytest
from prompts import SUFFIX_LENGTHS, alone, cached, left_padded, new_tokens, suffixes, whole
from torch import nn
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache


def observed(cache: AsymmetricPagedCache) -> tuple[Any, ...]:
    cache.check_integrity()
    lengths = [cache.get_seq_length(layer_idx) for layer_idx in range(len(cache.layers))]
    return cache.stats(), lengths, cache.batch_size


def assert_refused(
    cache: AsymmetricPagedCache,
    owner: PreTrainedModel,
    call: Callable[[], Any],
    error: type[Exception] | tuple[type[Exception], ...],
    match: str | None,
    culprit: nn.Module | None = None,
) -> None:
    """Checks that `call` fails before any forward ends, and leaves the cache as it was."""
    before, finished = observed(cache), []
    hook = (culprit or owner).register_forward_hook(lambda *_: finished.append(1))
    try:
        with pytest.raises(error, match=match):
            call()
    finally:
        hook.remove()
    assert not finished
    assert observed(cache) == before
    rows = whole(suffixes(*SUFFIX_LENGTHS))
    assert new_tokens(owner, left_padded(rows), **cached(cache)) == alone(owner, rows)
