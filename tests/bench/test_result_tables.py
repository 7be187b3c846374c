"""Tables are what the rows say: ratios, losses, absences, and the documents of this repository."""

import json
from pathlib import Path
from typing import Any

import pytest
import write_tables

from hf_granikv.bench.rows import Row, absent, measured, read_rows, record
from hf_granikv.bench.runs import Run, runs_of
from hf_granikv.bench.tables import table_of

WHERE = {"device": "A processor", "isa": "AVX2", "threads": 2, "torch": "2", "transformers": "5"}
WHERE |= {"commit": "abc", "date": "2026-01-01", "run": "1"}
LABEL = "16 x 4096 + 64, bfloat16"


def rows_of(
    steps: dict[str, float], *, label: str = LABEL, bench: str = "decode", **where: Any
) -> list[dict[str, Any]]:
    rows = [measured(bench, peer, label, "step", "ms", [ms]) for peer, ms in steps.items()]
    return record(rows, {**WHERE, **where}, None)


def one(rows: list[dict[str, Any]]) -> Run:
    (run,) = runs_of(rows)
    return run


def lines_of(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The cells after the workload, by peer."""
    return {line[1]: list(line[2:]) for line in table_of(runs_of(rows)).lines}


def test_a_loss_is_said_in_bold() -> None:
    lines = lines_of(rows_of({"granikv": 100.0, "StaticCache": 90.0, "DynamicCache": 250.0}))
    assert lines["granikv"][0] == "100 ms"
    assert lines["StaticCache"][0] == "90.0 ms (**0.90x: we lose**)"
    assert lines["DynamicCache"][0] == "250 ms (2.50x)"


def test_what_rounds_to_equal_is_no_loss() -> None:
    assert lines_of(rows_of({"granikv": 100.0, "b": 99.6}))["b"][0] == "99.6 ms (1.00x)"


@pytest.mark.parametrize("peer", ["granikv-per_row", "no-context"])
def test_nobody_loses_to_a_variant_of_ours_or_to_no_context(peer: str) -> None:
    assert "we lose" not in lines_of(rows_of({"granikv": 100.0, peer: 50.0}))[peer][0]


def test_an_absent_peer_has_its_reason() -> None:
    rows = rows_of({"granikv": 100.0})
    rows += record([absent("decode", "llama.cpp", LABEL, "it is not installed")], WHERE, None)
    assert lines_of(rows)["llama.cpp"][0] == "not run: it is not installed"


def test_bytes_and_what_is_above_no_context_have_ratios() -> None:
    rows = rows_of({"granikv": 100.0, "StaticCache": 300.0, "no-context": 60.0})
    more = [
        measured("decode", peer, LABEL, metric, unit, [value])
        for peer, above, held in (("granikv", 40.0, 50e6), ("StaticCache", 240.0, 600e6))
        for metric, unit, value in (
            ("step_above_no_context", "ms", above),
            ("held", "bytes", held),
        )
    ]
    table = table_of(runs_of(rows + record(more, WHERE, None)))
    cells = dict(zip(table.heading, table.lines[1], strict=True))
    assert cells["above no context"] == "240 ms (6.00x)"
    assert cells["cache bytes"] == "600 MB (12.00x)"
    assert dict(zip(table.heading, table.lines[2], strict=True))["cache bytes"] == ""


def test_a_column_without_a_figure_is_left_out() -> None:
    heading = table_of(runs_of(rows_of({"granikv": 100.0}))).heading
    assert list(heading) == ["rows x prefix + suffix", "peer", "step", "p20 to p80"]


def test_the_text_for_a_terminal_is_aligned_and_without_marks() -> None:
    text = table_of(runs_of(rows_of({"granikv": 100.0, "StaticCache": 90.0}))).text()
    header, first, second = text.splitlines()
    assert header.index("step") == first.index("100 ms") == second.index("90.0 ms")
    assert "90.0 ms (0.90x: we lose)" in second


def test_the_last_run_of_a_workload_counts_and_runs_are_never_mixed() -> None:
    """The first run had another peer, with a time of another hour: no ratio may come of it."""
    rows = rows_of({"granikv": 50.0, "StaticCache": 100.0, "DynamicCache": 200.0})
    rows += rows_of({"granikv": 80.0}, label="1 x 64 + 4, bfloat16")
    rows += rows_of({"granikv": 80.0, "StaticCache": 160.0}, run="2")
    first, second = runs_of(rows)
    assert first.peers == ["granikv", "StaticCache"]
    assert first.ratio("StaticCache", "step") == 2
    assert second.shape is not None
    assert second.shape.num_rows == 1


def test_peers_of_another_hour_are_no_part_of_a_run() -> None:
    rows = rows_of({"granikv": 50.0, "StaticCache": 100.0}) + rows_of(
        {"DynamicCache": 9.0}, run="2"
    )
    assert one(rows).peers == ["DynamicCache"]


def test_a_figure_that_comes_again_begins_a_run() -> None:
    """Rows of the first measurements have no time, only commit and date."""
    rows = rows_of({"granikv": 50.0, "DynamicCache": 100.0}) + rows_of({"granikv": 60.0})
    assert one(rows).values == {("granikv", "step"): 60.0}


def test_rows_are_kept_as_they_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    row = measured("decode", "granikv", LABEL, "step", "ms", [3.0, 1.0, 2.0], "cascade 3")
    record([row], WHERE, str(file))
    kept = record([Row("ttft", "granikv", "w", "ttft", "s", 1, 1, 1)], WHERE, str(file))
    assert read_rows(file)[0] == {**vars_of(row), **WHERE}
    assert read_rows(file)[1:] == kept
    assert row.value == 2.0


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


@pytest.mark.parametrize("line", ["{", "[]", '{"bench": "decode"}'])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(rows_of({"granikv": 1.0})[0]) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2 is no row of results"):
        read_rows(file)


def test_a_summary_takes_the_best_setting_of_each_engine() -> None:
    rows = rows_of(
        {
            "granikv": 50.0,
            "llama.cpp": 60.0,
            "llama.cpp-flash": 45.0,
            "continuous-4": 200.0,
            "continuous-16": 300.0,
            "no-context": 30.0,
        }
    )
    table = write_tables.summary(runs_of(rows))
    cells = dict(zip(table.heading, table.lines[0], strict=True))
    assert cells == {
        "": "decode step, 16 rows over 4,096 shared tokens + 64 each",
        "hf_granikv": "50.0 ms",
        "continuous batching": "200 ms (4.00x)",
        "llama.cpp": "45.0 ms (**0.90x: we lose**)",
        "no context at all": "30.0 ms",
    }


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    file = tmp_path / "cpu-a.jsonl"
    for dtype in ("bfloat16", "float32"):
        rows = rows_of({"granikv": 50.0, "StaticCache": 90.0}, label=f"2 x 64 + 4, {dtype}")
        file.open("a").writelines(json.dumps(row) + "\n" for row in rows)
    document = "before\n<!-- table decode cpu-*.jsonl dtype=float32 -->\nold\n<!-- end of table -->\nafter\n"
    text = write_tables.rewritten(document, tmp_path)
    assert text == (
        "before\n<!-- table decode cpu-*.jsonl dtype=float32 -->\n"
        "A processor (AVX2), 2 threads, torch 2, transformers 5, commit abc, 2026-01-01\n\n"
        "| rows x prefix + suffix | peer | step | p20 to p80 |\n"
        "|---|---|---|---|\n"
        "| 2 x 64 + 4, float32 | granikv | 50.0 ms | 50.0 to 50.0 |\n"
        "| | StaticCache | 90.0 ms (1.80x) | 90.0 to 90.0 |\n"
        "<!-- end of table -->\nafter\n"
    )
    assert write_tables.rewritten(text, tmp_path) == text


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("decode", "is none"),
        ("numbers cpu-a.jsonl", "is none"),
        ("decode cpu-a.jsonl of=1", "is none"),
        ("decode cpu-a.jsonl dtype=int8", "selects no run"),
        ("decode nowhere.jsonl", "selects no run"),
        ('decode cpu-a.jsonl only="ttft *"', "selects no run"),
    ],
)
def test_a_mark_that_gives_no_table_is_refused(tmp_path: Path, mark: str, text: str) -> None:
    rows = rows_of({"granikv": 1.0})
    (tmp_path / "cpu-a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=text):
        write_tables.rewritten(f"<!-- table {mark} -->\n<!-- end of table -->\n", tmp_path)


@pytest.mark.parametrize("document", write_tables.DOCUMENTS, ids=lambda path: str(path))
def test_the_measured_tables_are_those_of_the_results(document: Path) -> None:
    """No measured number is typed; `make tables` writes them."""
    text = document.read_text()
    assert "<!-- end of table -->" in text
    assert write_tables.rewritten(text) == text
