"""What is not saved, and what is not loaded: refused with the reason, and nothing changes."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import with_lora
from prompts import (
    cached,
    prefilled,
    prefix_ids,
)
from refusals import assert_refused
from safetensors.torch import save_file
from saved import assert_same, built, empty
from transformers import PreTrainedModel
from trees import LEFT, OTHER

from hf_granikv.announce import announce_forward
from hf_granikv.errors import PrefixFileError, StalePrefixError
from hf_granikv.model_digest import ModelDigest
from hf_granikv.pools import HotPool, Prefix


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


# ---- another model


def shift(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def adapted() -> PreTrainedModel:
    model = built()
    with_lora(model, "a")
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "weights": (lambda: built(seed=5), "its weights are others"),
    "dtype": (lambda: built().bfloat16(), "its weights are torch.bfloat16, not torch.float32"),
    "adapter": (adapted, "v_proj.active_adapter is 'a', not None"),
    "config": (lambda: built(rms_norm_eps=0.1), "rms_norm_eps of its config is 0.1, not 1e-06"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused(model: PreTrainedModel, saved: Path, name: str) -> None:
    build, difference = OTHER_MODELS[name]
    other = build()
    cache = empty(model)
    with pytest.raises(PrefixFileError, match=difference):
        cache.load(saved, other)
    assert other not in cache._models
    assert announce_forward not in other._forward_pre_hooks.values()
    # as it was: the model of the file may still come
    cache.load(saved, model)
    # and a cache that serves the model of the file goes on doing so
    held = prefilled(model)
    assert_refused(held, model, lambda: held.load(saved, other), PrefixFileError, difference)


def test_a_model_with_other_layers_is_refused(model: PreTrainedModel, saved: Path) -> None:
    cache, other = prefilled(model), built(num_hidden_layers=3)
    with pytest.raises(ValueError, match="has 3 layers, the cache was built for 2"):
        cache.load(saved, other)


def test_a_prefix_of_another_model_than_those_held_is_refused(
    model: PreTrainedModel, path: Path
) -> None:
    other = built(seed=5)
    prefilled(other, OTHER)._state.prefixes.only.save(path)
    cache = prefilled(model)
    text = "the prefix was computed with another LlamaForCausalLM"
    assert_refused(cache, model, lambda: cache.load(path, other), StalePrefixError, text)


def test_rows_without_a_prefix_keep_it_out(model: PreTrainedModel, saved: Path) -> None:
    cache = empty(model)
    with torch.no_grad():
        model(input_ids=prefix_ids(OTHER), **cached(cache))
    with pytest.raises(ValueError, match="holds 1 row already"):
        cache.load(saved, model)
    assert cache.stats().hot_bytes == 0


# ---- saving


def refused(prefix: Prefix, path: Path, text: str) -> None:
    with pytest.raises(StalePrefixError, match=text):
        prefix.save(path)
    assert not path.exists()


def test_a_changed_model_is_named(model: PreTrainedModel, path: Path) -> None:
    cache = prefilled(model)
    prefix = cache._state.prefixes.only
    shift(model)
    refused(prefix, path, r"LlamaForCausalLM has changed .*layers.0.self_attn.k_proj.weight was w")
    # what it computes from now on is another prefix
    cache.invalidate()
    after = cache.prefill(model, prefix_ids())
    refused(prefix, path, "cannot be saved")
    after.save(path)
    assert_same(empty(model).load(path, model), after)


def test_a_prefix_outlives_its_holds_but_not_its_model(path: Path) -> None:
    model = built()
    cache = prefilled(model)
    prefix = cache._state.prefixes.only
    cache.release(prefix)
    prefix.save(path)
    path.unlink()
    del model
    gc.collect()
    refused(prefix, path, "no model that computes it is left")


def test_an_attached_twin_speaks_for_a_changed_model(model: PreTrainedModel, path: Path) -> None:
    cache, twin = prefilled(model), built()
    cache.attach(twin)
    shift(model)
    cache._state.prefixes.only.save(path)
    assert_same(empty(twin).load(path, twin), cache._state.prefixes.only)


def test_invalidate_has_a_model_hashed_anew(tmp_path: Path) -> None:
    """A write that no mark shows: past autograd, at the end of a tensor of more than 4,096."""
    model = built(intermediate_size=256)
    cache = prefilled(model)
    before = cache._state.prefixes.only
    before.save(tmp_path / "before")
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[-1, -1] += 1
    cache._models.check(model)
    cache.invalidate()
    refused(before, tmp_path / "none", r"cache.invalidate was called since")
    after = cache.prefill(model, prefix_ids())
    after.save(tmp_path / "after")
    assert_same(empty(model).load(tmp_path / "after", model), after)
    with pytest.raises(PrefixFileError, match="its weights are others"):
        empty(model).load(tmp_path / "before", model)


def test_forks_save_what_they_prefill(model: PreTrainedModel, path: Path) -> None:
    cache = prefilled(model)
    twin = cache.fork()
    child = twin.prefill(model, prefix_ids(LEFT), parent=cache._state.prefixes.only)
    cache.invalidate()
    child.save(path)
    assert_same(empty(model).load(path, model), child)


def test_a_file_that_is_there_is_kept(model: PreTrainedModel, saved: Path) -> None:
    before, prefix = saved.read_bytes(), prefilled(model, OTHER)._state.prefixes.only
    with pytest.raises(PrefixFileError, match=r"is there already; .* overwrite=True"):
        prefix.save(saved)
    assert saved.read_bytes() == before
    prefix.save(saved, overwrite=True)
    assert_same(empty(model).load(saved, model), prefix)


def test_a_model_is_not_hashed_for_a_file_that_cannot_be_written(
    model: PreTrainedModel, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelDigest, "of", lambda model: pytest.fail("it was hashed"))
    with pytest.raises(PrefixFileError, match="is there already"):
        prefilled(model)._state.prefixes.only.save(saved)


def test_a_prefix_that_no_cache_made_is_not_saved(path: Path) -> None:
    prefix = HotPool().seal(torch.arange(3), [])
    with pytest.raises(ValueError, match="was made by no cache"):
        prefix.save(path)


def test_a_prefix_is_copied_but_not_pickled(model: PreTrainedModel, path: Path) -> None:
    prefix = prefilled(model)._state.prefixes.only
    with pytest.raises(TypeError, match=r"prefix.save\(path\)"):
        pickle.dumps(prefix)
    copy.deepcopy(prefix).save(path)
    assert_same(empty(model).load(path, model), prefix)


# ---- broken files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut, "truncated"),
    "altered": (alter, "was altered"),
    "weights": (lambda path: save_file({"weight": torch.ones(3)}, path), "holds no prefix"),
    "pickle": (lambda path: torch.save({"a": torch.ones(3)}, path), "is no safetensors file"),
    "missing": (Path.unlink, "is not there"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_changes_nothing(model: PreTrainedModel, saved: Path, kind: str) -> None:
    destroy, text = BROKEN[kind]
    destroy(saved)
    cache = empty(model)
    with pytest.raises(PrefixFileError, match=text):
        cache.load(saved, model)
    assert not cache._state.prefixes
    assert model not in cache._models
    held = prefilled(model)
    assert_refused(held, model, lambda: held.load(saved, model), PrefixFileError, text)
