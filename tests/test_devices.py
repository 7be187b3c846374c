"""Layers on several devices: each layer's tensors stay on its own, and nothing mixes two of them.

There is one real device here. Fake tensors stand in, half of them on a second device type: they carry
shapes and devices, compute nothing,
and refuse an operation between devices as a real one would.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import LOCAL, SHARED_PATH, Family
from prompts import PREFIX
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_granikv import AsymmetricPagedCache
from hf_granikv.attention import granikv_attention
from hf_granikv.layouts import Layout
from hf_granikv.lazy import LazyKeyValue

DEVICES = [torch.device("cpu"), torch.device("meta")]
P = len(PREFIX)
RAGGED = np.array([[0, 0, 1], [1, 1, 1]], dtype=bool)
EVEN = np.ones((2, 3), dtype=bool)


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def held(family: Family) -> Any:
    """A cache whose layer i has its prefix on device i."""
    config = family.config()
    cache = AsymmetricPagedCache(config)
    starts = [0 if kind.window is None else P - kind.window.size for kind in cache._served.layers]
    pairs = [
        tuple(torch.empty(2, P - start, 8, device=device) for _ in range(2))
        for device, start in zip(DEVICES, starts, strict=True)
    ]
    state = cache._state
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        ids = torch.tensor(PREFIX)
    state.prefixes.take(state.hot.seal(ids, pairs))
    return cache


def layout_of(cache: Any, starts_batch: bool, owned: np.ndarray) -> Layout:
    reads = cache._state.prefixes.starting_rows(len(owned))
    return Layout(starts_batch, reads, owned, is_full=bool(owned.all()))


def step(cache: Any, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """One forward through both layers: what update returns."""
    cache._state.stage(layout)
    num_rows, q_len = layout.owned.shape
    returned = [
        layer.update(*(torch.empty(num_rows, 2, q_len, 8, device=device) for _ in range(2)))
        for layer, device in zip(cache.layers, DEVICES, strict=True)
    ]
    cache.settle(is_complete=True)
    return returned


@pytest.mark.parametrize("owned", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("family", [SHARED_PATH["llama"], LOCAL["gemma2"]], ids=["full", "local"])
def test_every_layer_works_on_its_own_device(family: Family, owned: np.ndarray) -> None:
    cache, module = held(family), nn.Module()
    module.num_key_value_groups = 2
    one = np.ones((2, 1), dtype=bool)
    for starts_batch, columns in ((True, owned), (False, one), (False, owned)):
        layout = layout_of(cache, starts_batch, columns)
        returned = step(cache, layout)
        for device, (keys, values) in zip(DEVICES, returned, strict=True):
            assert isinstance(keys, LazyKeyValue)
            assert keys.device == device
            query = torch.empty(2, 4, layout.owned.shape[1], 8, device=device)
            out, _ = granikv_attention(module, query, keys, values, None, softcap=30.0)
            assert out.device == device
            assert keys.materialize("a test").device == device
    for layer_idx, device in enumerate(DEVICES):
        assert {t.device for t in cache._state.cold.storage(layer_idx)} == {device}


def test_rows_that_moved_are_read_on_every_device() -> None:
    cache = held(SHARED_PATH["llama"])
    step(cache, layout_of(cache, True, EVEN))
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.batch_repeat_interleave(2)
    returned = step(cache, layout_of(cache, False, np.ones((4, 1), dtype=bool)))
    assert [keys.materialize("a test").device for keys, _ in returned] == DEVICES
