"""Rows computed one after the other: logits of each alone, whatever the others do."""

import gc

import pytest
import torch
from prompts import logits_alone, prefix_ids, tokens
from trees import CHAINS, planted

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.separate_rows import SeparateRows
from hf_granikv.errors import ColdPoolFullError

# the last one keeps states
FAMILIES = ["llama", "gpt2", "gemma3", "deepseek_v3", "qwen3_next"]


@pytest.fixture(params=FAMILIES)
def model(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def close(logits, model, ids):
    wanted = logits_alone(model, ids, 1)[0]
    torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)
    return bool(logits.argmax() == wanted.argmax())


def test_each_row_reads_its_own_chain(model):
    cache, held = planted(model)
    rows = SeparateRows(model, cache)
    started = {name: rows.start(held.get(name)) for name in CHAINS}
    own = {name: tokens(4, seed=i) for i, name in enumerate(CHAINS)}
    first = rows.forward({row: own[name][:3] for name, row in started.items()})
    one = rows.forward({started["tip"]: own["tip"][3:]})
    for name, row in started.items():
        assert close(first[row], model, [*CHAINS[name], *own[name][:3]])
    assert close(one[started["tip"]], model, [*CHAINS["tip"], *own["tip"]])
    assert rows.num_tokens(started["tip"]) == 4
    assert rows.num_slots_used == 3 * len(CHAINS) + 1
    rows.check_integrity()


def test_rows_that_share_what_was_parked_do_not_see_each_other(model):
    cache, held = planted(model)
    rows, own = SeparateRows(model, cache), tokens(9, seed=1)
    row = rows.start(held["left"])
    rows.forward({row: own[:5]})
    parked = rows.park(row)
    assert (rows.num_slots_used, parked.num_tokens, parked.prefix) == (0, 5, held["left"])
    assert parked.num_bytes > 0
    first, second = rows.start(held["left"], parked), rows.start(held["left"], parked)
    rows.forward({first: own[5:7]})
    logits = rows.forward({first: own[7:], second: own[6:8]})
    assert close(logits[first], model, [*CHAINS["left"], *own])
    assert close(logits[second], model, [*CHAINS["left"], *own[:5], *own[6:8]])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cropped_row_goes_on_with_other_tokens(tiny_model, family):
    model = tiny_model(family)
    cache, held = planted(model)
    rows, own = SeparateRows(model, cache), tokens(9, seed=1)
    row = rows.start(held["left"])
    rows.forward({row: own[:6]})
    rows.crop(row, 4)
    logits = rows.forward({row: own[6:]})
    assert close(logits[row], model, [*CHAINS["left"], *own[:2], *own[6:]])


def test_states_cannot_be_cropped(tiny_model):
    model = tiny_model("qwen3_next")
    cache, held = planted(model)
    rows = SeparateRows(model, cache)
    row = rows.start(held["left"])
    rows.forward({row: tokens(3, seed=1)})
    with pytest.raises(ValueError, match="state"):
        rows.crop(row, 1)


@pytest.mark.parametrize("layer", [0, -1])
def test_a_failing_forward_leaves_every_row_as_it_was(model, layer):
    cache, held = planted(model)
    rows, own = SeparateRows(model, cache), tokens(6, seed=1)
    started = [rows.start(held[name]) for name in ("left", "tip", "none") if name in held]
    rows.forward(dict.fromkeys(started, own[:3]))
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")

    stack = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    hook = stack[layer].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        rows.forward(dict.fromkeys(started, own[3:5]))
    hook.remove()
    assert [rows.num_tokens(row) for row in started] == [3, 3]
    logits = rows.forward(dict.fromkeys(started, own[3:]))
    for row, name in zip(started, ("left", "tip"), strict=True):
        assert close(logits[row], model, [*CHAINS[name], *own])
    rows.check_integrity()


def test_the_limit_goes_for_all_rows_together(tiny_model):
    model = tiny_model("llama")
    cache, held = planted(model, cold_slots=20)
    rows = SeparateRows(model, cache)
    first, second = rows.start(held["left"]), rows.start(None)
    rows.forward({first: tokens(9, seed=1), second: tokens(9, seed=2)})
    with pytest.raises(ColdPoolFullError, match="hold 18 of cold_slots=20 private tokens, 3 more"):
        rows.forward({first: [5], second: [5, 6]})
    rows.drop(first)
    rows.forward({second: tokens(11, seed=3)})
    assert (rows.num_slots_used, rows.num_slots_limit) == (20, 20)


def test_a_token_costs_what_the_pool_says(tiny_model):
    model = tiny_model("llama")
    # 2 layers, keys and values, 2 kv heads of 8 numbers, 4 bytes each
    assert SeparateRows(model, AsymmetricPagedCache(model.config)).bytes_per_token == 256


def test_rows_hold_their_own_chain_and_no_other(tiny_model):
    model = tiny_model("llama")
    cache, held = planted(model)
    rows, pool = SeparateRows(model, cache), cache._state.hot
    row = rows.start(held["right"])
    rows.forward({row: [5, 6]})
    for name in ("tip", "right", "left", "other", "root"):
        cache.release(held[name])
    assert set(pool._holders) == {held["right"], held["root"]}
    parked = rows.park(row)
    with pytest.raises(ValueError, match="does not hold"):
        rows.start(held["left"])
    other = rows.start(held["right"], parked)
    del parked, row
    rows.drop(other)
    gc.collect()
    assert not pool._holders


def test_two_holds_of_one_prefix_are_let_go_together(tiny_model):
    model = tiny_model("llama")
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids())
    assert cache.prefill(model, prefix_ids()) is prefix
    rows = SeparateRows(model, cache)
    row = rows.start(None)
    assert cache._state.hot._holders[prefix] == 2
    logits = rows.forward({row: [5, 6, 7]})[row]
    assert close(logits, model, [5, 6, 7])
