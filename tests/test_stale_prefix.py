"""A prefix is never served to a model that would have computed another one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import an_adapter_for_each_row, with_lora
from agents import MESSAGES, byte_tokenizer, llama, new_runner
from families import SHARED_PATH
from prompts import (
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    whole,
)
from refusals import observed
from torch import nn
from transformers import PreTrainedModel

import hf_granikv
from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import StalePrefixError

P = len(PREFIX)
ROWS = whole(suffixes(*SUFFIX_LENGTHS))


@pytest.fixture
def model() -> PreTrainedModel:
    """Gives a model of its own: what the tests share must keep its weights."""
    return SHARED_PATH["llama"].model(attn_implementation="granikv")


def assert_stale(cache: AsymmetricPagedCache, model: PreTrainedModel, call: Any, text: str) -> None:
    before, finished = observed(cache), []
    hook = model.register_forward_hook(lambda *_: finished.append(1))
    try:
        with pytest.raises(StalePrefixError, match=text):
            call()
    finally:
        hook.remove()
    assert not finished
    assert observed(cache) == before


def shift(model: PreTrainedModel) -> None:
    """Changes one weight in place."""
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


ROUTES: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "generate": lambda m, c: new_tokens(m, left_padded(ROWS), **cached(c)),
    "generate_in_chunks": lambda m, c: new_tokens(
        m, left_padded(ROWS), prefill_chunk_size=3, **cached(c)
    ),
    "beams": lambda m, c: new_tokens(m, left_padded(ROWS), num_beams=2, **cached(c)),
    "prompt_lookup": lambda m, c: new_tokens(
        m, left_padded(ROWS[1:2]), prompt_lookup_num_tokens=2, **cached(c)
    ),
    "forward": lambda m, c: m(input_ids=torch.tensor(suffixes(3)), **cached(c)),
    "attach": lambda m, c: c.attach(m),
}


@pytest.mark.smoke
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_a_model_that_has_changed_is_refused(
    model: PreTrainedModel, route: str, is_used: bool
) -> None:
    """As with the adapters below, but any weight."""
    cache = prefilled(model)
    if is_used:
        new_tokens(model, left_padded(ROWS), num_new=2, **cached(cache))
        cache.reset()
    shift(model)
    name = "model.layers.0.self_attn.k_proj.weight was written to"
    remedy = rf"{name}.*call cache.invalidate\(\) and prefill again"
    assert_stale(cache, model, lambda: ROUTES[route](model, cache), remedy)


def test_rows_of_a_changed_model_do_not_go_on_in_generate(model: PreTrainedModel) -> None:
    """Its mask takes the rows of the call before for granted, which that model computed."""
    cache, row = prefilled(model), whole(suffixes(3))
    out = model.generate(**left_padded(row), **cached(cache), max_new_tokens=4, do_sample=False)
    shift(model)
    inputs = {"input_ids": out[:, -1:], "attention_mask": torch.ones_like(out)}
    assert_stale(cache, model, lambda: new_tokens(model, inputs, **cached(cache)), "written to")


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda c: c.fork()])
def test_forks_of_a_stale_cache_are_stale(model: PreTrainedModel, twin: Any) -> None:
    cache = twin(prefilled(model))
    shift(model)
    assert_stale(cache, model, lambda: ROUTES["generate"](model, cache), "written to")


def test_a_weight_that_is_put_back_past_autograd_is_served_again(model: PreTrainedModel) -> None:
    cache, weight = prefilled(model), model.model.layers[0].self_attn.k_proj.weight
    kept = weight.data
    weight.data = kept * 1.5
    assert_stale(cache, model, lambda: ROUTES["generate"](model, cache), "written to or replaced")
    weight.data = kept
    assert ROUTES["generate"](model, cache) == alone(model, ROWS)


def test_another_adapter_is_refused_until_it_is_switched_back(model: PreTrainedModel) -> None:
    """vllm-project/vllm #3264, #30931 and #42125, ggml-org/llama.cpp #26207: keys that were computed
    under one adapter were served to another."""
    layers = with_lora(model, "a", "b")
    cache, want = prefilled(model), alone(model, ROWS)
    for layer in layers:
        layer.active_adapter = "b"
    assert alone(model, ROWS) != want
    assert_stale(cache, model, lambda: ROUTES["generate"](model, cache), "active_adapter is 'b'")
    for layer in layers:
        layer.active_adapter = "a"
    assert ROUTES["generate"](model, cache) == want


def test_rows_with_adapters_of_their_own_are_refused(model: PreTrainedModel) -> None:
    """The prefix of one adapter was served to the rows of all of them."""
    layers, rows, names = with_lora(model, "a", "b"), whole(suffixes(5, 5)), ["a", "b"]
    cache = prefilled(model)
    with an_adapter_for_each_row(layers, names):
        for call in (
            lambda: new_tokens(model, left_padded(rows), **cached(cache)),
            lambda: model(input_ids=torch.tensor(suffixes(5, 5)), **cached(cache)),
            lambda: AsymmetricPagedCache(model.config).prefill(model, prefix_ids()),
        ):
            before = observed(cache)
            with pytest.raises(
                ValueError, match="adapter_names lets rows of this call run through"
            ):
                call()
            assert observed(cache) == before
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)


@pytest.mark.nothing_shared
def test_shared_prompts_of_such_rows_are_left_to_the_stock_path(model: PreTrainedModel) -> None:
    layers, rows, names = with_lora(model, "a", "b"), whole(suffixes(5, 5)), ["a", "b"]
    with an_adapter_for_each_row(layers, names):
        want = new_tokens(model, left_padded(rows), use_cache=False)
        options = {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4}
        assert new_tokens(model, left_padded(rows), **options) == want
    assert want != alone(model, rows)


# ---- invalidate


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_an_invalidated_cache_is_empty(model: PreTrainedModel, is_used: bool) -> None:
    cache = prefilled(model)
    if is_used:
        new_tokens(model, left_padded(ROWS), num_new=2, **cached(cache))
    fork = cache.fork()
    cache.invalidate()
    assert (cache.stats().hot_bytes, cache.stats().cold_bytes) == (0, 0)
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    assert cache.stats().hot_tokens == 0
    cache.check_integrity()
    cache.invalidate()
    cache.prefill(model, prefix_ids())
    for either in (cache, fork):
        assert new_tokens(model, left_padded(ROWS), **cached(either)) == alone(model, ROWS)


def test_an_invalidated_cache_knows_no_model(model: PreTrainedModel) -> None:
    """The second object had the weights that the first had then, and has them still."""
    other, cache = SHARED_PATH["llama"].model(attn_implementation="granikv"), prefilled(model)
    cache.attach(other)
    shift(model)
    cache.invalidate()
    cache.prefill(model, prefix_ids())
    with pytest.raises(Exception, match=r"cache\.attach") as refusal:
        ROUTES["generate"](other, cache)
    assert isinstance(refusal.value, RuntimeError | ValueError)
    with pytest.raises(StalePrefixError, match=r"k_proj\.weight has other values"):
        cache.attach(other)
    assert ROUTES["generate"](model, cache) == alone(model, ROWS)


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_training_loop_refreshes_its_prefix(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    """Generates a group of answers, rewards them, steps; each time with the weights of the day."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **options)
    cache = AsymmetricPagedCache(model.config)
    prompt = left_padded(whole(suffixes(4)))
    for step in range(3):
        cache.invalidate()
        cache.prefill(model, prefix_ids())
        torch.manual_seed(step)
        out = model.generate(
            **prompt, **cached(cache), do_sample=True, num_return_sequences=4, max_new_tokens=6
        )
        torch.manual_seed(step)
        want = model.generate(
            **prompt, use_cache=False, do_sample=True, num_return_sequences=4, max_new_tokens=6
        )
        assert out.tolist() == want.tolist()
        rewards = (out[:, P + 4 :] % 2).float().mean(1)
        log_probs = model(input_ids=out, use_cache=False).logits[:, :-1].log_softmax(-1)
        taken = log_probs.gather(2, out[:, 1:, None])[:, P + 3 :, 0].sum(1)
        optimizer.zero_grad()
        (-(rewards - rewards.mean()) * taken).sum().backward()
        optimizer.step()
        assert_stale(cache, model, lambda: ROUTES["generate"](model, cache), "was written to")


# ---- other objects


def test_an_object_with_other_weights_cannot_be_attached(model: PreTrainedModel) -> None:
    """vllm-project/vllm #3264, by a second object."""
    other, cache = SHARED_PATH["llama"].model(seed=3), prefilled(model)
    call = lambda: cache.attach(other)  # noqa: E731
    assert_stale(cache, other, call, "another LlamaForCausalLM .* has other values")
    assert not other._forward_pre_hooks
    assert ROUTES["generate"](model, cache) == alone(model, ROWS)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "changed"])
def test_nothing_can_be_attached_without_a_model_to_compare_with(is_gone: bool) -> None:
    first, other = (SHARED_PATH["llama"].model(attn_implementation="granikv") for _ in range(2))
    cache = prefilled(first)
    if is_gone:
        del first
    else:
        shift(first)
    assert_stale(cache, other, lambda: cache.attach(other), "gone or has changed. Call cache.inv")


def test_an_attached_object_is_watched_too(model: PreTrainedModel) -> None:
    other, cache = SHARED_PATH["llama"].model(attn_implementation="granikv"), prefilled(model)
    cache.attach(other)
    shift(other)
    assert_stale(cache, other, lambda: ROUTES["generate"](other, cache), "written to")
    assert ROUTES["generate"](model, cache) == alone(model, ROWS)


def test_a_new_prefix_forgets_the_objects_of_the_old_one(model: PreTrainedModel) -> None:
    other, cache = SHARED_PATH["llama"].model(attn_implementation="granikv"), prefilled(model)
    cache.attach(other)
    cache.release(cache._state.prefixes.only)
    shift(model)
    cache.prefill(model, prefix_ids())
    with pytest.raises(RuntimeError, match=r"cache\.attach"):
        ROUTES["forward"](other, cache)


def test_a_wrapper_is_watched_through(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(nn.ModuleDict({"inner": model}), prefix_ids())
    shift(model)
    assert_stale(cache, model, lambda: ROUTES["generate"](model, cache), "written to")


# ---- the runner


@pytest.mark.parametrize("num_changes", [1, 2])
def test_a_runner_computes_a_stale_prefix_anew(num_changes: int) -> None:
    runner = new_runner(llama(), byte_tokenizer())
    stale = runner.agents["ann"].prefix
    runner.run(MESSAGES, max_new_tokens=3)
    for _ in range(num_changes):
        shift(runner.model)
        prompts = [runner.prompt_ids(name, "And now?") for name in MESSAGES]
        replies = runner.run(dict.fromkeys(MESSAGES, "And now?"), max_new_tokens=6)
        want = [
            new_tokens(runner.model, left_padded([ids]), num_new=6, use_cache=False)[0]
            for ids in prompts
        ]
        assert [list(replies[name].token_ids) for name in MESSAGES] == want
    assert {id(agent.prefix) for agent in runner.agents.values()} != {id(stale)}
    assert len(runner._shares) == 1
    with pytest.raises(ValueError, match="the prefix of one of its agents"):
        runner.agent("dee", stale)
    runner.agent("dee", runner.agents["ann"].prefix)


def test_a_runner_that_cannot_compute_anew_keeps_what_it_has() -> None:
    runner = new_runner(llama(attention_dropout=0.5), byte_tokenizer())
    stale = runner.agents["ann"].prefix
    shift(runner.model)
    runner.model.train()
    with pytest.raises(ValueError, match="training mode and has dropout"):
        runner.run(MESSAGES, max_new_tokens=3)
    assert runner.agents["ann"].prefix is stale
    runner.model.eval()
    ids = runner.prompt_ids("ann", "Why?")
    reply = runner.run({"ann": "Why?"}, max_new_tokens=4)["ann"]
    assert (
        list(reply.token_ids)
        == new_tokens(runner.model, left_padded([ids]), num_new=4, use_cache=False)[0]
    )


def test_a_runner_may_cut_prompts() -> None:
    whole_reply, cut_reply = (
        new_runner(llama(), byte_tokenizer()).run(MESSAGES, max_new_tokens=5, **options)
        for options in ({}, {"prefill_chunk_size": 6})
    )
    assert cut_reply == whole_reply
