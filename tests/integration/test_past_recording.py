"""`activate_past_recording`: what assisted decoding asks of a cache that it will crop.

Fixed-size caches of transformers keep more until the next `crop` then. Over a stored prefix nothing
has to be kept for that in attention layers, and states of hybrids cannot be given back: refused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import HYBRIDS, LOCAL, SHARED_PATH
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
from transformers import DynamicCache, PreTrainedModel

import hf_granikv
from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]
# full, latent, sliding, sliding with sinks, chunked, and layers that read another layer's keys
SERVED = ("llama", "deepseek_v3", "mistral", "gpt_oss", "llama4", "gemma3n")
CONVOLUTIONS = ("lfm2",)
# stock caches give convolution states back, and no recurrent ones
KINDS = (*CONVOLUTIONS, "qwen3_next", "falcon_h1", "granitemoehybrid", "zamba2")
REPETITIVE = [*PREFIX, *tokens(3, seed=8) * 3]


def drafted(kind: str, family: str) -> dict[str, Any]:
    """Gives the options that make `generate` draft tokens; an assistant of these weights, or others."""
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    seed = 0 if kind == "twin" else 3
    return {"assistant_model": {**SHARED_PATH, **LOCAL}[family].model(seed=seed)}


# ---- where tokens can be given back


@pytest.mark.parametrize("kind", ["lookup", "twin", "stranger"])
@pytest.mark.parametrize("family", SERVED)
def test_it_is_asked_before_the_first_forward_and_crops_follow(
    tiny_model: Build, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """Past a window of 8, with drafts that are all taken and drafts that are all dropped."""
    model, held, calls = tiny_model(family), prefilled(tiny_model(family)), []

    def noted(name: str) -> Callable[..., None]:
        method = getattr(AsymmetricPagedCache, name)

        def call(self: AsymmetricPagedCache, *args: Any) -> None:
            if self is held:
                calls.append((name, *map(int, args)))
            method(self, *args)

        return call

    for name in ("activate_past_recording", "crop"):
        monkeypatch.setattr(AsymmetricPagedCache, name, noted(name))
    got = new_tokens(
        model, left_padded([REPETITIVE]), num_new=20, **drafted(kind, family), **cached(held)
    )
    assert got == alone(model, [REPETITIVE], num_new=20)
    asked, *crops = calls
    assert asked == ("activate_past_recording",)
    assert {name for name, _ in crops} == {"crop"}
    assert all(count <= 0 for _, count in crops)
    assert kind != "stranger" or min(count for _, count in crops) < 0
    held.check_integrity()


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("family", SERVED)
def test_a_loop_by_hand_may_ask_and_crop(tiny_model: Build, family: str, is_asked: bool) -> None:
    """Six tokens forward and four back, all back, and none back."""
    model, stock = tiny_model(family), tiny_model(family, "eager")
    held = prefilled(model)
    if is_asked:
        held.activate_past_recording()
    ids = list(PREFIX)
    for count, num_cropped in ((6, 4), (3, 3), (5, 0), (1, 0), (7, 6), (9, 1)):
        new = tokens(count, seed=30 + count)
        want = logits_alone(stock, [*ids, *new], count)
        torch.testing.assert_close(step(model, held, [new])[0], want, atol=1e-4, rtol=1e-4)
        held.crop(-num_cropped)
        ids += new[: count - num_cropped]
        assert held.get_seq_length() == len(ids)
    held.check_integrity()


@pytest.mark.parametrize("family", SERVED)
def test_having_been_asked_changes_nothing_afterwards(tiny_model: Build, family: str) -> None:
    """transformers' own layers go on keeping what has left their window, until they are cropped."""
    model, rows = tiny_model(family), whole(suffixes(3, 7, 0))
    asked, never = prefilled(model), prefilled(model)
    asked.activate_past_recording()
    assert not any(asked.is_recording_past(i) for i in range(len(asked)))
    got = [new_tokens(model, left_padded(rows), **cached(held)) for held in (asked, never)]
    assert got == [alone(tiny_model(family, "eager"), rows)] * 2
    assert asked.stats() == never.stats()


def test_an_assistant_may_be_a_hybrid(tiny_model: Build) -> None:
    """It has a cache of transformers' own, which records what its convolutions have seen."""
    model, rows = tiny_model("llama"), whole(suffixes(5))
    assistant = HYBRIDS["lfm2"].model()
    held = prefilled(model)
    got = new_tokens(
        model, left_padded(rows), num_new=20, assistant_model=assistant, **cached(held)
    )
    assert got == alone(model, rows, num_new=20)


# ---- where they cannot


@pytest.mark.parametrize("has_prefix", [True, False], ids=["prefix", "plain"])
@pytest.mark.parametrize("family", KINDS)
def test_a_hybrid_refuses_by_layer_and_stays_as_it_is(
    tiny_model: Build, family: str, has_prefix: bool
) -> None:
    model, row = tiny_model(family), suffixes(5)[0]
    held = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    start = PREFIX if has_prefix else []
    step(model, held, [row])
    before = held.stats(), held.get_seq_length()
    with pytest.raises(
        ValueError, match=rf"assisted decoding is not possible: layer 0 of {family}"
    ):
        held.activate_past_recording()
    with pytest.raises(NotImplementedError, match="ask the cache"):
        held.layers[0].activate_past_recording()
    assert not any(held.is_recording_past(i) for i in range(len(held)))
    assert (held.stats(), held.get_seq_length()) == before
    want = logits_alone(model, [*start, *row, 7, 8], 2)
    torch.testing.assert_close(step(model, held, [[7, 8]])[0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lookup", "twin"])
@pytest.mark.parametrize("has_prefix", [True, False], ids=["prefix", "plain"])
@pytest.mark.parametrize("family", KINDS)
def test_drafts_for_a_hybrid_are_refused_before_any_forward(
    tiny_model: Build, family: str, has_prefix: bool, kind: str
) -> None:
    model, forwards = tiny_model(family), []
    held = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    before = held.stats()
    options = drafted(kind, "llama")
    # transformers itself knows that recurrent states cannot be given back
    stock = "not supported with stateful models"
    ours = f"layer 0 of {family} .* Decode without candidates"
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=ours if family in CONVOLUTIONS else stock):
            new_tokens(model, left_padded([REPETITIVE]), **options, **cached(held))
    finally:
        hook.remove()
    assert not forwards
    assert (held.stats(), held.batch_size) == (before, -1)
    rows = whole(suffixes(4, 4))
    assert new_tokens(model, left_padded(rows), num_new=4, **cached(held)) == alone(
        model, rows, num_new=4
    )


@pytest.mark.nothing_shared
@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_a_call_without_a_cache_of_ours_keeps_its_drafts(tiny_model: Build, family: str) -> None:
    """What stock caches can take back is left to them, though `hf_granikv.generate` is asked."""
    model, inputs = tiny_model(family), left_padded([REPETITIVE])
    options = {"num_new": 12, "prompt_lookup_num_tokens": 3}
    stock = {CACHE_ARGUMENT: DynamicCache(config=model.config)}
    want = new_tokens(model, inputs, **options, **stock)
    ours = {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4}
    assert new_tokens(model, inputs, **options, **ours) == want
