"""A whole file whose prefix does not fit, and a load that fails half-way: nothing is held."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import HYBRIDS, LOCAL, SHARED_PATH, Family
from prompts import (
    PREFIX,
    prefilled,
    prefix_ids,
)
from refusals import observed
from saved import built, empty
from transformers import PreTrainedModel
from trees import CHAINS, LEFT, OTHER, ROOT, TIP, planted

from hf_granikv.errors import PrefixFileError
from hf_granikv.loaded_levels import moved
from hf_granikv.model_digest import ModelDigest
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.pools.row_states import StateKey
from hf_granikv.prefix_file import PrefixLevel, read_prefix, write_prefix
from hf_granikv.views import LayerKind


@pytest.fixture
def model() -> PreTrainedModel:
    return built()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefix.safetensors"


def first_layer(level: PrefixLevel, change: Callable[[torch.Tensor], torch.Tensor]) -> PrefixLevel:
    pairs = [(change(t[0]), *t[1:]) for t in (level.keys, level.values)]
    return replace(level, keys=pairs[0], values=pairs[1])


Change = Callable[[PrefixLevel], PrefixLevel]
UNFIT: dict[str, tuple[Family, Change, str]] = {
    "layers": (
        SHARED_PATH["llama"],
        lambda last: replace(
            last, keys=last.keys[:1], values=last.values[:1], starts=last.starts[:1]
        ),
        "it has 1 layers, the model 2",
    ),
    "heads": (
        SHARED_PATH["llama"],
        lambda last: first_layer(last, lambda t: t[:1].clone()),
        r"layer 0 has heads of \(1, 8, 8",
    ),
    "dtype": (
        SHARED_PATH["llama"],
        lambda last: first_layer(last, lambda t: t.double()),
        "layer 0 has heads of .*float64",
    ),
    "values": (
        SHARED_PATH["llama"],
        lambda last: replace(last, values=[*last.keys[:1], last.values[1][:, 1:].clone()]),
        "layer 1 has keys of",
    ),
    "tokens": (
        SHARED_PATH["llama"],
        lambda last: first_layer(last, lambda t: t[:, 1:].clone()),
        "layer 0 holds 8 tokens from 12 on, not up to 21",
    ),
    "from_later": (
        SHARED_PATH["llama"],
        lambda last: replace(
            first_layer(last, lambda t: t[:, 1:].clone()), starts=[13, *last.starts[1:]]
        ),
        "layer 0 holds tokens from 13 on, and is read from 12 on",
    ),
    "window": (
        LOCAL["gemma2"],
        lambda last: replace(
            first_layer(last, lambda t: t[:, -7:].clone()), starts=[14, *last.starts[1:]]
        ),
        "layer 0 holds tokens from 14 on, and is read from 13 on",
    ),
    "fused": (
        SHARED_PATH["llama"],
        lambda last: replace(last, num_fused=5),
        r"it keeps 5 tokens of its parents, which end at \[0, 12\]",
    ),
    "salt": (
        SHARED_PATH["llama"],
        lambda last: replace(last, salt="a"),
        "its salt is None and 'a'",
    ),
    "no_tokens": (
        SHARED_PATH["llama"],
        lambda last: replace(last, token_ids=last.token_ids[:0].clone()),
        "one of its levels has no tokens",
    ),
    "no_states": (
        HYBRIDS["lfm2"],
        lambda last: replace(last, states={}),
        "it has no states after 21 tokens",
    ),
    "few_states": (
        HYBRIDS["lfm2"],
        lambda last: replace(last, states={at: s[:1] for at, s in last.states.items()}),
        "it has states of 1 layers, not of 2",
    ),
    "states": (
        SHARED_PATH["llama"],
        lambda last: replace(last, states={21: ({},)}),
        "it has states of 1 layers, not of 0",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_go_with_the_layers_is_refused(path: Path, kind: str) -> None:
    family, change, text = UNFIT[kind]
    model = family.model(attn_implementation="granikv")
    cache = empty(model)
    root = cache.prefill(model, prefix_ids(ROOT))
    cache.prefill(model, prefix_ids(LEFT), parent=root).save(path)
    *ahead, last = read_prefix(path, model)
    last = replace(last, keys=list(last.keys), values=list(last.values))
    write_prefix(path, [*ahead, change(last)], ModelDigest.of(model), overwrite=True)
    loaded = empty(model)
    with pytest.raises(PrefixFileError, match=f"{path} is whole, but .*: .*{text}"):
        loaded.load(path, model)
    assert not loaded._state.prefixes


def test_heads_are_compared_with_what_is_held(model: PreTrainedModel, path: Path) -> None:
    level = PrefixLevel(
        torch.tensor(PREFIX), [torch.ones(2, 20, 4)] * 2, [torch.ones(2, 20, 4)] * 2, [0, 0]
    )
    write_prefix(path, [level], ModelDigest.of(model))
    cache = prefilled(model, OTHER)
    text = r"layer 0 has heads of \(2, 4, 4"
    with pytest.raises(PrefixFileError, match=text):
        cache.load(path, model)


@pytest.mark.parametrize("holds_root", [False, True])
def test_a_load_that_fails_half_way_holds_nothing(
    model: PreTrainedModel, path: Path, monkeypatch: pytest.MonkeyPatch, holds_root: bool
) -> None:
    cache, held = planted(model)
    held["tip"].save(path)
    cache.invalidate()
    if holds_root:
        cache.prefill(model, prefix_ids(ROOT))
    before, pooled, seal = observed(cache), cache._state.hot.num_tokens, HotPool.seal

    def failing(self: HotPool, token_ids: torch.Tensor, *args: Any, **options: Any) -> Prefix:
        if len(token_ids) == len(TIP):
            raise MemoryError
        return seal(self, token_ids, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(HotPool, "seal", failing)
        with pytest.raises(MemoryError):
            cache.load(path, model)
    assert (observed(cache), cache._state.hot.num_tokens) == (before, pooled)
    cache.load(path, model)
    assert cache.stats().hot_tokens == len(CHAINS["tip"])


def test_layers_go_to_their_devices_and_those_on_the_cpu_are_not_copied() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    kinds = [LayerKind(num_states=1), LayerKind()]
    made = {key: torch.ones(2, 3, 4) for key in "abcd"}
    state = {StateKey("conv_states", 0): torch.ones(1, 3)}
    level = PrefixLevel(
        torch.arange(3), [made["a"], made["b"]], [made["c"], made["d"]], [0, 0], {0: [], 3: [state]}
    )
    with torch.inference_mode():
        here, there = (moved(level, kinds, devices) for devices in ([cpu, other], [other, cpu]))
    assert here.keys[0] is made["a"]
    assert here.values[0] is made["c"]
    assert here.states[3][0] == state
    assert there.keys[1] is made["b"]
    assert there.states[0] == []
    gone = [here.keys[1], here.values[1], there.keys[0], *there.states[3][0].values()]
    assert all(tensor.device == other and not tensor.is_inference() for tensor in gone)
