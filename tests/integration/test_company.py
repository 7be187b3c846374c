"""A cache in company: with other caches, other models, other turns, inside larger models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    whole,
)
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
ROWS = whole(suffixes(3, 7, 0))


def test_two_caches_on_one_model_do_not_mix(model: PreTrainedModel) -> None:
    short = PREFIX[:9]
    long_cache, short_cache = prefilled(model), prefilled(model, short)
    short_rows = whole(suffixes(6, 2, 0), short)
    calls = [(long_cache, ROWS), (short_cache, short_rows)] * 2
    for cache, rows in calls:
        assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    assert long_cache.stats().hot_tokens == 20
    assert short_cache.stats().hot_tokens == 9


def test_steps_of_two_caches_may_interleave(model: PreTrainedModel) -> None:
    caches = [prefilled(model), prefilled(model, PREFIX[:9]), AsymmetricPagedCache(model.config)]
    starts = [PREFIX, PREFIX[:9], []]
    outs: list[list[int]] = [[], [], []]
    ids = [torch.tensor(suffixes(4, seed=i)) for i in range(3)]
    for _ in range(6):
        for i, cache in enumerate(caches):
            with torch.no_grad():
                ids[i] = model(input_ids=ids[i], **cached(cache)).logits[:, -1:].argmax(-1)
            outs[i].append(int(ids[i]))
    rows = [start + suffixes(4, seed=i)[0] for i, start in enumerate(starts)]
    assert outs == alone(model, rows, num_new=6)


def test_prompts_may_share_more_than_the_prefix(model: PreTrainedModel) -> None:
    cache = prefilled(model, PREFIX[:9])
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


def test_guidance_runs_its_own_cache_beside(model: PreTrainedModel) -> None:
    options = {"guidance_scale": 1.7}
    want = new_tokens(model, left_padded(ROWS), use_cache=False, **options)
    assert new_tokens(model, left_padded(ROWS), **cached(prefilled(model)), **options) == want


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[2:]], ids=["suffix", "exact_prefix"])
@pytest.mark.parametrize("kind", ["the_model_itself", "its_first_layers"])
def test_a_model_may_assist_itself(tiny_model: Build, kind: str, rows: list[list[int]]) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    assistant: dict[str, Any] = {"assistant_model": model}
    if kind == "its_first_layers":
        assistant = {"assistant_early_exit": 2}
    cache = prefilled(model)
    got = new_tokens(model, left_padded(rows), num_new=12, **assistant, **cached(cache))
    assert got == alone(model, rows, num_new=12)
    cache.check_integrity()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole_ids", "new_ids"])
def test_beams_may_go_on_from_a_turn_without(model: PreTrainedModel, is_whole: bool) -> None:
    cache, first = prefilled(model), left_padded(ROWS[:2])
    out = model.generate(**first, **cached(cache), max_new_tokens=5, do_sample=False)
    ids = torch.cat([out, torch.tensor(suffixes(2, 2, seed=5))], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(2, 7, dtype=torch.int64)], 1)
    want = new_tokens(
        model, {"input_ids": ids, "attention_mask": mask}, num_beams=3, use_cache=False
    )
    if not is_whole:
        # rows that go on are those of the cache, so it needs one per beam
        ids = ids[:, -3:]
        cache.batch_repeat_interleave(3)
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert new_tokens(model, inputs, num_beams=3, **cached(cache)) == want


def test_a_long_answer_crosses_every_growth_of_the_pool(model: PreTrainedModel) -> None:
    rows = ROWS[:2]
    want = new_tokens(
        model, left_padded(rows), num_new=180, **cached(DynamicCache(config=model.config))
    )
    cache = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=180, **cached(cache)) == want
    cache.check_integrity()


def test_a_model_in_training_mode_is_served(tiny_model: Build) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv").train()
    assert new_tokens(model, left_padded(ROWS), **cached(prefilled(model))) == alone(model, ROWS)


def test_gradients_flow_through_a_first_forward(model: PreTrainedModel) -> None:
    """What the cache hands out later is detached; the tokens of an empty cache are not."""
    grads = []
    for options in (cached(AsymmetricPagedCache(model.config)), {"use_cache": False}):
        embeds = model.get_input_embeddings()(torch.tensor(suffixes(4, 4))).detach()
        logits = model(inputs_embeds=embeds.requires_grad_(), **options).logits
        grads += torch.autograd.grad(logits[:, -1].sum(), embeds)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-3)


def test_a_text_model_inside_a_larger_one_is_served() -> None:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    text = SHARED_PATH["llama"].config()
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_id=96)
    ).eval()
    model.set_attn_implementation("granikv")
    model.generation_config.pad_token_id = 0
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix_ids())
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)
    assert sum(cache.stats().backend_steps.values()) == 10
