"""The picture of `dispatch_grid.py`: who wins where, and how near the predictions are."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from hf_granikv.backends import BACKENDS

# light enough for black letters on them
_COLOURS = ("#9ecae1", "#fdd0a2", "#c7e9c0")
_NAMES = tuple(BACKENDS)


def plot(cells: Sequence[Any], path: str) -> None:
    """Writes the picture.

    Args:
        cells: Of `dispatch_grid.py`.
        path: File to write, of any format that matplotlib knows.
    """
    dtypes = list(dict.fromkeys(cell.shape.dtype_name for cell in cells))
    figure = Figure(figsize=(13, 4.4 * len(dtypes)), layout="constrained")
    axes = figure.subplots(len(dtypes), 2, squeeze=False)
    for row, dtype in zip(axes, dtypes, strict=True):
        of_dtype = [cell for cell in cells if cell.shape.dtype_name == dtype]
        winners, ratios = row
        _heat_map(
            winners,
            of_dtype,
            value=lambda here: _NAMES.index(_winner(here)),
            label=lambda here: f"{_winner(here).replace('_', chr(10))}\n{_over_stock(here):.2f}",
            colours={"cmap": ListedColormap(_COLOURS[: len(_NAMES)]), "vmin": -0.5},
            top=len(_NAMES) - 0.5,
        )
        winners.set_title(f"{dtype}: fastest path, and its time over SDPA on a dense copy")
        _heat_map(
            ratios,
            of_dtype,
            value=lambda here: np.log2(_ratio(here)),
            label=lambda here: f"{_ratio(here):.2f}",
            colours={"cmap": "coolwarm", "vmin": -1},
            top=1,
        )
        ratios.set_title(f"{dtype}: predicted over measured time of the prefix part")
    figure.savefig(path, dpi=110)


def _heat_map(
    axis: Any,
    cells: Sequence[Any],
    *,
    value: Callable[[Sequence[Any]], float],
    label: Callable[[Sequence[Any]], str],
    colours: dict[str, Any],
    top: float,
) -> None:
    rows = sorted({cell.shape.num_rows for cell in cells})
    lengths = sorted({cell.shape.prefix_len for cell in cells})
    table = np.full((len(rows), len(lengths)), np.nan)
    for y, num_rows in enumerate(rows):
        for x, length in enumerate(lengths):
            here = [
                c for c in cells if (c.shape.num_rows, c.shape.prefix_len) == (num_rows, length)
            ]
            if here:
                table[y, x] = value(here)
                axis.text(x, y, label(here), ha="center", va="center", fontsize=7)
    axis.imshow(table, origin="lower", aspect="auto", vmax=top, **colours)
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel("prefix tokens")
    axis.set_ylabel("rows")


def _winner(cells: Sequence[Any]) -> str:
    winners = [cell.winner for cell in cells]
    return max(_NAMES, key=winners.count)


def _over_stock(cells: Sequence[Any]) -> float:
    return median(cell.over_stock for cell in cells)


def _ratio(cells: Sequence[Any]) -> float:
    return median(cell.predicted_s / cell.prefix_s for cell in cells)
