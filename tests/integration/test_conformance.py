"""Every cell of the matrix in `conformance.py`, and that the documentation shows that matrix."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import (
    ATOL,
    DENSE_ROUTE,
    HYBRID_MODES,
    HYBRIDS,
    LAYOUTS,
    MODES,
    REFUSED_CELLS,
    SERVED,
    WIDER_ATOL,
    Cell,
    Mode,
    attention_of,
    cells,
    table,
)
from decoding_modes import Result, generated
from prompts import cached, left_padded, prefilled, prefix_ids, suffixes, whole
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

Build = Callable[..., PreTrainedModel]
NUM_NEW = 10


def named(cell: Cell) -> str:
    return "-".join(cell)


def options_of(family: str, mode: Mode) -> dict[str, Any]:
    options = dict(mode.options)
    if "assistant_model" in options:
        options["assistant_model"] = assistant_of(family)
    return options


@cache
def assistant_of(family: str) -> PreTrainedModel:
    return {**SERVED, **HYBRIDS}[family].model(seed=3, attn_implementation="eager")


@cache
def eager(family: str) -> PreTrainedModel:
    return {**SERVED, **HYBRIDS}[family].model(attn_implementation="eager")


# by family, row, number of tokens and arguments: modes that have these in common have one reference
_alone: dict[tuple[Any, ...], Result] = {}


def alone(family: str, name: str, num_new: int) -> list[Result]:
    """Gives what each row of a mode gets by itself, without a cache."""
    mode = (HYBRID_MODES if family in HYBRIDS else MODES)[name]
    options = mode.options if mode.reference is None else mode.reference
    results = []
    for row in whole(mode.suffixes()):
        key = family, tuple(row), num_new, repr(options)
        if key not in _alone:
            (_alone[key],) = generated(
                eager(family), left_padded([row]), num_new, use_cache=False, **options
            )
        results.append(_alone[key])
    return results


def check(tiny_model: Build, cell: Cell, mode: Mode, num_new: int, atol: float) -> Any:
    model = tiny_model(cell.family, attention_of(cell.family))
    held = AsymmetricPagedCache(model.config)
    held.prefill(model, prefix_ids(), chunk_size=mode.prefix_chunk)
    inputs = LAYOUTS[cell.layout](mode.suffixes())
    got = mode.call(model, inputs, num_new, **cached(held), **options_of(cell.family, mode))
    held.check_integrity()
    assert_same(got, alone(cell.family, cell.mode, num_new), atol)
    return held


def assert_same(got: list[Result], want: list[Result], atol: float) -> None:
    """Up to where each row ends by itself; the batch goes on for the longest."""
    lasts = max(len(ids) for result in want for ids in result.sequences)
    for ours, theirs in zip(got, want, strict=True):
        for ids, expected in zip(ours.sequences, theirs.sequences, strict=True):
            assert ids[: len(expected)] == expected
            assert len(ids) == lasts
        for name, steps in ours.numbers.items():
            num_steps = min(len(steps), len(theirs.numbers[name]))
            numbers, expected = (
                torch.stack(both[:num_steps]) for both in (steps, theirs.numbers[name])
            )
            torch.testing.assert_close(numbers, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("cell", cells(SERVED, MODES), ids=named)
def test_a_cell_is_exact(tiny_model: Build, cell: Cell) -> None:
    held = check(tiny_model, cell, MODES[cell.mode], NUM_NEW, ATOL)
    is_dense = cell.family in DENSE_ROUTE
    assert ("dense route" in held.explain()) == is_dense
    # a single row has nobody to share with
    assert held.rows.journal.has_warned == (is_dense and len(MODES[cell.mode].lengths) > 1)


@pytest.mark.parametrize("cell", cells(HYBRIDS, HYBRID_MODES), ids=named)
def test_a_cell_of_a_hybrid_is_exact(tiny_model: Build, cell: Cell) -> None:
    mode, atol = HYBRID_MODES[cell.mode], WIDER_ATOL.get(cell.family, ATOL)
    assert not check(tiny_model, cell, mode, 4, atol).rows.journal.has_warned


@pytest.mark.parametrize(("family", "mode"), REFUSED_CELLS)
def test_what_cannot_be_exact_is_refused_before_any_token(
    tiny_model: Build, family: str, mode: str
) -> None:
    model, way = tiny_model(family), MODES[mode]
    inputs, held = left_padded(whole(way.suffixes())), prefilled(model)
    with pytest.raises(ValueError, match=REFUSED_CELLS[family, mode]):
        way.call(model, inputs, NUM_NEW, **cached(held), **options_of(family, way))
    assert held.batch_size == -1


@pytest.mark.parametrize("family", HYBRIDS)
def test_ragged_rows_of_a_hybrid_are_refused_by_layer(tiny_model: Build, family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(ValueError, match=rf"layer 0 of {family} .* equal length"):
        generated(model, left_padded(whole(suffixes(3, 7))), 4, **cached(prefilled(model)))


def test_every_family_meets_every_mode_and_every_layout() -> None:
    drawn = {*cells(SERVED, MODES), *cells(HYBRIDS, HYBRID_MODES)}
    for modes, families in ((MODES, SERVED), (HYBRID_MODES, HYBRIDS)):
        for family in families:
            met = [cell for cell in drawn if cell.family == family]
            refused = {mode for name, mode in REFUSED_CELLS if name == family}
            assert {cell.mode for cell in met} == set(modes) - refused
            assert {cell.layout for cell in met if cell.mode == "greedy"} == set(LAYOUTS)
    for name, mode in MODES.items():
        for layout in mode.layouts or LAYOUTS:
            met = {f for f, m, at in drawn if (m, at) == (name, layout)}
            assert met == {f for f in (*SERVED, *HYBRIDS) if (f, name) not in REFUSED_CELLS}


def test_the_documentation_shows_this_matrix() -> None:
    written = Path(__file__).parents[2] / "docs" / "conformance.md"
    assert written.read_text() == table(), "run python tests/conformance.py > docs/conformance.md"
