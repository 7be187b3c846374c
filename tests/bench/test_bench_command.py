"""The command `granikv bench`, on a tiny model in a folder."""

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SHARED_PATH, VOCAB_SIZE

from hf_granikv import cli
from hf_granikv.bench import command, decode, drop_in, race
from hf_granikv.bench.agreement import ResultsDiffer
from hf_granikv.bench.suite import QUICK, SUITE, Part

README = Path(__file__).parents[2] / "benchmarks" / "README.md"
Bench = Callable[..., int]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    SHARED_PATH["llama"].model(max_position_embeddings=2048).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bench(tiny_folder: str) -> Bench:
    def run(text: str) -> int:
        section, *rest = text.split()
        common = ["--model", tiny_folder, "--dtype", "float32", "--threads", "1"]
        return cli.main(["bench", section, *rest, *common])

    return run


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_decode_prints_a_table_and_ends_with_one_line_of_json(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    options = "--rows 1 2 --prefix 30 --suffix 4 --steps 2 --warmup 1"
    peers = "--peers granikv StaticCache DynamicCache no-context"
    assert bench(f"decode {options} {peers} --out {out}") == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines[0] == "decode"
    assert lines[1].startswith("rows x prefix + suffix  peer")
    assert [line[: len("2 x 30")] for line in lines[2:10]] == (
        ["1 x 30", *["      "] * 3, "2 x 30", *["      "] * 3]
    )
    summary = json.loads(lines[-1])
    assert summary["2 x 30 + 4, float32"].keys() == {
        *("granikv", "StaticCache", "DynamicCache", "no-context"),
    }
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    metrics = {row["metric"] for row in kept if row["peer"] == "DynamicCache"}
    assert metrics == {
        *("step", "step_above_no_context", "held", "resident_growth"),
        *("logits_difference", "same_best_token"),
    }
    assert {row["threads"] for row in kept} == {1}
    same = {row["value"] for row in kept if row["metric"] == "same_best_token"}
    assert same == {1.0}


@pytest.mark.parametrize(
    ("text", "bench_name", "metrics"),
    [
        (
            "groups --prefixes 20 9 --agents 2 --suffix 3 --steps 2 --warmup 1 --shuffled "
            "--peers granikv batch-global DynamicCache no-context",
            "groups",
            {"step", "step_above_no_context", "held"},
        ),
        ("ttft --rows 2 --prefix 30 --suffix 4 --repeats 2", "ttft", {"ttft", "tokens_computed"}),
        ("drop-in --rows 2 --prompt 4 --tokens 8", "drop_in", {"step", "held"}),
        (
            "trace --prefixes 20 9 --requests 4 --rate 50 --suffix 4 --output 3 --longest-output 6 "
            "--peers granikv",
            "trace",
            {"tokens_per_s", "first_token_median_s", "peak_bytes"},
        ),
    ],
    ids=["groups", "ttft", "drop-in", "trace"],
)
def test_every_section_measures_and_keeps_rows(
    bench: Bench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    bench_name: str,
    metrics: set[str],
) -> None:
    out = tmp_path / "results.jsonl"
    assert bench(f"{text} --out {out}") == 0
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["bench"] for row in kept} == {bench_name}
    assert metrics <= {row["metric"] for row in kept if row["peer"].startswith("granikv")}
    assert json.loads(lines_of(capsys.readouterr().out)[-1])["bench"] == bench_name


def test_tokens_to_the_first_token_are_those_computed(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    bench(f"ttft --rows 3 --prefix 30 --suffix 4 --out {out}")
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    computed = {row["peer"]: row["value"] for row in kept if row["metric"] == "tokens_computed"}
    assert computed == {"granikv": 30 + 3 * 4, "DynamicCache": 3 * 34}


def test_the_suite_runs_each_part_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: str
) -> None:
    parts = (
        Part("drop-in", "--rows 1 --prompt 3 --tokens 5"),
        Part("decode", "--rows 1 --prefix 9 --suffix 2 --steps 1 --warmup 1 --peers granikv"),
    )
    monkeypatch.setattr(command, "SUITE", parts)
    out = tmp_path / "results.jsonl"
    common = ["--model", tiny_folder, "--dtype", "float32", "--threads", "1", "--out", str(out)]
    # without a section it is the suite
    assert cli.main(["bench", *common]) == 0
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert list(dict.fromkeys(row["bench"] for row in kept)) == ["drop_in", "decode"]


def test_a_part_that_fails_is_in_the_exit_code_of_the_suite(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", (Part("drop-in", "--prompt 5 --tokens 5"),))
    assert cli.main(["bench", "all", "--quick"]) == 2
    assert "granikv bench: --tokens 5 is the length to decode to" in capfd.readouterr().err


@pytest.mark.parametrize(
    "part", [*SUITE, *QUICK], ids=lambda part: f"{part.section} {part.options}"
)
def test_the_parts_of_the_suite_are_commands(part: Part) -> None:
    arguments = command._parser().parse_args([part.section, *part.options.split()])
    assert arguments.section == part.section


def test_every_command_in_the_readme_is_one_and_the_suite_is_in_it() -> None:
    commands = re.findall(r"^granikv bench (.+)$", README.read_text(), re.MULTILINE)
    for text in commands:
        command._parser().parse_args(shlex.split(text))
    assert sorted(commands) == sorted(f"{part.section} {part.options}" for part in SUITE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decode --rows 0", "argument --rows: '0' is no whole number of 1 or more"),
        ("decode --prefix 64 -3", "argument --prefix: '-3' is no whole number of 1 or more"),
        ("decode --peers vllm", "argument --peers: invalid choice: 'vllm'"),
        ("decode --dtype float16", "argument --dtype: invalid choice: 'float16'"),
        ("nothing", "invalid choice: 'nothing'"),
        ("decode --agents 3", "unrecognized arguments: --agents 3"),
    ],
)
def test_what_is_no_option_is_refused(
    capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *text.split()])
    assert stopped.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decode --out /nowhere/x.jsonl", "--out /nowhere/x.jsonl: the folder /nowhere does not"),
        ("decode --peers no-context granikv", "--peers begins with no-context, whose results are"),
        ("drop-in --prompt 8 --tokens 8", "--tokens 8 is the length to decode to, and --prompt 8"),
        ("trace --rate 0", "--rate 0 is no rate of arrivals; give one above 0."),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert bench(text) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"granikv bench: {error}")


def test_a_model_that_cannot_be_loaded_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["bench", "decode", "--model", str(tmp_path / "nowhere")]) == 2
    assert f"there is no file or folder '{tmp_path / 'nowhere'}'" in capsys.readouterr().err
    assert cli.main(["bench", "decode", "--model", str(tmp_path)]) == 2
    assert f"granikv bench: --model {tmp_path} cannot be loaded" in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: Bench
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    monkeypatch.setattr(decode, "run", lambda arguments: pytest.fail("measured"))
    assert bench("decode --plot pictures") == 2
    assert "needs matplotlib, which is not installed; run: pip install 'hf-granikv[plots]'" in (
        capsys.readouterr().err
    )


def test_results_that_differ_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, tmp_path: Path, capsys: Any
) -> None:
    def differing(*args: Any) -> None:
        raise ResultsDiffer("StaticCache is elsewhere")

    monkeypatch.setattr(race, "compare", differing)
    out = tmp_path / "results.jsonl"
    options = "--rows 1 --prefix 9 --suffix 2 --steps 1 --peers granikv StaticCache"
    assert bench(f"decode {options} --out {out}") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "granikv bench: StaticCache is elsewhere"
    assert not out.exists()


def test_show_prints_tables_of_results_that_are_there(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    bench(f"drop-in --rows 1 --prompt 3 --tokens 5 --out {out}")
    capsys.readouterr()
    assert cli.main(["bench", "show", str(out)]) == 0
    shown = lines_of(capsys.readouterr().out)
    assert shown[0] == "drop_in"
    assert "granikv-empty" in shown[2]
    (tmp_path / "empty.jsonl").touch()
    assert cli.main(["bench", "show", str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl holds no rows" in capsys.readouterr().err
    assert cli.main(["bench", "show", str(tmp_path / "none.jsonl")]) == 2
    assert (
        "none.jsonl is no file; give one that `granikv bench --out` has" in capsys.readouterr().err
    )


def test_an_empty_cache_that_decodes_otherwise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    step = drop_in.DropIn.step
    monkeypatch.setattr(drop_in.DropIn, "step", lambda self, ids: step(self, ids).roll(1, -1))
    assert bench("drop-in --rows 1 --prompt 3 --tokens 5") == 1
    assert "the logits of DynamicCache differ from those of granikv-empty" in (
        capsys.readouterr().err
    )


def test_resident_memory_is_that_of_this_process() -> None:
    before = race.resident_bytes()
    if before == 0:
        pytest.skip("the system does not say")
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert race.resident_bytes() - before > 48 << 20
    assert held.sum() > 0


def test_ids_of_workloads_are_plain_ones() -> None:
    from hf_granikv.bench.workload import Workload

    assert Workload.random([500], 2, 500, 49152, False).suffixes.min() >= 100
    assert Workload.random([500], 2, 500, VOCAB_SIZE, False).suffixes.max() < VOCAB_SIZE
