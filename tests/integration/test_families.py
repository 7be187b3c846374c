"""Every family, under every attention: the tokens of each row alone, and the road they took."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from families import DENSE_ROUTE, REFUSED, SHARED_PATH, Family
from prompts import (
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
ATTENTIONS = ("granikv", "sdpa", "eager")
# no attention interface, so these names are not for them
EAGER_ONLY = {"bloom": ("sdpa", "granikv"), "gpt_neo": ("sdpa", "granikv"), "falcon": ("granikv",)}
ROWS = whole(suffixes(*SUFFIX_LENGTHS))
DENSE_CASES = [
    (family, attention)
    for family in DENSE_ROUTE
    for attention in ATTENTIONS
    if attention not in EAGER_ONLY.get(family, ())
]


@cache
def expected(family: str) -> list[list[int]]:
    return alone({**SHARED_PATH, **DENSE_ROUTE}[family].model(attn_implementation="eager"), ROWS)


def check_family(model: PreTrainedModel, family: str) -> AsymmetricPagedCache:
    held = prefilled(model)
    got = new_tokens(model, left_padded(ROWS), **cached(held))
    assert got == expected(family)
    held.check_integrity()
    return held


class Rows(TorchDispatchMode):
    """Counts the rows that are multiplied with one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.pointer, self.multiplied = weight.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[1].data_ptr() == self.pointer:
            self.multiplied += len(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.smoke
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", SHARED_PATH)
def test_a_family_of_the_shared_path_is_exact(
    tiny_model: Build, family: str, attention: str
) -> None:
    """Ragged rows; GPT-2 and OPT, whose positions are learned, gave others with a cache than without:
    huggingface/transformers #18104 and #3021."""
    held = check_family(tiny_model(family, attention), family)
    report, steps = held.explain(), held.stats().backend_steps
    if attention == "granikv":
        assert sum(steps.values()) == 10
        assert "dense route" not in report
    else:
        assert steps == {}
        assert "dense route: keys or values of 2 layers" in report


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "attention"), DENSE_CASES)
def test_a_family_of_the_dense_route_is_exact_and_says_so(
    tiny_model: Build, family: str, attention: str
) -> None:
    held = check_family(tiny_model(family, attention), family)
    assert "dense route: keys or values of 2 layers were put together 40 times" in held.explain()
    assert held.stats().backend_steps == {}


def test_latents_are_expanded_once_for_all_rows() -> None:
    """Tokens through the layer that expands them: the prefix once, not once per row."""
    model = SHARED_PATH["deepseek_v3"].model(attn_implementation="granikv")
    held, expand = prefilled(model), model.model.layers[0].self_attn.kv_b_proj
    with Rows(expand.weight) as rows, torch.no_grad():
        model(**suffix_only(suffixes(4, 4, 4)), **cached(held))
    assert rows.multiplied == len(PREFIX) + 3 * 4
    stored = held._state.prefixes.only.keys[0]
    assert stored.shape == (1, len(PREFIX), 16), "one head of latents, as wide as kv_lora_rank"


@pytest.mark.parametrize("family", ["falcon", "gpt_neo", "bloom"])
def test_a_family_without_the_interface_stays_exact_when_asked_to_switch(family: str) -> None:
    model = DENSE_ROUTE[family].model(attn_implementation="eager")
    model.set_attn_implementation("granikv")
    check_family(model, family)


@pytest.mark.parametrize("family", ["falcon", "gpt_neo"])
def test_a_family_that_does_not_know_the_attention_is_refused_when_built(family: str) -> None:
    with pytest.raises((KeyError, ValueError), match="granikv"):
        DENSE_ROUTE[family].model(attn_implementation="granikv")


@pytest.mark.parametrize("family", {**SHARED_PATH, **DENSE_ROUTE})
def test_logits_stay_within_rounding_of_each_row_alone(tiny_model: Build, family: str) -> None:
    """As huggingface/transformers #18104 asks, padded rows too."""
    model = tiny_model(family, "granikv" if family in SHARED_PATH else "eager")
    rows, held = suffixes(3, 6), prefilled(model)
    with torch.no_grad():
        got = model(**suffix_only(rows), **cached(held)).logits
    for row, ids in enumerate(rows):
        want = logits_alone(model, PREFIX + ids, len(ids))
        torch.testing.assert_close(got[row, -len(ids) :], want, atol=1e-4, rtol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused_by_name(family: str) -> None:
    config = REFUSED[family].config()
    kinds = "sliding_attention|chunked_attention|linear_attention|conv"
    with pytest.raises(ValueError, match=rf"layer 0 of {config.model_type} is of kind ({kinds})"):
        AsymmetricPagedCache(config)


@pytest.mark.nothing_shared
def test_local_attention_of_gpt_neo_is_exact_within_its_window(tiny_model: Build) -> None:
    """Its local layers count columns, so padded rows are right only while all columns fit."""
    model = DENSE_ROUTE["gpt_neo"].model(attn_implementation="eager", window_size=16)
    rows = whole(suffixes(6, 6))
    assert new_tokens(model, left_padded(rows), **cached(prefilled(model))) == alone(model, rows)
    ragged = left_padded(whole(suffixes(3, 6)))
    with pytest.raises(ValueError, match=r"local attention .* 16 mask columns"):
        new_tokens(model, ragged, **cached(prefilled(model)))


ENCODER_LIKE = {"is_decoder": True, "num_key_value_heads": None}
COUNTS_FROM_ELSEWHERE = Family("RobertaConfig", ENCODER_LIKE)
COUNTS_COLUMNS = {
    "roformer": Family("RoFormerConfig", ENCODER_LIKE),
    "mpt": Family("MptConfig", {"n_layers": 2, "n_heads": 4, "d_model": 32, "use_cache": True}),
}


@pytest.mark.nothing_shared
def test_a_family_whose_own_positions_start_elsewhere_is_exact() -> None:
    """RoBERTa counts from its pad id on, but generate hands it positions from 0 on."""
    model = COUNTS_FROM_ELSEWHERE.model(attn_implementation="eager")
    assert new_tokens(model, left_padded(ROWS), **cached(prefilled(model))) == alone(model, ROWS)


@pytest.mark.nothing_shared
@pytest.mark.parametrize("family", COUNTS_COLUMNS)
def test_a_family_that_counts_pads_as_positions_is_exact_without_or_refused(family: str) -> None:
    model, rows = COUNTS_COLUMNS[family].model(attn_implementation="eager"), whole(suffixes(4, 4))
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), **cached(held)) == alone(model, rows)
    with pytest.raises(ValueError, match="counts pads as positions"):
        new_tokens(model, left_padded(ROWS), **cached(held))


def rope(kind: str, original_len: int) -> dict[str, object]:
    named = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        named |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        return {
            "rope_parameters": named | {"original_max_position_embeddings": original_len},
            "original_max_position_embeddings": original_len,
        }
    return {"rope_parameters": named, "max_position_embeddings": original_len}


@pytest.mark.parametrize("lay_out", [left_padded, suffix_only], ids=["whole_ids", "suffix_ids"])
@pytest.mark.parametrize("original_len", [22, 28, 200], ids=lambda n: f"up_to_{n}")
@pytest.mark.parametrize("family", ["phi3-longrope", "llama-longrope", "llama-dynamic"])
def test_a_rope_that_depends_on_the_length_is_never_silently_wrong(
    family: str, original_len: int, lay_out: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """20 shared tokens, 5 of their own, 10 new: the limit is passed by the prompt, later, never.

    As for Phi-3 in ggml-org/llama.cpp #24875; transformers drops the cache there.
    """
    name, kind = family.split("-")
    model = SHARED_PATH[name].model(attn_implementation="granikv", **rope(kind, original_len))
    rows = suffixes(5)
    inputs = lay_out(whole(rows) if lay_out is left_padded else rows)
    outcome: object = "no outcome"
    try:
        outcome = new_tokens(model, inputs, **cached(prefilled(model)))
    except ValueError as error:
        outcome = "refused for its rope" if "rope" in str(error).lower() else str(error)
    assert outcome in ("refused for its rope", alone(model, whole(rows)))
