import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import LOCAL, SHARED_PATH
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
from refusals import assert_refused, observed
from torch import nn
from transformers import BatchEncoding, DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import UnannouncedForwardError

P = len(PREFIX)
ROWS = whole(suffixes(*SUFFIX_LENGTHS))
LLAMA = SHARED_PATH["llama"]


def another(**options: Any) -> PreTrainedModel:
    """Gives a model of its own, on which no cache was ever prefilled."""
    return LLAMA.model(attn_implementation="granikv", **options)


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


# ---- what prefill stores


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "deepseek_v3", "bloom"])
def test_the_prefix_holds_what_the_stock_cache_would(
    tiny_model: Callable[..., PreTrainedModel], family: str
) -> None:
    model = tiny_model(family, "eager")
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids())
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=prefix_ids(), **cached(stock))
    want = [layer.keys[0] for layer in stock.layers] + [layer.values[0] for layer in stock.layers]
    assert all(map(torch.equal, (*prefix.keys, *prefix.values), want))
    assert all(t.is_contiguous() for t in (*prefix.keys, *prefix.values))
    assert prefix.token_ids.tolist() == PREFIX
    assert cache.stats().hot_bytes == sum(t.numel() * t.element_size() for t in want)


@pytest.mark.parametrize(
    "ids",
    [PREFIX, torch.tensor(PREFIX), torch.tensor(PREFIX, dtype=torch.int32), prefix_ids()],
    ids=["list", "one_dimension", "int32", "two_dimensions"],
)
def test_ids_of_one_row_are_taken_in_any_form(model: PreTrainedModel, ids: Any) -> None:
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, ids)
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


GRAD_MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("second", GRAD_MODES)
@pytest.mark.parametrize("first", GRAD_MODES)
def test_gradient_modes_may_change_between_calls(
    model: PreTrainedModel, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    inputs, later = left_padded(ROWS), torch.tensor(suffixes(2, 2, 2, 2))
    with first():
        cache = prefilled(model)
        logits = [model(input_ids=torch.tensor(suffixes(5)), **cached(cache)).logits]
    with second():
        logits.append(model(input_ids=torch.tensor(suffixes(2)), **cached(cache)).logits)
        fork = copy.deepcopy(cache)
        fork.reorder_cache(torch.tensor([0, 0]))
    with first():
        logits.append(model(input_ids=torch.tensor(suffixes(3)), **cached(cache)).logits)
        fork_logits = model(input_ids=torch.tensor(suffixes(3) * 2), **cached(fork)).logits
    whole_row = torch.tensor([[*PREFIX, *suffixes(5)[0], *suffixes(2)[0], *suffixes(3)[0]]])
    with torch.no_grad():
        want = model(input_ids=whole_row, use_cache=False).logits[:, P:]
    torch.testing.assert_close(torch.cat(logits, 1).detach(), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        fork_logits.detach(), want[:, -3:].expand(2, -1, -1), atol=1e-4, rtol=0
    )
    with second():
        assert new_tokens(model, inputs, **cached(cache)) == alone(model, ROWS)
        model(input_ids=later, **cached(cache))
    cache.check_integrity()
    tensors = (*cache._state.prefixes.only.keys, *cache._state.prefixes.only.values)
    assert not any(t.requires_grad or t.is_inference() for t in tensors)


def test_the_prefix_is_computed_once_for_all_calls(model: PreTrainedModel) -> None:
    """Counts tokens at the embedding: the prefix, then each call's own, `4 + new - 1` per row."""
    counted: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _m, args, _out: counted.append(args[0].numel())
    )
    cache = prefilled(model)
    for seed in (1, 2, 3, 4):
        rows = whole(suffixes(4, 4, seed=seed * 50))
        new_tokens(model, left_padded(rows), num_new=6, **cached(cache))
    hook.remove()
    assert sum(counted) == P + 4 * 2 * (4 + 6 - 1)


# ---- what prefill refuses


BAD_PREFIXES: dict[str, tuple[Any, str]] = {
    "two_rows": (torch.tensor([PREFIX, PREFIX]), r"\(2, 20\)"),
    "three_dimensions": (prefix_ids()[None], r"\(1, 1, 20\)"),
    "no_tokens": (torch.zeros(1, 0, dtype=torch.int64), r"\(1, 0\)"),
    "no_tokens_in_a_list": ([], r"\(1, 0\)"),
    "no_rows": (torch.zeros(0, 5, dtype=torch.int64), r"\(0, 5\)"),
    "floats": (prefix_ids().float(), r"torch.float32"),
    "truth_values": (prefix_ids() > 5, r"torch.bool"),
    "one_number": (torch.tensor(5), r"\(\)"),
}


@pytest.mark.parametrize("name", BAD_PREFIXES)
def test_ids_that_are_not_one_row_are_refused(model: PreTrainedModel, name: str) -> None:
    ids, numbers = BAD_PREFIXES[name]
    cache = AsymmetricPagedCache(model.config)
    before = observed(cache)
    with pytest.raises(ValueError, match=f"{numbers}.*one row of token ids"):
        cache.prefill(model, ids)
    assert observed(cache) == before
    cache.prefill(model, prefix_ids())
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


def test_the_same_ids_are_stored_once_and_held_twice(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    prefix, held = cache._state.prefixes.only, cache.stats().hot_bytes
    assert cache.prefill(model, prefix_ids()) is prefix
    assert cache.stats().hot_bytes == held
    cache.release(prefix)
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)
    cache.release(prefix)
    assert cache.stats().hot_bytes == 0
    with pytest.raises(ValueError, match="does not hold"):
        cache.release(prefix)


def test_a_prefix_under_rows_that_run_already_is_refused(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    model(input_ids=torch.tensor(ROWS[1:2]), **cached(cache))
    before = observed(cache)
    with pytest.raises(ValueError, match="holds 1 row already"):
        cache.prefill(model, prefix_ids())
    assert observed(cache) == before


def test_a_released_prefix_makes_room_for_another(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids([5, 6, 7]))
    cache.release(prefix)
    assert (cache.stats().hot_bytes, cache.get_seq_length()) == (0, 0)
    cache.prefill(model, prefix_ids())
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


@pytest.mark.parametrize("is_of_another_cache", [True, False], ids=["another", "released"])
def test_a_prefix_that_is_not_held_cannot_be_released(
    model: PreTrainedModel, is_of_another_cache: bool
) -> None:
    cache, other = AsymmetricPagedCache(model.config), AsymmetricPagedCache(model.config)
    stranger = other.prefill(model, prefix_ids())
    if not is_of_another_cache:
        other.release(stranger)
        cache = other
        with pytest.raises(ValueError, match="does not hold"):
            cache.release(stranger)
        return
    cache.prefill(model, prefix_ids())
    assert_refused(cache, model, lambda: cache.release(stranger), ValueError, "does not hold")


def test_a_model_that_is_none_of_transformers_is_refused(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    with pytest.raises(ValueError, match="Linear contains no transformers model"):
        cache.prefill(nn.Linear(2, 2), prefix_ids())


def test_a_model_with_other_layers_than_the_config_is_refused(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(LLAMA.config(num_hidden_layers=3))
    with pytest.raises(ValueError, match="has 2 layers, the cache was built for 3"):
        cache.prefill(model, prefix_ids())
    assert cache.stats().hot_bytes == 0


# ---- which models may go on from a prefix


OTHERS: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "more_kv_heads": ({"num_key_value_heads": 4}, torch.float32, "4 heads x 8.*2 heads x 8"),
    "wider_heads": ({"head_dim": 16}, torch.float32, "2 heads x 16.*2 heads x 8"),
    "bfloat16": ({}, torch.bfloat16, "torch.bfloat16.*torch.float32"),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_shape_is_refused(
    model: PreTrainedModel, name: str, is_known: bool
) -> None:
    options, dtype, numbers = OTHERS[name]
    other, cache = another(**options).to(dtype), prefilled(model)
    if is_known:
        # a cache of its own has taught it to announce itself
        prefilled(other)
    new_tokens(model, left_padded(ROWS), num_new=2, **cached(cache))
    call = lambda: new_tokens(other, left_padded(ROWS), **cached(cache))  # noqa: E731
    assert_refused(cache, model, call, ValueError, numbers, culprit=other)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
def test_a_model_of_another_depth_is_refused(
    model: PreTrainedModel, num_layers: int, is_known: bool
) -> None:
    other, cache = another(num_hidden_layers=num_layers), prefilled(model)
    if is_known:
        prefilled(other)
    call = lambda: new_tokens(other, left_padded(ROWS), **cached(cache))  # noqa: E731
    assert_refused(cache, model, call, (ValueError, UnannouncedForwardError), None, culprit=other)


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
def test_a_model_with_other_weights_is_refused(model: PreTrainedModel, is_known: bool) -> None:
    """Keys of one model mean nothing to another; a hook left by another cache is no permission."""
    other, cache = another(seed=7), prefilled(model)
    if is_known:
        prefilled(other)
    call = lambda: new_tokens(other, left_padded(ROWS), **cached(cache))  # noqa: E731
    assert_refused(cache, model, call, (ValueError, UnannouncedForwardError), None, culprit=other)


@pytest.mark.parametrize("route", ["base_model", "forward_method"])
def test_a_forward_that_bypasses_the_model_is_refused(model: PreTrainedModel, route: str) -> None:
    cache = prefilled(model)
    forward = model.base_model if route == "base_model" else model.forward
    ids = torch.tensor(suffixes(3, 3))
    call = lambda: forward(input_ids=ids, **cached(cache))  # noqa: E731
    assert_refused(cache, model, call, UnannouncedForwardError, "cache.attach")


def test_an_attached_copy_of_the_model_may_go_on(model: PreTrainedModel) -> None:
    other, cache = another(), prefilled(model)
    cache.attach(other)
    assert new_tokens(other, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


def test_attaching_twice_reads_inputs_once(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    num_hooks = len(model._forward_pre_hooks)
    cache.attach(model)
    prefilled(model)
    assert len(model._forward_pre_hooks) == num_hooks == 1


def test_a_wrapper_around_the_model_is_looked_into(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(nn.ModuleDict({"inner": model}), prefix_ids())
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


def test_the_hook_leaves_stock_caches_alone(model: PreTrainedModel) -> None:
    prefilled(model)
    want = alone(model, ROWS)
    assert new_tokens(model, left_padded(ROWS)) == want
    stock = DynamicCache(config=model.config)
    assert new_tokens(model, left_padded(ROWS), **cached(stock)) == want


def test_a_model_that_changes_its_inputs_on_the_way_is_refused_for_that(
    model: PreTrainedModel,
) -> None:
    """It was taken for a model that the cache does not know."""
    cache = prefilled(model)
    cache.announce(model, {"input_ids": torch.tensor(suffixes(4, 4)), **cached(cache)})
    stored = torch.zeros(2, 2, 3, 8)
    with pytest.raises(
        UnannouncedForwardError, match=r"2 rows x 3 columns .* whose inputs have 2 x 4"
    ):
        cache.layers[0].update(stored, stored)
    cache.settle()
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


# ---- ordinary mistakes

MISTAKES: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "the_model_for_its_config": (
        AsymmetricPagedCache,
        "config is a LlamaForCausalLM; pass model.c",
    ),
    "the_config_for_the_model": (
        lambda m: AsymmetricPagedCache(m.config).prefill(m.config, prefix_ids()),
        "a LlamaConfig was given as the model",
    ),
    "all_that_a_tokenizer_gives": (
        lambda m: AsymmetricPagedCache(m.config).prefill(
            m, BatchEncoding({"input_ids": prefix_ids(), "attention_mask": prefix_ids()})
        ),
        "input_ids of a prefix is a BatchEncoding; give token ids",
    ),
    "a_dict": (
        lambda m: AsymmetricPagedCache(m.config).prefill(m, {"input_ids": prefix_ids()}),
        "input_ids of a prefix is a dict; give token ids",
    ),
    "a_text": (
        lambda m: AsymmetricPagedCache(m.config).prefill(m, "You are a helpful assistant."),
        "input_ids of a prefix is a str; give token ids",
    ),
    "an_id_of_another_tokenizer": (
        lambda m: AsymmetricPagedCache(m.config).prefill(m, torch.tensor([[5, 500]])),
        "contains 500; LlamaForCausalLM knows ids from 0 to 96",
    ),
    "an_id_of_nothing": (
        lambda m: AsymmetricPagedCache(m.config).prefill(m, torch.tensor([[5, -100, 6]])),
        "contains -100; LlamaForCausalLM knows ids from 0 to 96",
    ),
    "a_model_of_other_layers": (
        lambda m: AsymmetricPagedCache(LOCAL["mistral"].config()).prefill(m, prefix_ids()),
        "is full attention, the cache was built for attention in a window of 8 tokens",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_called_by_its_name(model: PreTrainedModel, name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call(model)
