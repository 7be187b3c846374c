"""What layers give is made for all of them at the first one of a step, and kept no longer than needed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import logits_alone, prefilled, step, suffixes, whole
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv.layer import AsymmetricPagedLayer
from hf_granikv.lazy import LazyKeyValue
from hf_granikv.ready_layers import own_tokens

Build = Callable[..., PreTrainedModel]


def started(model: PreTrainedModel) -> tuple[Any, list[list[int]]]:
    """A cache whose rows have read their suffixes, and all that they have read."""
    cache, own = prefilled(model), suffixes(4, 4)
    mask = torch.ones(2, cache.get_seq_length() + 4, dtype=torch.int64)
    step(model, cache, own, attention_mask=mask)
    return cache, whole(own)


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3", "falcon_h1"])
def test_every_layer_but_the_first_gives_what_was_made_ready(
    tiny_model: Build, monkeypatch: pytest.MonkeyPatch, name: str, attention: str
) -> None:
    model, given = tiny_model(name, attention), []
    cache, rows = started(model)
    made_ready = AsymmetricPagedLayer.made_ready

    def noted(self: AsymmetricPagedLayer, *args: Any) -> Any:
        given.append((self.layer_idx, (result := made_ready(self, *args)) is not None))
        return result

    monkeypatch.setattr(AsymmetricPagedLayer, "made_ready", noted)
    logits = step(model, cache, [[5], [6]])
    assert given == [(layer_idx, True) for layer_idx in range(1, model.config.num_hidden_layers)]
    for row, ids in enumerate(rows):
        want = logits_alone(model, [*ids, 5 + row], 1)
        torch.testing.assert_close(logits[row], want, atol=1e-3, rtol=0)
    assert not cache._state.current_step().ready
    assert not cache._state.current_step().plan.to_come


@pytest.mark.nothing_shared
def test_dense_keys_of_one_layer_are_gone_when_the_next_one_runs(
    tiny_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama", "sdpa")
    cache, _ = started(model)
    built: list[weakref.ref[Tensor]] = []
    materialize = LazyKeyValue.materialize

    def noted(self: LazyKeyValue, asked_by: str) -> Tensor:
        dense = materialize(self, asked_by)
        built.append(weakref.ref(dense))
        return dense

    def none_is_left(*args: Any) -> None:
        assert [ref for ref in built if ref() is not None] == []

    monkeypatch.setattr(LazyKeyValue, "materialize", noted)
    handles = [layer.register_forward_pre_hook(none_is_left) for layer in model.model.layers]
    try:
        step(model, cache, [[5], [6]])
    finally:
        for handle in handles:
            handle.remove()
    assert built
    none_is_left()


def test_it_is_known_where_tokens_go_if_each_row_brings_one(tiny_model: Build) -> None:
    model = tiny_model("llama")
    cache, _ = started(model)
    mask = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.int64)

    def new_slots() -> Any:
        state = cache._state
        return own_tokens(state, state.current_step(), 1).new_slots

    step(model, cache, [[5], [6]], attention_mask=mask)
    table = cache._state.cold.table
    assert new_slots().tolist() == [table.row(row)[-1] for row in (0, 1)]
    # the second row brings a pad
    mask = torch.cat([mask, torch.tensor([[1], [0]])], 1)
    step(model, cache, [[7], [0]], attention_mask=mask)
    assert new_slots() is None
    step(model, cache, [[7, 8], [9, 10]], attention_mask=torch.cat([mask, mask[:, :2]], 1))
    assert new_slots() is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("end", ["reset", "del"])
def test_layers_that_do_not_run_leave_nothing_behind(
    tiny_model: Build, error: type[BaseException], end: str
) -> None:
    model: Any = tiny_model("llama")
    cache, _ = started(model)
    storages = [weakref.ref(cache._state.cold.storage(i)[0]) for i in range(2)]

    begun = []

    def fail(*args: Any) -> None:
        begun.append(cache._state.current_step())
        assert begun[0].plan.to_come
        raise error

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(error) as caught:
            step(model, cache, [[5], [6]])
        # its traceback holds the frames of the forward
        del caught
        # torch shows no interrupt to hooks: then the end comes with what is done next
        (half,) = begun
        assert (not half.ready and not half.plan.to_come) == (error is RuntimeError)
        begun.clear()
        del half
        if end == "reset":
            cache.reset()
        else:
            del cache, fail
            handle.remove()
        assert [storage() for storage in storages] == [None, None]
    finally:
        gc.enable()
        handle.remove()


@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_what_does_not_fit_is_refused_in_a_later_layer_too(
    tiny_model: Build, heads: int, dtype: torch.dtype
) -> None:
    model: Any = tiny_model("llama")
    cache, rows = started(model)
    update, head_dim = cache.layers[1].update, model.config.head_dim

    def of_another_kind(*args: Any, **kwargs: Any) -> Any:
        odd = torch.zeros(2, heads, 1, head_dim, dtype=dtype)
        return update(odd, odd)

    cache.layers[1].update = of_another_kind
    with pytest.raises(ValueError, match=f"layer 1 brings keys of {heads} heads x"):
        step(model, cache, [[5], [6]])
    cache.layers[1].update = update
    cache.check_integrity()
    logits = step(model, cache, [[5], [6]])
    want = logits_alone(model, [*rows[0], 5], 1)
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=0)
