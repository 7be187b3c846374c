"""A cache holds the rows of one call at a time; whoever loses its own is told."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from prompts import (
    alone,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    whole,
)
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import RowsTakenError

EVEN, RAGGED = suffixes(4, 4), suffixes(3, 7)


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


class AtThirdStep(LogitsProcessor):
    """Does something between two forwards of a call."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act, self._num_steps = act, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._num_steps += 1
        if self._num_steps == 3:
            self._act()
        return scores


def between(act: Callable[[], Any]) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([AtThirdStep(act)])}


def in_a_thread(act: Callable[[], Any]) -> list[Any]:
    """What it gives, or what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return found


def invalidate_and_prefill(cache: AsymmetricPagedCache, model: PreTrainedModel) -> None:
    cache.invalidate()
    cache.prefill(model, prefix_ids())


DROPS: dict[str, Callable[[AsymmetricPagedCache, PreTrainedModel], Any]] = {
    "reset": lambda cache, model: cache.reset(),
    "invalidate": lambda cache, model: cache.invalidate(),
    "invalidate_and_prefill": invalidate_and_prefill,
    "release": lambda cache, model: cache.release(cache.rows.prefixes.only),
    "reset_elsewhere": lambda cache, model: in_a_thread(cache.reset),
}


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("drop", DROPS)
def test_rows_that_are_dropped_under_a_call_end_it(
    model: PreTrainedModel, drop: str, rows: list[list[int]]
) -> None:
    """It went on from the prefix, or from nothing, with the last token alone."""
    cache = prefilled(model)
    options = between(lambda: DROPS[drop](cache, model))
    with pytest.raises(RowsTakenError, match="dropped while it was running, by reset"):
        new_tokens(model, left_padded(whole(rows)), **options, **cached(cache))
    cache.check_integrity()
    if not cache.rows.prefixes:
        cache.prefill(model, prefix_ids())
    assert new_tokens(model, left_padded(whole(rows)), **cached(cache)) == alone(model, whole(rows))


@pytest.mark.parametrize("where", ["inside", "in_a_thread"])
def test_a_call_whose_rows_another_call_replaces_ends(model: PreTrainedModel, where: str) -> None:
    cache, found = prefilled(model), []

    def other() -> None:
        found.append(new_tokens(model, left_padded(whole(EVEN)), **cached(cache)))

    act = other if where == "inside" else lambda: in_a_thread(other)
    with pytest.raises(RowsTakenError, match="another call has started rows"):
        new_tokens(model, left_padded(whole(EVEN)), **between(act), **cached(cache))
    assert found == [alone(model, whole(EVEN))]


def test_a_forward_under_way_keeps_other_threads_out(model: PreTrainedModel) -> None:
    cache, found, inputs = prefilled(model), [], left_padded(whole(EVEN))
    want, seen = alone(model, whole(EVEN)), []

    def intrude(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            found.extend(in_a_thread(lambda: new_tokens(model, inputs, **cached(cache))))

    hook = model.model.layers[1].register_forward_pre_hook(intrude)
    try:
        got = new_tokens(model, inputs, **cached(cache))
    finally:
        hook.remove()
    assert got == want
    assert isinstance(found[0], RowsTakenError)
    assert "a forward pass of another thread is under way" in str(found[0])
    assert "Give each call a cache.fork()" in str(found[0])


def test_forks_serve_as_many_threads(model: PreTrainedModel) -> None:
    cache, rows = prefilled(model), [whole(suffixes(3, n)) for n in (1, 4, 6)]
    found: dict[int, Any] = {}

    def run(i: int, fork: AsymmetricPagedCache) -> None:
        found[i] = new_tokens(model, left_padded(rows[i]), **cached(fork))

    threads = [Thread(target=run, args=(i, cache.fork())) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(i) for i in range(3)] == [alone(model, batch) for batch in rows]


def test_a_loop_by_hand_may_wander_and_reset_as_it_likes(model: PreTrainedModel) -> None:
    cache, ids = prefilled(model), torch.tensor(EVEN)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, **cached(cache)).logits
        return logits

    first = step()
    second = in_a_thread(step)[0]
    assert not torch.equal(first, second)
    cache.reset()
    assert torch.equal(in_a_thread(step)[0], first)
    # a call of another cache is under way
    other, heard = prefilled(model), []
    options = between(lambda: (cache.reset(), heard.append(step())))
    new_tokens(model, left_padded(whole(EVEN)), **options, **cached(other))
    assert torch.equal(heard[0], first)


def test_a_thread_that_ended_in_a_forward_locks_nobody_out(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    cache._reader.owner._running_in = -1
    assert new_tokens(model, left_padded(whole(EVEN)), **cached(cache)) == alone(model, whole(EVEN))


def test_a_call_after_rows_were_dropped_is_a_new_one(model: PreTrainedModel) -> None:
    """Also without a prefix, where no first forward of a call is told from others."""
    cache, rows = prefilled(model), whole(EVEN)
    want = alone(model, rows)
    for drop in (cache.reset, cache.invalidate, cache.reset):
        assert new_tokens(model, left_padded(rows), **cached(cache)) == want
        drop()
    assert not cache.rows.prefixes
    options = between(cache.reset)
    with pytest.raises(RowsTakenError, match="dropped while it was running"):
        new_tokens(model, left_padded(rows), **options, **cached(cache))
