from pathlib import Path

import pytest

from hf_granikv.bench.plots import draw
from hf_granikv.bench.rows import measured, record
from hf_granikv.bench.runs import runs_of

WHERE = {"model": "a model", "device": "a processor", "threads": 2, "commit": "abc"}


def rows_of(shapes: list[tuple[int, int]], bench: str = "decode") -> list[dict[str, object]]:
    rows = []
    for num_rows, prefix_len in shapes:
        label = f"{num_rows} x {prefix_len} + 64, bfloat16"
        for peer, factor in (("granikv", 1.0), ("StaticCache", 3.0), ("no-context", 0.5)):
            rows.append(measured(bench, peer, label, "step", "ms", [factor * num_rows]))
            if peer != "no-context":
                rows.append(measured(bench, peer, label, "held", "bytes", [factor * prefix_len]))
    return record(rows, WHERE, None)


def test_a_picture_for_each_question_with_two_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of([(1, 4096), (16, 4096), (16, 8192), (2, 64)])
    files = draw(runs_of(rows), tmp_path / "new")
    assert [file.name for file in files] == [
        "step_over_rows-prefix-4096-64-bfloat16.png",
        "step_over_prefix-16-rows-64-bfloat16.png",
        "memory_over_agents-prefix-4096-64-bfloat16.png",
    ]
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    "rows", [rows_of([(1, 4096)]), rows_of([(1, 4096), (16, 4096)], bench="ttft")]
)
def test_without_two_points_nothing_is_drawn(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    assert draw(runs_of(rows), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
