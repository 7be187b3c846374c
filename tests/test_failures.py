"""What is held after memory ran out, an interrupt, or weights that changed: right, or refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import SHARED_PATH, Family
from prompts import PREFIX, cached, left_padded, logits_alone, prefilled, prefix_ids, tokens
from test_live_rows import Watched
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import StalePrefixError
from hf_granikv.pools.storage import SlotStorage
from hf_granikv.state import CacheState


@contextmanager
def memory_runs_out(monkeypatch: pytest.MonkeyPatch, *, at: int = 1) -> Iterator[None]:
    """The `at`-th time that a pool which holds tokens grows, in its second layer."""
    calls: list[int] = []

    def breaking(grow: Callable[..., None]) -> Callable[..., None]:
        def run(self: SlotStorage, *args: Any) -> None:
            # of `resize` and of `spread`
            is_growth = 0 < self.num_slots < args[-1] and self.bytes_per_token > 0
            calls.extend([1] * is_growth)
            with monkeypatch.context() as patch:
                if is_growth and len(calls) == at:
                    patch.setattr("hf_granikv.pools.storage.empty", _fails_in_the_second_layer())
                grow(self, *args)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(SlotStorage, "resize", breaking(SlotStorage.resize))
        patch.setattr(SlotStorage, "spread", breaking(SlotStorage.spread))
        yield


def _fails_in_the_second_layer() -> Callable[..., Any]:
    from hf_granikv.pools import storage

    made, calls = storage.empty, []

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no memory left")
        return made(*args)

    return fails


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_pool_that_cannot_grow_keeps_what_it_holds(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, has_prefix: bool
) -> None:
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    row = [*(PREFIX if has_prefix else []), *tokens(3, seed=1)]
    with torch.no_grad():
        model(input_ids=torch.tensor([row[-3:]] * 2), **cached(cache))
        failures = 0
        for token in tokens(40, seed=2):
            ids = torch.tensor([[token]] * 2)
            with memory_runs_out(monkeypatch):
                try:
                    got = model(input_ids=ids, **cached(cache)).logits
                except torch.OutOfMemoryError:
                    failures += 1
                    cache.check_integrity()
                    got = None
            if got is None:
                got = model(input_ids=ids, **cached(cache)).logits
            row = [*row, token]
            want = logits_alone(model, row, 1)
            torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
    assert failures


def test_a_row_that_cannot_join_leaves_the_others_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Watched(model)
    first, second = held.start("tip"), held.start("left")
    held.step({first: tokens(3, seed=1), second: tokens(30, seed=2)})
    held.step({first: [5]})
    with memory_runs_out(monkeypatch), pytest.raises(torch.OutOfMemoryError):
        held.live.forward({first: [6], second: [7]})
    held.check()
    held.step({first: [6], second: [7]})
    held.check()


def test_an_interrupt_is_undone_before_anything_is_made_of_it(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    row = [*PREFIX, *tokens(3, seed=1)]
    with torch.no_grad():
        model(input_ids=torch.tensor([row[-3:]]), **cached(cache))

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        for use in ("fork", "park", "crop", "reorder"):
            hook = model.model.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(input_ids=torch.tensor([[5]]), **cached(cache))
            hook.remove()
            if use == "fork":
                cache = cache.fork()
            elif use == "park":
                assert cache.rows.park(0).num_tokens == 3
            elif use == "crop":
                cache.crop(0)
            else:
                cache.reorder_cache(torch.tensor([0]))
            got = model(input_ids=torch.tensor([[9]]), **cached(cache)).logits
            want = logits_alone(model, [*row, 9], 1)
            torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
            cache.crop(-1)


def test_what_was_computed_before_weights_changed_is_not_gone_on_from() -> None:
    held = Watched(SHARED_PATH["llama"].model(attn_implementation="granikv"))
    row = held.start("tip")
    held.step({row: [4, 5]})
    parked = held.live.park(row)
    with torch.no_grad():
        for weight in held.model.parameters():
            weight.mul_(1.1)
    with pytest.raises(StalePrefixError):
        held.live.start(held.prefixes["tip"], parked)
    held.cache.invalidate()
    held.cache.prefill(held.model, prefix_ids())
    with pytest.raises((StalePrefixError, ValueError)):
        held.cache.promote(parked, torch.tensor([4, 5]))


def test_promote_needs_a_model_and_its_dtype(model: PreTrainedModel) -> None:
    plain = AsymmetricPagedCache(model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]), **cached(plain))
    with pytest.raises(ValueError, match=r"reset\(\) first"):
        plain.promote(plain.rows.park(0), torch.tensor([5]))
    parked = plain.rows.park(0)
    plain.reset()
    with pytest.raises(ValueError, match="attach"):
        plain.promote(parked, torch.tensor([5]))
    plain.attach(model)
    assert plain.promote(parked, torch.tensor([5])).num_tokens == 1


def test_rows_on_both_sides_of_a_rope_limit_are_not_one_batch() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    model = Family("LlamaConfig", {"rope_parameters": rope}).model(attn_implementation="granikv")
    cache = AsymmetricPagedCache(model.config)
    long, short = tokens(40, seed=1), tokens(10, seed=2)
    for ids in (long, short):
        cache.prefill(model, prefix_ids(ids))
    prompts = left_padded([[*long, 5], [*short, 6]])
    cache.bind(**prompts)
    with pytest.raises(ValueError, match="longrope"):
        model.generate(**prompts, **cached(cache), max_new_tokens=2)
    alone = left_padded([[*short, 6]])
    cache.bind(**alone)
    model.generate(**alone, **cached(cache), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("fails_in", ["_plan", "append_columns"])
def test_a_step_that_cannot_be_planned_takes_its_tokens_back(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, has_prefix: bool, fails_in: str
) -> None:
    """They were there and no layer had written them: every row went on with a token of nothing."""
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    row = [*(PREFIX if has_prefix else []), *tokens(3, seed=1)]
    ids = torch.tensor([[7], [7]])

    def fails(*args: Any) -> Any:
        raise MemoryError("no memory left")

    with torch.no_grad():
        model(input_ids=torch.tensor([row[-3:]] * 2), **cached(cache))
        with monkeypatch.context() as patch:
            patch.setattr(CacheState, fails_in, fails)
            with pytest.raises(MemoryError):
                model(input_ids=ids, **cached(cache))
        assert cache.rows.cold.table.lengths.tolist() == [3, 3]
        got = model(input_ids=ids, **cached(cache)).logits
    want = logits_alone(model, [*row, 7], 1)
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
    cache.check_integrity()
