"""Gradient modes of prefill and of what follows it, and the gradients themselves."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import DENSE_ROUTE, HYBRIDS, LOCAL, SHARED_PATH
from prompts import (
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import CutGraphError

ROWS = whole(suffixes(*SUFFIX_LENGTHS))
MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("chunk_size", [None, 3], ids=["whole", "cut"])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_prefix_of_any_mode_serves_calls_of_any_mode(
    tiny_model: Callable[..., PreTrainedModel],
    first: Callable[[], Any],
    second: Callable[[], Any],
    chunk_size: int | None,
) -> None:
    model, want = tiny_model("llama"), alone(tiny_model("llama"), ROWS)
    cache = AsymmetricPagedCache(model.config)
    with first():
        prefix = cache.prefill(model, prefix_ids(), chunk_size=chunk_size)
    with second():
        options = {"prefill_chunk_size": chunk_size, **cached(cache)}
        assert new_tokens(model, left_padded(ROWS), **options) == want
        twin = copy.deepcopy(cache)
    with first():
        assert new_tokens(model, left_padded(ROWS), **options) == want
        assert new_tokens(model, left_padded(ROWS), **cached(twin)) == want
    cache.check_integrity()
    tensors = (*prefix.keys, *prefix.values)
    assert not any(t.requires_grad or t.is_inference() for t in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_made_in_inference_mode_is_served(mode: Callable[[], Any]) -> None:
    with torch.inference_mode():
        model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    want = alone(model, ROWS)
    cache = AsymmetricPagedCache(model.config)
    with mode():
        cache.prefill(model, prefix_ids())
        assert new_tokens(model, left_padded(ROWS), **cached(cache)) == want


# ---- gradients: the prefix is a constant, the tokens after it are not

Gradients = dict[str, Tensor]
TRAINED: dict[str, str] = {
    **dict.fromkeys(("llama", "gpt2", "granite", "deepseek_v3", "diffllama", "jetmoe"), "granikv"),
    **dict.fromkeys(("mistral", "gemma2", "gpt_oss", "llama4", "gemma3n"), "granikv"),
    **dict.fromkeys(("bloom", "gpt_neo"), "eager"),
}
ANY = {**SHARED_PATH, **LOCAL, **DENSE_ROUTE, **HYBRIDS}


def fresh(family: str, attention: str = "granikv") -> PreTrainedModel:
    return ANY[family].model(attn_implementation=attention)


def loss(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same for a row alone and in a batch."""
    of_ids = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return (of_ids if mask is None else of_ids * mask[:, -ids.shape[1] :]).sum()


def gradients(model: PreTrainedModel) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_alone(
    family: str, known: Sequence[Sequence[int]], new: Sequence[Sequence[int]]
) -> Gradients:
    """Of each row by itself, over transformers' own cache of constants."""
    model = fresh(family, "eager")
    for before, ids in zip(known, new, strict=True):
        cache = DynamicCache(config=model.config)
        if before:
            with torch.no_grad():
                model(input_ids=torch.tensor([before]), **cached(cache))
        row = torch.tensor([ids])
        loss(model(input_ids=row, **cached(cache)).logits, row).backward()
    return gradients(model)


def assert_same(got: Gradients, want: Gradients) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize("lengths", [(4, 4), (3, 6, 1)], ids=["even", "ragged"])
@pytest.mark.parametrize("family", TRAINED)
def test_tokens_after_a_prefix_are_trained_as_over_constants(
    family: str, lengths: tuple[int, ...]
) -> None:
    """Their own keys and values had no gradients, and in half of the families nothing had."""
    model, rows = fresh(family, TRAINED[family]), suffixes(*lengths)
    inputs = suffix_only(rows)
    logits = model(**inputs, **cached(prefilled(model))).logits
    loss(logits, inputs["input_ids"], inputs["attention_mask"]).backward()
    assert_same(gradients(model), gradients_alone(family, [PREFIX] * len(rows), rows))


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "granitemoehybrid"])
def test_tokens_after_states_are_trained_as_after_constants(family: str) -> None:
    model, rows = fresh(family), suffixes(4, 4)
    inputs = suffix_only(rows)
    logits = model(**inputs, **cached(prefilled(model))).logits
    loss(logits, inputs["input_ids"], inputs["attention_mask"]).backward()
    assert_same(gradients(model), gradients_alone(family, [PREFIX] * 2, rows))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_several_prefixes_are_trained_each_as_over_its_own(family: str) -> None:
    model = fresh(family)
    known = [PREFIX, [*PREFIX, *tokens(6, seed=5)], tokens(9, seed=6), []]
    cache = prefilled(model)
    cache.prefill(model, prefix_ids(known[1][20:]), parent=cache.rows.prefixes.only)
    cache.prefill(model, prefix_ids(known[2]))
    rows = suffixes(3, 6, 1, 4)
    prompts = left_padded([[*before, *row] for before, row in zip(known, rows, strict=True)])
    cache.bind(**prompts)
    inputs = left_padded(rows)
    widths = [[0] * (26 - len(before)) + [1] * len(before) for before in known]
    mask = torch.cat([torch.tensor(widths), inputs["attention_mask"]], 1)
    logits = model(input_ids=inputs["input_ids"], attention_mask=mask, **cached(cache)).logits
    loss(logits, inputs["input_ids"], inputs["attention_mask"]).backward()
    assert_same(gradients(model), gradients_alone(family, known, rows))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_a_step_of_ragged_rows_is_trained_over_what_they_hold(family: str) -> None:
    model, held, new = fresh(family), suffixes(3, 6, 1), suffixes(1, 1, 1, seed=7)
    cache = prefilled(model)
    with torch.no_grad():
        model(**suffix_only(held), **cached(cache))
    ids = torch.tensor(new)
    loss(model(input_ids=ids, **cached(cache)).logits, ids).backward()
    assert_same(gradients(model), gradients_alone(family, whole(held), new))


def test_a_step_whose_first_layer_has_no_graph_is_trained_alike() -> None:
    """Keys of a frozen layer lie in the pool, those of the next have a graph: one step, two ways."""
    found = []
    for is_ours in (True, False):
        model = fresh("llama", "granikv" if is_ours else "eager")
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.requires_grad_(True)
        cache, row = DynamicCache(config=model.config), [*PREFIX, *suffixes(5)[0]]
        if is_ours:
            cache, row = prefilled(model), row[len(PREFIX) :]
        ids = torch.tensor(suffixes(1, seed=7))
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), **cached(cache))
        loss(model(input_ids=ids, **cached(cache)).logits, ids).backward()
        found.append(gradients(model))
    assert len(found[0]) == 2
    assert_same(*found)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama", "gpt2"])
def test_training_without_a_cache_is_that_of_eager_attention(family: str) -> None:
    """Soft-capped scores and sinks go through kernels that write in place."""
    ids, found = torch.tensor(suffixes(9, 9)), []
    for attention in ("granikv", "eager"):
        model = fresh(family, attention).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert_same(*found)


def test_a_drop_in_cache_keeps_the_graph_of_the_forward_under_way() -> None:
    model, held, new = fresh("llama"), suffixes(5), suffixes(3, seed=7)
    cache = AsymmetricPagedCache(model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor(held), **cached(cache))
    ids = torch.tensor(new)
    loss(model(input_ids=ids, **cached(cache)).logits, ids).backward()
    assert_same(gradients(model), gradients_alone("llama", held, new))


@pytest.mark.parametrize("has_prefix", [True, False], ids=["prefix", "drop_in"])
@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_a_backward_into_an_earlier_forward_is_refused(attention: str, has_prefix: bool) -> None:
    """transformers' own cache would have gone on through it."""
    model = fresh("llama", attention)
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    ids = torch.tensor(suffixes(4, 4))
    for _ in range(3):
        # no backward, no harm
        logits = model(input_ids=ids, **cached(cache)).logits
    with pytest.raises(
        CutGraphError, match=r"in one forward, those before them under torch.no_grad"
    ):
        logits.sum().backward()
    cache.reset()
    model(input_ids=ids, **cached(cache)).logits.sum().backward()
    cache.crop(-4)
    model(input_ids=ids, **cached(cache)).logits.sum().backward()


def test_a_forward_that_failed_cuts_no_graph() -> None:
    model = fresh("llama")
    cache, ids = prefilled(model), torch.tensor(suffixes(4, 4))
    with torch.no_grad():
        model(input_ids=ids, **cached(cache))
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids, **cached(cache))
    hook.remove()
    model(input_ids=ids, **cached(cache)).logits.sum().backward()


def test_a_backward_leaves_the_prefix_as_it_was() -> None:
    model = fresh("llama")
    cache = prefilled(model)
    keys = [key.clone() for key in cache.rows.prefixes.only.keys]
    model(input_ids=torch.tensor(suffixes(5)), **cached(cache)).logits.sum().backward()
    assert all(map(torch.equal, cache.rows.prefixes.only.keys, keys))
    # the next forward writes to the pool in which tokens of this one lie
    cache.reset()
    first = model(input_ids=torch.tensor(suffixes(5)), **cached(cache)).logits.sum()
    with torch.no_grad():
        model(input_ids=torch.tensor(suffixes(1)), **cached(cache))
    first.backward()
