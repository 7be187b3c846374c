"""Every cell of the matrix in `conformance.py`, and that the documentation shows that matrix."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import (
    DENSE_ROUTE,
    HYBRID_MODES,
    HYBRIDS,
    LAYOUTS,
    MODES,
    SERVED,
    Mode,
    attention_of,
    table,
)
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole
from transformers import PreTrainedModel, set_seed

Build = Callable[..., PreTrainedModel]
NUM_NEW = 10


def options_of(family: str, mode: Mode) -> dict[str, Any]:
    options = dict(mode.options)
    if options.get("assistant_model"):
        options["assistant_model"] = assistant(family)
    return options


@cache
def assistant(family: str) -> PreTrainedModel:
    return SERVED[family].model(seed=3, attn_implementation="eager")


def called(model: PreTrainedModel, mode: Mode, num_new: int, **options: Any) -> Any:
    set_seed(11)
    return model.generate(
        **left_padded(whole(mode.rows())),
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        output_scores=mode.is_scored,
        **{"do_sample": False, **options},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SERVED)
def test_a_mode_is_exact_on_a_family(tiny_model: Build, family: str, mode: str) -> None:
    held = check_mode(tiny_model, family, MODES[mode], atol=1e-4)
    assert ("dense route" in held.explain()) == (family in DENSE_ROUTE)


@pytest.mark.parametrize("mode", HYBRID_MODES)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_mode_is_exact_on_a_hybrid(tiny_model: Build, family: str, mode: str) -> None:
    check_mode(tiny_model, family, HYBRID_MODES[mode], atol=3e-3, num_new=4)


def check_mode(
    tiny_model: Build, family: str, way: Mode, *, atol: float, num_new: int = NUM_NEW
) -> Any:
    model, stock = tiny_model(family, attention_of(family)), tiny_model(family, "eager")
    options, held = options_of(family, way), prefilled(model)
    if way.is_ragged or way.is_drafted:
        rows = whole(way.rows())
        got = new_tokens(model, left_padded(rows), num_new=num_new, **cached(held), **options)
        asked = {} if way.is_drafted else options
        assert got == alone(stock, rows, num_new=num_new, **asked)
    else:
        want = called(stock, way, num_new, use_cache=False, **options)
        got = called(model, way, num_new, **cached(held), **options)
        assert got.sequences.tolist() == want.sequences.tolist()
        for ours, theirs in zip(got.get("scores") or (), want.get("scores") or (), strict=True):
            finite = theirs > -torch.inf
            torch.testing.assert_close(ours[finite], theirs[finite], atol=atol, rtol=0)
    held.check_integrity()
    return held


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_layout_of_even_rows_is_exact_on_a_hybrid(
    tiny_model: Build, family: str, layout: str
) -> None:
    model, rows = tiny_model(family, attention_of(family)), suffixes(5, 5)
    got = new_tokens(model, LAYOUTS[layout](rows), num_new=4, **cached(prefilled(model)))
    assert got == alone(tiny_model(family, "eager"), whole(rows), num_new=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", SERVED)
def test_a_layout_is_exact_on_a_family(tiny_model: Build, family: str, layout: str) -> None:
    model, rows = tiny_model(family, attention_of(family)), suffixes(3, 7, 5)
    got = new_tokens(model, LAYOUTS[layout](rows), **cached(prefilled(model)))
    assert got == expected(family)


@cache
def expected(family: str) -> list[list[int]]:
    return alone(SERVED[family].model(attn_implementation="eager"), whole(suffixes(3, 7, 5)))


def test_the_documentation_shows_this_matrix() -> None:
    written = Path(__file__).parents[2] / "docs" / "conformance.md"
    assert written.read_text() == table(), "run python tests/conformance.py > docs/conformance.md"
