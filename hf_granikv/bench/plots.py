"""Pictures of runs: time of a step over rows and over the prefix, memory over agents."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_granikv.bench.runs import NO_CONTEXT, Run, Shape


@dataclass(frozen=True)
class _Plot:
    """One kind of picture.

    Attributes:
        name: Of its files.
        metric: What goes up.
        unit: The axis of that, with its unit.
        scale: What a value is multiplied with.
        along: What goes to the right.
        axis: The axis of that.
        apart: What has to be the same in one picture, in words.
    """

    name: str
    metric: str
    unit: str
    scale: float
    along: Callable[[Shape], int]
    axis: str
    apart: Callable[[Shape], str]


_PLOTS = (
    _Plot(
        *("step_over_rows", "step", "milliseconds per step", 1.0),
        *(lambda shape: shape.num_rows, "rows"),
        lambda shape: f"prefix {shape.prefix_len} + {shape.suffix_len}, {shape.dtype}",
    ),
    _Plot(
        *("step_over_prefix", "step", "milliseconds per step", 1.0),
        *(lambda shape: shape.prefix_len, "tokens of the shared prefix"),
        lambda shape: f"{shape.num_rows} rows + {shape.suffix_len}, {shape.dtype}",
    ),
    _Plot(
        *("memory_over_agents", "held", "megabytes of keys and values", 1e-6),
        *(lambda shape: shape.num_rows, "agents"),
        lambda shape: f"prefix {shape.prefix_len} + {shape.suffix_len}, {shape.dtype}",
    ),
)


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draws every picture that has at least two points of a peer.

    Args:
        runs: Those of other sections than `decode` are left out.
        folder: Is made if it is not there.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    decode = [(run, run.shape) for run in runs if run.bench == "decode"]
    files = []
    for plot in _PLOTS:
        pictures: dict[str, list[tuple[int, Run]]] = defaultdict(list)
        for run, shape in decode:
            if shape is not None:
                pictures[plot.apart(shape)].append((plot.along(shape), run))
        for apart, points in pictures.items():
            if curves := _curves(plot, points):
                folder.mkdir(parents=True, exist_ok=True)
                slug = "-".join(re.findall(r"\w+", apart))
                files.append(folder / f"{plot.name}-{slug}.png")
                _save(plot, apart, curves, points[-1][1], files[-1])
    return files


def _curves(plot: _Plot, points: Sequence[tuple[int, Run]]) -> dict[str, list[tuple[int, float]]]:
    """The points of each peer, from left to right; peers with one point have no curve."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for along, run in sorted(points, key=lambda point: point[0]):
        for peer in run.peers:
            value = run.value(peer, plot.metric)
            if value is not None and not (peer == NO_CONTEXT and plot.metric == "held"):
                curves[peer].append((along, value * plot.scale))
    return {peer: curve for peer, curve in curves.items() if len(curve) > 1}


def _save(
    plot: _Plot, apart: str, curves: dict[str, list[tuple[int, float]]], run: Run, file: Path
) -> None:
    # no window and no global state: the figure is drawn by the canvas that it is saved with
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure: Any = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for peer, curve in curves.items():
        is_ours = peer.startswith("granikv")
        axes.plot(*zip(*curve, strict=True), marker="o", label=peer, lw=2.5 if is_ours else 1.2)
    axes.set(xscale="log", yscale="log", xlabel=plot.axis, ylabel=plot.unit)
    ticks = sorted({along for curve in curves.values() for along, _ in curve})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    # plain numbers at 1, 2 and 5 of each decade
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    title = f"{run.where.get('model', 'the model')}: {apart}\n{_machine(run)}"
    axes.set_title(title, fontsize=9)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)


def _machine(run: Run) -> str:
    where = run.where
    return (
        f"{where.get('device', '')}, {where.get('threads', '?')} threads, {where.get('commit', '')}"
    )
