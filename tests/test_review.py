"""What a reviewer broke once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import COMMON, LOCAL, SHARED_PATH, Family
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    step,
    suffixes,
    tokens,
    whole,
)
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
ROWS = whole(suffixes(3, 7, 0, 5))


@pytest.mark.nothing_shared
def test_a_layer_that_writes_into_its_mask_takes_the_dense_route() -> None:
    """Doge adds biases of its own to the mask; the shared path would drop them."""
    model = Family("DogeConfig").model(attn_implementation="granikv")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            parameter.data = torch.randn_like(parameter)
    eager = Family("DogeConfig").model(attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    cache = prefilled(model)
    want = alone(eager, ROWS)
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == want
    assert "mask of its own" in cache.explain()


def test_an_interrupted_forward_is_taken_back_by_the_next(tiny_model: Build) -> None:
    model, first, later = tiny_model("llama"), suffixes(4, 4), suffixes(2, 2, seed=300)
    cache = prefilled(model)
    step(model, cache, first)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, suffixes(5, 5, seed=400))
    handle.remove()
    got = step(model, cache, later)
    want = [logits_alone(model, PREFIX + a + b, 2) for a, b in zip(first, later, strict=True)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", ["generate", "a refused generate"])
def test_positions_of_the_caller_are_kept_after_a_generate(tiny_model: Build, before: str) -> None:
    model, row = tiny_model("llama"), whole(suffixes(4))[0]
    cache = prefilled(model)
    if before == "generate":
        history = row + new_tokens(model, left_padded([row]), num_new=3, **cached(cache))[0][:-1]
    else:
        step(model, cache, [row[len(PREFIX) :]])
        history = row
        with pytest.raises(ValueError, match="position 0"):
            new_tokens(model, left_padded([[96, *row[1:]]]), **cached(cache))
    new, positions = tokens(3, seed=4), torch.tensor([[40, 41, 42]])
    got = step(model, cache, [new], position_ids=positions)
    everything = torch.cat([torch.arange(len(history))[None], positions], 1)
    with torch.no_grad():
        # with a mask, or transformers takes the jump for a second packed sequence
        inputs = left_padded([history + new]) | {"position_ids": everything}
        want = model(**inputs, use_cache=False).logits[:, -3:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_positions_of_ones_own_in_generate_are_refused(tiny_model: Build) -> None:
    model, inputs = tiny_model("llama"), left_padded(whole(suffixes(5, 7)))
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    positions[:, -5:] += 30
    with pytest.raises(ValueError, match="Leave position_ids out"):
        new_tokens(model, inputs, position_ids=positions, **cached(prefilled(model)))


@pytest.mark.parametrize("rows", [suffixes(25), [[96, *ROWS[0][1:]]]], ids=["suffix", "other"])
def test_embeddings_that_contradict_the_prefix_are_refused(
    tiny_model: Build, rows: list[list[int]]
) -> None:
    model = tiny_model("llama")
    embeds = model.get_input_embeddings()(torch.tensor(rows)).detach()
    with pytest.raises(ValueError, match="differs from the prefix at position 0"):
        model.generate(inputs_embeds=embeds, max_new_tokens=2, **cached(prefilled(model)))


@pytest.mark.nothing_shared
def test_autocast_takes_the_dense_route(tiny_model: Build) -> None:
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        cache = prefilled(model)
        new_tokens(model, left_padded(ROWS), num_new=2, **cached(cache))
    assert "autocast" in cache.explain()


def test_what_a_fork_learns_stays_with_it(tiny_model: Build) -> None:
    model = tiny_model("llama")
    cache, twin_model = prefilled(model), Family("LlamaConfig").model()
    fork = cache.fork()
    fork.attach(twin_model)
    with pytest.raises(RuntimeError, match="does not know"):
        new_tokens(twin_model, left_padded(ROWS), **cached(cache))


def test_a_released_prefix_is_not_counted_for_the_sake_of_a_fork(tiny_model: Build) -> None:
    cache = prefilled(tiny_model("llama"))
    fork = cache.fork()
    cache.release(fork._state.prefixes.only)
    assert cache.stats().hot_bytes == 0
    assert fork.stats().hot_tokens == len(PREFIX)


def test_dropout_is_not_stored_with_a_prefix() -> None:
    model = Family("LlamaConfig").model(attention_dropout=0.5).train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        prefilled(model)


def test_a_part_of_a_known_model_is_not_attached(tiny_model: Build) -> None:
    cache = prefilled(tiny_model("llama"))
    with pytest.raises(ValueError, match="contain each other"):
        cache.attach(tiny_model("llama").base_model)


def test_sinks_of_full_attention_are_exact() -> None:
    options = {"head_dim": 8, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}
    family, rows = Family("GptOssConfig", options), whole(suffixes(3, 7, 0))
    want = alone(family.model(attn_implementation="eager"), rows)
    model = family.model(attn_implementation="granikv")
    assert new_tokens(model, left_padded(rows), **cached(prefilled(model))) == want


def test_rows_alike_share_one_mask(tiny_model: Build) -> None:
    cache = prefilled(tiny_model("llama"))
    step(tiny_model("llama"), cache, suffixes(*[6] * 4))
    mask = cache._state.current_step().plan.suffix_mask
    assert mask is not None
    assert mask.shape == (1, 1, 6, 6)


@pytest.mark.parametrize("where", ["lm_head", "model.norm", "model.layers.1.mlp"])
def test_a_forward_that_fails_after_its_last_layer_stored_is_taken_back(where: str) -> None:
    model = Family("LlamaConfig").model(attn_implementation="granikv")
    cache, new = prefilled(model), torch.tensor([tokens(3, seed=2)])
    step(model, cache, [tokens(3, seed=1)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.get_submodule(where).register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        model(input_ids=new, **cached(cache))
    hook.remove()
    assert cache.get_seq_length() == len(PREFIX) + 3
    with torch.no_grad():
        got = model(input_ids=new, **cached(cache)).logits[0]
    want = logits_alone(model, [*PREFIX, *tokens(3, seed=1), *new[0].tolist()], 3)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("scaled", ["full_attention", "sliding_attention"])
def test_a_rope_of_one_kind_of_layers_counts_too(kind: str, scaled: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope |= factors | {"original_max_position_embeddings": 24}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    by_kind = {"full_attention": plain, "sliding_attention": plain} | {scaled: rope}
    model = LOCAL["gemma3"].model(
        attn_implementation="granikv", rope_parameters=by_kind, max_position_embeddings=24
    )
    with pytest.raises(ValueError, match=f"RoPE of this model .{kind}. changes past 24"):
        new_tokens(model, left_padded(whole(suffixes(5, 3))), **cached(prefilled(model)))


def test_masks_that_local_layers_cannot_follow_are_refused(tiny_model: Build) -> None:
    model, new = tiny_model("mistral"), torch.tensor([tokens(6, seed=9)])
    cache = prefilled(model)
    mask = torch.ones(1, 1, 6, 26, dtype=torch.bool)
    for given in (mask, {"full_attention": mask, "sliding_attention": mask}):
        with pytest.raises(ValueError, match="every layer makes its own"):
            model(input_ids=new, attention_mask=given, **cached(cache))
        assert cache.get_seq_length() == len(PREFIX)


def test_queries_scaled_by_their_column_are_exact_or_refused() -> None:
    """Llama 4 scales queries of layers without RoPE by the column that they are in."""
    options = {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 4}
    model = LOCAL["llama4"].model(attn_implementation="granikv", **options, attn_scale=0.5)
    rows = whole(suffixes(5, 5))
    assert new_tokens(model, left_padded(rows), **cached(prefilled(model))) == alone(model, rows)
    with pytest.raises(ValueError, match="tunes the temperature"):
        new_tokens(model, left_padded(whole(suffixes(3, 7))), **cached(prefilled(model)))


def test_a_model_that_chooses_its_keys_is_refused_past_them() -> None:
    model = Family("DogeConfig", {"keep_window_size": 24}).model(attn_implementation="granikv")
    with pytest.raises(ValueError, match="other keys in two forwards than in one past 24"):
        new_tokens(model, left_padded(whole(suffixes(5))), **cached(prefilled(model)))


@pytest.mark.parametrize("prefix_len", [1, 4])
def test_latents_of_a_prefix_that_rows_see_nothing_of(prefix_len: int) -> None:
    family, ids = SHARED_PATH["deepseek_v3"], tokens(prefix_len, seed=3)
    model, rows = family.model(attn_implementation="granikv"), whole(suffixes(2, 1, 0), ids)
    want = alone(family.model(attn_implementation="eager"), rows)
    cache = prefilled(model, ids)
    assert new_tokens(model, left_padded(rows), **cached(cache)) == want
    cache.reset()
    cache.crop(-prefix_len)
    with torch.no_grad():
        got = model(input_ids=torch.tensor([ids]), **cached(cache)).logits[0]
    torch.testing.assert_close(got, logits_alone(model, ids, prefix_len), atol=1e-4, rtol=1e-4)


def test_a_changed_config_makes_the_prefix_stale() -> None:
    model = LOCAL["mistral"].model(attn_implementation="granikv")
    cache = prefilled(model)
    model.config.sliding_window = 4
    with pytest.raises(ValueError, match="sliding_window of its config is 4, it was 8"):
        new_tokens(model, left_padded(whole(suffixes(4, 2))), **cached(cache))


def test_a_model_with_a_preparation_of_its_own_gets_whole_prompts() -> None:
    """Vision-language models count positions themselves, before generate's own preparation."""
    text = {
        **Family("Qwen2Config").config().to_dict(),
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    text = {name: text[name] for name in (*COMMON, "rope_parameters")}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**vision, "intermediate_size": 32},
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    want = {n: alone(model, whole(suffixes(*n))) for n in ((4, 2), (3, 5, 1))}
    model.set_attn_implementation("granikv")
    cache = prefilled(model)
    for lengths, tokens_alone in want.items():
        rows = whole(suffixes(*lengths))
        assert new_tokens(model, left_padded(rows), **cached(cache)) == tokens_alone


def test_no_mask_is_built_where_nobody_reads_it(tiny_model: Build) -> None:
    """It is as large as the scores of one head: a gigabyte for a prompt of 32,768 tokens."""
    cache = AsymmetricPagedCache(tiny_model("llama").config)
    step(tiny_model("llama"), cache, [tokens(9, seed=1)])
    assert cache._state.current_step().plan.suffix_mask is None
