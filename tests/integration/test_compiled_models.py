"""A model under `torch.compile`: what the cache and attention do stays out of the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import HYBRIDS, LOCAL, SHARED_PATH
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
NUM_NEW = 4


def compile_forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]


def compile_layers(model: PreTrainedModel) -> None:
    inner: Any = model.base_model
    for layer in getattr(inner, "layers", None) or inner.h:
        layer.compile(backend="eager")


# of a family of each kind
@pytest.mark.parametrize(
    ("family", "compile_model"),
    [
        ("llama", compile_forward),
        ("llama", compile_layers),
        ("mistral", compile_forward),
        ("lfm2", compile_forward),
    ],
)
def test_a_compiled_model_gives_the_same_tokens(
    family: str, compile_model: Callable[[PreTrainedModel], None]
) -> None:
    torch._dynamo.reset()
    made = {**SHARED_PATH, **LOCAL, **HYBRIDS}[family]
    lengths = (5, 5) if family in HYBRIDS else (3, 7)
    rows = whole(suffixes(*lengths))
    want = alone(made.model(attn_implementation="eager"), rows, num_new=NUM_NEW)
    model = made.model(attn_implementation="granikv")
    compile_model(model)
    held = prefilled(model)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
    held.check_integrity()
    assert "dense route" not in held.explain()


def test_a_compiled_model_without_a_prefix_gives_the_same_tokens() -> None:
    torch._dynamo.reset()
    rows = suffixes(9, 12)
    want = alone(SHARED_PATH["llama"].model(attn_implementation="eager"), rows, num_new=NUM_NEW)
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    compile_forward(model)
    held = AsymmetricPagedCache(model.config)
    assert new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held)) == want
