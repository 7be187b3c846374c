"""Lengths at which a model would go wrong are refused before a call's first token, not on the way."""

from collections.abc import Callable
from typing import Any

import pytest
from families import DENSE_ROUTE, LOCAL, SHARED_PATH, Family
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole
from refusals import observed
from transformers import PreTrainedModel
from unshared import some_unshared

ROWS = whole(suffixes(5, 3))  # the longer one has 25 tokens
LIMIT = 30
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **options}


TUNED = {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "attn_scale": 0.5}
# the model, and tokens that it may still generate
LIMITED: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "dynamic": (
        lambda: SHARED_PATH["llama"].model(
            attn_implementation="granikv",
            rope_parameters=rope("dynamic"),
            max_position_embeddings=LIMIT,
        ),
        6,
    ),
    "longrope": (
        lambda: SHARED_PATH["llama"].model(
            attn_implementation="granikv",
            rope_parameters=rope("longrope", **LONG, original_max_position_embeddings=LIMIT),
        ),
        6,
    ),
    "doge": (
        lambda: Family("DogeConfig", {"keep_window_size": LIMIT}).model(
            attn_implementation="granikv"
        ),
        6,
    ),
    "llama4": (
        lambda: LOCAL["llama4"].model(attn_implementation="granikv", floor_scale=LIMIT, **TUNED),
        5,
    ),
    "gpt_neo": (
        lambda: DENSE_ROUTE["gpt_neo"].model(attn_implementation="eager", window_size=LIMIT),
        6,
    ),
}


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 2}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", some_unshared(LIMITED, ["doge"]))
def test_a_call_that_may_get_too_long_is_refused_at_its_start(
    name: str, chunks: dict[str, int]
) -> None:
    build, num_new = LIMITED[name]
    model, inputs, finished = build(), left_padded(ROWS), []
    cache = prefilled(model)
    before = observed(cache)
    hook = model.register_forward_hook(lambda *_: finished.append(1))
    with pytest.raises(ValueError, match=r"Stay below|Run rows of equal length"):
        new_tokens(model, inputs, num_new=num_new + 1, **chunks, **cached(cache))
    hook.remove()
    assert not finished
    assert observed(cache) == before
    got = new_tokens(model, inputs, num_new=num_new, **chunks, **cached(cache))
    assert got == alone(model, ROWS, num_new=num_new)
