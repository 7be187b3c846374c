"""The attention under its own name, with whatever cache or none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import LOCAL, SHARED_PATH, Family
from prompts import (
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    suffixes,
    whole,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

import hf_granikv
from hf_granikv.attention import ATTENTION_NAME, granikv_attention
from hf_granikv.live_rows import LiveRows

Build = Callable[..., PreTrainedModel]
ROWS = suffixes(9, 4, 1)


def test_attention_and_masks_are_registered_under_one_name() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is granikv_attention
    assert callable(AttentionMaskInterface()[ATTENTION_NAME])
    # transformers treats names with these parts as implementations of its own
    assert not any(part in ATTENTION_NAME for part in ("flash", "sdpa", "flex", "eager", "|", "/"))


STOCK: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "no_cache": lambda model: {"use_cache": False},
    "default_cache": lambda model: {},
    "dynamic_cache": lambda model: cached(DynamicCache(config=model.config)),
    "static_cache": lambda model: cached(StaticCache(config=model.config, max_cache_len=32)),
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_stock_caches_and_padding_work_under_the_attention(
    tiny_model: Build, family: str, name: str
) -> None:
    model, want = tiny_model(family), alone(tiny_model(family, "eager"), ROWS)
    assert new_tokens(model, left_padded(ROWS), **STOCK[name](model)) == want


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_token_does_not_see_the_ones_behind_it(tiny_model: Build, num_rows: int) -> None:
    """Registered without a mask function, an attention loses causality and padding silently."""
    model, ids = tiny_model("llama"), torch.tensor(suffixes(*[9] * num_rows))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    with torch.no_grad():
        before, after = (model(input_ids=i, use_cache=False).logits for i in (ids, changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_training_through_the_attention_gives_the_gradients_of_eager(tiny_model: Build) -> None:
    grads = []
    for attention in ("granikv", "eager"):
        model, inputs = tiny_model("llama", attention), left_padded(ROWS)
        weight = model.get_input_embeddings().weight
        (grad,) = torch.autograd.grad(model(**inputs, use_cache=False).logits[:, -1].sum(), weight)
        grads.append(grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dispatch", ["per_row", "cascade", "batched_gemm"])
def test_each_layer_may_have_a_scale_of_its_own(dispatch: str) -> None:
    """What is worked out once for a step had the scale of its first layer."""
    options = {"scale_attn_by_inverse_layer_idx": True, "n_layer": 4}
    family = Family("GPT2Config", options, base=SHARED_PATH["gpt2"].base)
    model, rows = family.model(attn_implementation="granikv"), whole(suffixes(3, 7, 0))
    cache = prefilled(model, dispatch=dispatch)
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)


WITHOUT_INTERFACE: dict[str, dict[str, Any]] = {
    "BloomConfig": {"n_layer": 2, "n_head": 4, "hidden_size": 32},
    "MptConfig": {"n_layers": 2, "n_heads": 4, "d_model": 32},
    "XGLMConfig": {"num_layers": 2, "attention_heads": 4, "d_model": 32, "ffn_dim": 64},
}


@pytest.mark.parametrize("config_name", WITHOUT_INTERFACE)
def test_a_family_without_the_interface_is_not_silently_wrong(config_name: str) -> None:
    """They add their mask to the scores: one of truth values, or none, makes nonsense of it."""
    options = {"vocab_size": 97, "initializer_range": 0.3, **WITHOUT_INTERFACE[config_name]}
    family = Family(config_name, options, base={"pad_token_id": 0, "eos_token_id": None})
    try:
        model = family.model(attn_implementation=ATTENTION_NAME)
    except (ValueError, KeyError, NotImplementedError):
        return
    want = alone(family.model(attn_implementation="eager"), ROWS)
    assert new_tokens(model, left_padded(ROWS)) == want


@pytest.mark.nothing_shared
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "diffllama"])
def test_a_float64_model_is_served_on_the_dense_route(family: str) -> None:
    """Parts are merged in float32; the merge failed with an error about dtypes."""
    families = {**SHARED_PATH, **LOCAL}
    model = families[family].model(attn_implementation="granikv").double()
    rows = whole(suffixes(3, 7, 0))
    cache = prefilled(model)
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    assert "torch.float64" in cache.explain()
    with torch.no_grad():
        ids = torch.tensor([rows[0][20:]])
        cache.reset()
        got = model(input_ids=ids, **cached(cache)).logits[0]
    assert got.dtype == torch.float64
    if family != "gemma2":
        torch.testing.assert_close(got, logits_alone(model, rows[0], 3), atol=1e-9, rtol=0)
    options = {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4}
    assert new_tokens(model, left_padded(rows), **options) == alone(model, rows)


def test_float64_rows_that_come_and_go_run_batch_by_batch() -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv").double()
    cache = prefilled(model)
    live, prefix = LiveRows(model, cache), cache.rows.prefixes.only
    rows = [live.start(prefix), live.start(prefix)]
    new = suffixes(3, 5)
    logits = live.forward(dict(zip(rows, new, strict=True)))
    for row, ids in zip(rows, new, strict=True):
        want = logits_alone(model, whole([ids])[0], 1)[0]
        torch.testing.assert_close(logits[row], want, atol=1e-9, rtol=0)
