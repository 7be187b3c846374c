"""What a reviewer broke once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Family
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    suffixes,
    tokens,
    whole,
)
from transformers import PreTrainedModel

Build = Callable[..., PreTrainedModel]
ROWS = whole(suffixes(3, 7, 0, 5))


def forward(model: PreTrainedModel, cache: Any, rows: list[list[int]], **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(rows), **cached(cache), **kwargs).logits


def logits_alone(model: PreTrainedModel, ids: list[int], count: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -count:]


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
    forward(model, cache, first)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, suffixes(5, 5, seed=400))
    handle.remove()
    got = forward(model, cache, later)
    want = [logits_alone(model, PREFIX + a + b, 2) for a, b in zip(first, later, strict=True)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", ["generate", "a refused generate"])
def test_positions_of_the_caller_are_kept_after_a_generate(tiny_model: Build, before: str) -> None:
    model, row = tiny_model("llama"), whole(suffixes(4))[0]
    cache = prefilled(model)
    if before == "generate":
        history = row + new_tokens(model, left_padded([row]), num_new=3, **cached(cache))[0][:-1]
    else:
        forward(model, cache, [row[len(PREFIX) :]])
        history = row
        with pytest.raises(ValueError, match="position 0"):
            new_tokens(model, left_padded([[96, *row[1:]]]), **cached(cache))
    new, positions = tokens(3, seed=4), torch.tensor([[40, 41, 42]])
    got = forward(model, cache, [new], position_ids=positions)
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
    cache.release(fork._state.prefix)
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
    forward(tiny_model("llama"), cache, suffixes(*[6] * 4))
    mask = cache._state.current_step().plan.suffix_mask
    assert mask is not None
    assert mask.shape == (1, 1, 6, 6)
