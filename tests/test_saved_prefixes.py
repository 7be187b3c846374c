"""A prefix that was saved and loaded is the prefix that was computed, or is refused with the reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import test_prefix_making
import torch
from families import HYBRIDS
from prompts import (
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    tokens,
    whole,
)
from saved import assert_same, built, empty
from torch import nn
from transformers import PreTrainedModel
from trees import CHAINS, LEFT, OTHER, READ, RIGHT, ROOT, ROWS, planted

from hf_granikv.saved_prefixes import layer_devices

# every kind of layer: plain, local, latents, layers that store nothing, states
KINDS = ["llama", "gemma2", "llama4", "deepseek_v3", "gemma3n", "lfm2", "qwen3_next", "zamba2"]
BATCH = whole(suffixes(*SUFFIX_LENGTHS))


@pytest.fixture
def model() -> PreTrainedModel:
    return built()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefix.safetensors"


@pytest.fixture
def saved(model: PreTrainedModel, path: Path) -> Path:
    prefilled(model)._state.prefixes.only.save(path)
    return path


# ---- round trips


@pytest.mark.smoke
@pytest.mark.parametrize("name", KINDS)
def test_another_model_object_goes_on_from_the_file(path: Path, name: str) -> None:
    model, other = built(name), built(name)
    cache = empty(model)
    root = cache.prefill(model, prefix_ids(ROOT))
    leaf = cache.prefill(model, prefix_ids(RIGHT), parent=root)
    leaf.save(path)
    loaded = empty(other)
    found = loaded.load(path, other)
    assert_same(found, leaf)
    assert loaded.stats().hot_bytes == cache.stats().hot_bytes
    lengths = (4, 4) if name in HYBRIDS else SUFFIX_LENGTHS
    rows = [[*CHAINS["right"], *suffix] for suffix in suffixes(*lengths)]
    prompts = left_padded(rows)
    assert new_tokens(other, prompts, **cached(loaded.bind(**prompts))) == alone(other, rows)
    loaded.check_integrity()


IN_ANOTHER_PROCESS = """
import json
import sys
from prompts import cached, left_padded, new_tokens
from saved import built, empty

for name, path, rows in json.load(sys.stdin):
    model = built(name)
    cache, prompts = empty(model), left_padded(rows)
    prefix = cache.load(path, model)
    cache.bind(**prompts)
    assert set(cache._state.prefixes.bound.leaves) == {prefix}
    print(json.dumps(new_tokens(model, prompts, **cached(cache))))
"""


def test_another_process_goes_on_from_the_file(tmp_path: Path) -> None:
    given, want = [], []
    for name in ("llama", "gemma2", "deepseek_v3", "lfm2"):
        model, rows = built(name), whole(suffixes(4, 4))
        prefilled(model)._state.prefixes.only.save(tmp_path / name)
        given.append([name, str(tmp_path / name), rows])
        want.append(alone(model, rows))
    out = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [json.loads(line) for line in out.splitlines()] == want


def test_a_tree_is_put_together_again_and_nothing_of_it_is_held_twice(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    cache, held = planted(model)
    for name in ("left", "tip", "other"):
        held[name].save(tmp_path / name)
    loaded = empty(model)
    found = {name: loaded.load(tmp_path / name, model) for name in ("tip", "other", "left")}
    assert found["left"].parent is found["tip"].parent.parent
    assert loaded.stats().hot_bytes == cache.stats().hot_bytes
    named = {**found, "right": found["tip"].parent, "root": found["left"].parent}
    prompts = left_padded(ROWS)
    loaded.bind(**prompts)
    assert loaded._state.prefixes.bound.leaves == tuple(named.get(read) for read in READ)
    assert new_tokens(model, prompts, **cached(loaded)) == alone(model, ROWS)
    for prefix in found.values():
        loaded.release(prefix)
    assert loaded._state.hot.num_bytes == 0


def test_salts_come_along(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = empty(model)
    for salt in ("a", "b", None):
        root = cache.prefill(model, prefix_ids(ROOT), salt=salt)
        cache.prefill(model, prefix_ids(LEFT), parent=root).save(tmp_path / str(salt))
    loaded = empty(model)
    found = {salt: loaded.load(tmp_path / str(salt), model) for salt in ("a", "b", None)}
    assert len({prefix.digest for prefix in found.values()}) == 3
    rows = [[*CHAINS["left"], *suffix] for suffix in suffixes(2, 5, 3, 4)]
    prompts, salts = left_padded(rows), ["b", None, "a", "c"]
    loaded.bind(**prompts, salt=salts)
    assert loaded._state.prefixes.bound.leaves == tuple(found.get(salt) for salt in salts)
    assert new_tokens(model, prompts, **cached(loaded)) == alone(model, rows)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_prefix_keeps_of_its_parents_comes_along(path: Path, name: str) -> None:
    """The long one keeps the tokens of its root, and only those: the tip reads it."""
    model, chain = built(name), [*test_prefix_making.ROOT, *test_prefix_making.LONG]
    cache = test_prefix_making.fused(model)
    tip = cache._state.prefixes.all[-1]
    tip.save(path)
    loaded = empty(model)
    found = loaded.load(path, model)
    assert_same(found, tip)
    assert [level.num_fused for level in found.chain] == [0, len(test_prefix_making.ROOT), 0]
    rows = [[*chain, *test_prefix_making.TIP, *suffix] for suffix in suffixes(3, 3)]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, **cached(loaded.bind(**prompts))) == alone(model, rows)
    loaded.check_integrity()


def test_a_prefix_made_of_private_tokens_is_saved_like_any(
    model: PreTrainedModel, path: Path
) -> None:
    cache, own = prefilled(model), tokens(6, seed=9)
    with torch.no_grad():
        model(input_ids=torch.tensor([own]), **cached(cache))
    prefix = cache.promote(cache.rows.park(0), torch.tensor(own))
    prefix.save(path)
    assert_same(empty(model).load(path, model), prefix)


def test_a_loaded_prefix_is_extended_saved_and_released_like_any(
    model: PreTrainedModel, saved: Path, tmp_path: Path
) -> None:
    cache = empty(model)
    loaded = cache.load(saved, model)
    leaf = cache.prefill(model, prefix_ids(LEFT), parent=loaded)
    leaf.save(tmp_path / "leaf")
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()
    assert_same(empty(model).load(tmp_path / "leaf", model), leaf)
    cache.release(loaded)
    cache.release(leaf)
    assert cache._state.hot.num_bytes == 0


def test_a_cache_that_holds_the_prefix_holds_it_once_more(
    model: PreTrainedModel, saved: Path
) -> None:
    cache = prefilled(model)
    ours, before = cache._state.prefixes.only, cache.stats()
    assert cache.load(saved, model) is ours
    assert cache.stats() == before
    cache.release(ours)
    assert new_tokens(model, left_padded(BATCH), **cached(cache)) == alone(model, BATCH)
    cache.release(ours)
    assert cache._state.hot.num_bytes == 0


def test_rows_and_bindings_go_on_while_a_prefix_is_loaded(
    model: PreTrainedModel, saved: Path
) -> None:
    cache, ids = prefilled(model, OTHER), torch.tensor([tokens(3, seed=8)])
    want = [*OTHER, *ids[0].tolist(), 5]
    with torch.no_grad():
        model(input_ids=ids, **cached(cache))
        cache.load(saved, model)
        got = model(input_ids=torch.tensor([[5]]), **cached(cache)).logits[0, -1]
        expected = model(input_ids=torch.tensor([want]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_loading_computes_nothing(model: PreTrainedModel, saved: Path) -> None:
    model.get_input_embeddings().register_forward_hook(lambda *_: pytest.fail("a forward ran"))
    empty(model).load(saved, model)


# ---- memory


def mapped_range(path: Path) -> tuple[int, int]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (place,) = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return int(place[0], 16), int(place[1], 16)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("in_inference", [False, True])
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_is_held_stays_in_the_file(path: Path, name: str, in_inference: bool) -> None:
    model, rows = built(name), whole(suffixes(4, 4))
    prefilled(model)._state.prefixes.only.save(path)
    cache = empty(model)
    with torch.inference_mode(in_inference):
        prefix = cache.load(path, model)
        assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)
    start, stop = mapped_range(path)
    held = [tensor for tensor in prefix.tensors() if tensor.numel()]
    assert all(start <= tensor.data_ptr() < stop for tensor in held)
    assert cache.stats().hot_bytes == sum(tensor.nbytes for tensor in held)
    cache.check_integrity()


def test_a_file_may_go_while_its_prefix_is_read(model: PreTrainedModel, saved: Path) -> None:
    cache = empty(model)
    cache.load(saved, model).save(saved, overwrite=True)
    saved.unlink()
    assert new_tokens(model, left_padded(BATCH), **cached(cache)) == alone(model, BATCH)


PATHS_OF_LAYERS = {
    "llama": "model.layers.1",
    "gpt2": "transformer.h.1",
    "opt": "model.decoder.layers.1",
    "llama4": "model.layers.1",
    "gemma3n": "model.layers.1",
    "jetmoe": "model.layers.1",
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PATHS_OF_LAYERS)
def test_each_layer_is_told_its_device(name: str) -> None:
    model = built(name)
    num_layers = len(empty(model).layers)
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert layer_devices(model, num_layers) == [cpu] * num_layers
    model.get_submodule(PATHS_OF_LAYERS[name]).to(other)
    assert layer_devices(model, num_layers) == [cpu, other, cpu, cpu][:num_layers]


@pytest.mark.smoke
def test_a_vision_tower_with_as_many_layers_does_not_tell_devices(model: PreTrainedModel) -> None:
    tower = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    model._modules = {"vision_tower": tower, **model._modules}
    model.model.layers[1].to("meta")
    assert [device.type for device in layer_devices(model, 2)] == ["cpu", "meta"]


def test_layers_that_cannot_be_told_apart_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[1].to("meta")
    model.model.layers.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is on 2 devices, .* one device"):
        layer_devices(model, 2)


def test_a_wrapped_model_is_looked_into(model: PreTrainedModel, saved: Path) -> None:
    cache = empty(model)
    cache.load(saved, nn.ModuleDict({"inner": model}))
    assert new_tokens(model, left_padded(BATCH), **cached(cache)) == alone(model, BATCH)
