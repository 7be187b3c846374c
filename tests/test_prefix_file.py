"""Prefixes in files: what is read is what was written, or the reason why not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_identity import llama
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv import prefix_file, tensor_file
from hf_granikv.errors import PrefixFileError
from hf_granikv.model_digest import ModelDigest
from hf_granikv.pools import HotPool
from hf_granikv.pools.row_states import StateKey
from hf_granikv.prefix_file import PrefixLevel, read_prefix, write_prefix

MODEL = SHARED_PATH["llama"].model()
DIGEST = ModelDigest.of(MODEL)
CONV, RECURRENT = StateKey("conv_states", 0), StateKey("recurrent_states", 1)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64]


def level(num_tokens: int, start: int, dtype: torch.dtype, **options: Any) -> PrefixLevel:
    """One layer that keeps all tokens, a local one, and one that keeps none."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    num_local = min(num_tokens, 4)
    keys = [made(2, num_tokens, 8), made(2, num_local, 8), made(0, num_tokens, 0)]
    values = [made(2, num_tokens, 3), made(2, num_local, 8), made(0, num_tokens, 0)]
    starts = [start, start + num_tokens - num_local, start]
    ids = torch.randint(0, 97, (num_tokens,))
    return PrefixLevel(ids, keys, values, starts, **options)


def chain(dtype: torch.dtype = torch.float32) -> list[PrefixLevel]:
    states = {0: (), 7: ({CONV: torch.randn(1, 3), RECURRENT: torch.randn(1, 2, 2)}, {})}
    return [
        level(5, 0, dtype, salt='tenant "0"'),
        level(2, 5, dtype, states=states),
        level(1, 7, dtype),
    ]


def assert_same(found: list[PrefixLevel], want: list[PrefixLevel]) -> None:
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.salt, list(one.starts)) == (other.salt, list(other.starts))
        assert list(one.states) == list(other.states)
        for now, then in zip(tensors_of([one]), tensors_of([other]), strict=True):
            assert (now.dtype, now.shape) == (then.dtype, then.shape)
            assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
        for at in one.states:
            assert list(map(list, one.states[at])) == list(map(list, other.states[at]))


def tensors_of(levels: list[PrefixLevel]) -> list[Tensor]:
    """All but the ids."""
    states = [t for one in levels for at in one.states.values() for s in at for t in s.values()]
    return [t for one in levels for t in (*one.keys, *one.values)] + states


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "prefix.safetensors"
    write_prefix(path, chain(), DIGEST)
    return path


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    levels = chain(dtype)
    write_prefix(tmp_path / "prefix", levels, DIGEST)
    assert_same(read_prefix(tmp_path / "prefix", MODEL), levels)


IN_ANOTHER_PROCESS = """
import json
import sys
from families import SHARED_PATH
from hf_granikv.prefix_file import read_prefix

levels = read_prefix(sys.argv[1], SHARED_PATH["llama"].model(attn_implementation="granikv"))
print(json.dumps([[x.token_ids.tolist(), x.keys[0].tolist(), x.salt] for x in levels]))
"""


def test_another_process_reads_it(saved: Path) -> None:
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(saved)]
    other = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run(command, env=other, capture_output=True, text=True, check=True).stdout
    levels = read_prefix(saved, MODEL)
    assert json.loads(out) == [[x.token_ids.tolist(), x.keys[0].tolist(), x.salt] for x in levels]


def test_any_reader_of_safetensors_reads_it(saved: Path) -> None:
    tensors = load_file(saved)
    assert torch.equal(tensors["1.token_ids"], read_prefix(saved, MODEL)[1].token_ids)


@pytest.mark.parametrize("dtype", tensor_file._DTYPE_NAMES, ids=str)
def test_dtypes_are_called_as_safetensors_calls_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 3]).to(dtype)
    tensor_file.write_tensors(tmp_path / "one", {"t": tensor}, {})
    with safe_open(tmp_path / "one", framework="pt") as file:
        found = file.get_tensor("t")
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


# ---- memory


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("in_inference", [False, True])
def test_tensors_are_mapped_and_the_pool_keeps_them_so(saved: Path, in_inference: bool) -> None:
    with torch.inference_mode(in_inference):
        first = read_prefix(saved, MODEL)[0]
        pool = HotPool()
        pairs = list(zip(first.keys, first.values, strict=True))
        prefix = pool.seal(first.token_ids, pairs)
    pool.check_integrity()
    held = [tensor for tensor in prefix.tensors() if tensor.numel()]
    (place,) = mapped_ranges(saved)
    assert held
    assert all(place[0] <= tensor.data_ptr() < place[1] for tensor in held)
    assert prefix.num_bytes == sum(tensor.nbytes for tensor in held)


def test_tensors_lie_where_kernels_are_fast(tmp_path: Path) -> None:
    """An odd number of ids or a small state would shift every tensor behind it."""
    tensors = {
        f"{dtype}{n}": torch.zeros(n).to(dtype) for n in (3, 64, 5, 80, 2) for dtype in TYPES
    }
    tensor_file.write_tensors(tmp_path / "some", tensors, {"padded": "x"})
    for tensor in tensor_file.map_tensors(tensor_file.read_header(tmp_path / "some")).values():
        assert tensor.data_ptr() % min(64, tensor.nbytes & -tensor.nbytes) == 0


def test_a_write_to_what_was_read_does_not_reach_the_file(saved: Path) -> None:
    before = saved.read_bytes()
    read_prefix(saved, MODEL)[0].keys[0].zero_()
    assert saved.read_bytes() == before


def test_what_was_read_outlives_the_file(saved: Path) -> None:
    levels = read_prefix(saved, MODEL)
    kept = [tensor.clone() for tensor in tensors_of(levels)]
    write_prefix(saved, chain(), DIGEST)
    saved.unlink()
    assert all(map(torch.equal, tensors_of(levels), kept))


# ---- damage


def refused(path: Path, text: str, model: PreTrainedModel = MODEL) -> None:
    with pytest.raises(PrefixFileError, match=text) as error:
        read_prefix(path, model)
    assert str(path) in str(error.value)
    assert re.search(r"\. [A-Z].*\.$", str(error.value)), "it does not say what to do"


WHOLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


def header_length(saved: Path) -> int:
    return 8 + int.from_bytes(saved.read_bytes()[:8], "little")


@WHOLE
@given(data=st.data(), in_header=st.booleans(), mask=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_refused(
    saved: Path, data: st.DataObject, in_header: bool, mask: int
) -> None:
    content, length = bytearray(saved.read_bytes()), header_length(saved)
    places = st.integers(0, length - 1) if in_header else st.integers(length, len(content) - 1)
    content[data.draw(places)] ^= mask
    broken = saved.with_name("broken")
    broken.write_bytes(content)
    refused(broken, "damaged|truncated|no safetensors file|holds no prefix|has format")


@WHOLE
@given(data=st.data())
def test_a_truncated_or_longer_file_is_refused(saved: Path, data: st.DataObject) -> None:
    content = saved.read_bytes()
    length = data.draw(st.integers(0, len(content) + 9).filter(lambda n: n != len(content)))
    broken = saved.with_name("broken")
    broken.write_bytes((content + bytes(9))[:length])
    refused(broken, "truncated|no safetensors file")


@pytest.mark.parametrize("name", ["0.token_ids", "2.keys.1", "0.values.0"])
def test_a_damaged_tensor_is_named(saved: Path, name: str) -> None:
    content, length = bytearray(saved.read_bytes()), header_length(saved)
    start, _ = json.loads(content[8:length])[name]["data_offsets"]
    content[length + start] ^= 1
    saved.write_bytes(content)
    refused(saved, f"is damaged: {name} was altered")


def test_a_salt_cannot_pass_for_the_checksum(tmp_path: Path) -> None:
    salted = level(3, 0, torch.float32, salt=f'"sha256": "{"0" * 64}"')
    write_prefix(tmp_path / "prefix", [salted], DIGEST)
    assert_same(read_prefix(tmp_path / "prefix", MODEL), [salted])


# ---- files of something else


OTHER_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "family": (lambda: SHARED_PATH["qwen3"].model(), "it is a Qwen3ForCausalLM, not a Llama"),
    "weights": (lambda: llama(seed=5), "its weights are others"),
    "dtype": (lambda: llama().bfloat16(), "its weights are torch.bfloat16, not torch.float32"),
    "config": (lambda: llama(rms_norm_eps=0.1), "rms_norm_eps of its config is 0.1, not 1e-06"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused(saved: Path, name: str) -> None:
    build, difference = OTHER_MODELS[name]
    refused(saved, f"another model than the one given: {difference}", build())


def foreign(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path, metadata={"format": "pt"})


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "is not there"),
    "folder": (lambda path: path.mkdir(), "is no regular file"),
    "pipe": (os.mkfifo, "is no regular file"),
    "empty": (lambda path: path.touch(), "is no safetensors file"),
    "text": (lambda path: path.write_text("a" * 99), "is no safetensors file"),
    "pickle": (lambda path: torch.save({"a": torch.ones(3)}, path), "is no safetensors file"),
    "json": (lambda path: path.write_bytes(b"\5" + bytes(7) + b"{nope"), "its header is no JSON"),
    "nested": (
        lambda path: path.write_bytes(
            (2**20).to_bytes(8, "little") + b'{"a":' + b"[" * (2**20 - 5)
        ),
        "its header is no JSON",
    ),
    "weights": (foreign, "is a safetensors file, but holds no prefix"),
    "no_metadata": (lambda path: save_file({"a": torch.ones(3)}, path), "but holds no prefix"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    make, text = FOREIGN[kind]
    make(tmp_path / "prefix")
    refused(tmp_path / "prefix", text)


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(prefix_file, "_FORMAT", "2")
        write_prefix(tmp_path / "prefix", chain(), DIGEST)
    refused(tmp_path / "prefix", "has format '2'; this version .* Upgrade hf_granikv")


# ---- writing


@pytest.mark.parametrize("kind", ["folder", "empty", "text", "pickle", "weights"])
def test_what_is_no_prefix_is_overwritten_only_if_asked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "prefix"
    FOREIGN[kind][0](path)
    before = path.is_file() and path.read_bytes()
    with pytest.raises(PrefixFileError, match=str(path)):
        write_prefix(path, chain(), DIGEST)
    assert os.listdir(tmp_path) == ["prefix"]
    if path.is_file():
        assert path.read_bytes() == before
        write_prefix(path, chain(), DIGEST, overwrite=True)
        read_prefix(path, MODEL)


def test_a_write_that_fails_leaves_what_was_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_prefix(saved, chain(), DIGEST)
    assert (os.listdir(saved.parent), saved.read_bytes()) == ([saved.name], before)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrefixFileError, match=f"{tmp_path / 'none'} is no folder"):
        write_prefix(tmp_path / "none" / "prefix", chain(), DIGEST)
