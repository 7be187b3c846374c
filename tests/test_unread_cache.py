"""Forwards whose layers are not handed the cache, which would do without the prefix in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import HYBRIDS, LOCAL, SHARED_PATH, Family
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole
from transformers import PreTrainedModel

from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.errors import UnreadCacheError

ROWS = whole(suffixes(3, 7, 0, 5))
FAMILIES: dict[str, Family] = {
    name: {**SHARED_PATH, **LOCAL, **HYBRIDS}[name] for name in ("llama", "mistral", "gpt2", "lfm2")
}


def forward(model: PreTrainedModel, cache: Any, count: int) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=torch.tensor(suffixes(count, count)), **cached(cache)
    ).logits
    return logits


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_over_a_prefix_is_refused(family: str, count: int) -> None:
    """transformers sets the cache of such layers to None: of a single token nobody noticed."""
    model = FAMILIES[family].model(attn_implementation="granikv")
    cache = prefilled(model)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\)"):
        forward(model, cache, count)
    assert cache.batch_size == -1
    model.eval()
    forward(model, cache, count)


def test_generation_between_steps_of_such_a_training_goes_on(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    model.gradient_checkpointing_enable()
    model.train()
    got = new_tokens(model, left_padded(ROWS), **cached(prefilled(model)))
    assert got == alone(tiny_model("llama"), ROWS)


@pytest.mark.parametrize("count", [1, 5])
def test_a_forward_that_reads_no_cache_raises(count: int) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    cache = prefilled(model)
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (
                args,
                {**kwargs, CACHE_ARGUMENT: None, "attention_mask": None},
            ),
            with_kwargs=True,
        )
        for layer in model.base_model.layers
    ]
    with pytest.raises(UnreadCacheError, match="no layer of LlamaForCausalLM has read the cache"):
        forward(model, cache, count)
    for hook in hooks:
        hook.remove()
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)
    cache.check_integrity()
