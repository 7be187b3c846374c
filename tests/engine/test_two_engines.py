"""Engines over one cache: one steps at a time, in turns, and nobody waits in a circle."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
import torch
from engine_rig import LONG, TOKENIZER, WAIT_S, alone, prompt, shared_model
from prompts import cached

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine_use import StepLock

OTHER = torch.tensor([TOKENIZER("Another log.")["input_ids"]])
# long enough for another thread to get to where it would wait
MOMENT_S = 0.3


@pytest.fixture
def engines(cache: AsymmetricPagedCache) -> Iterator[list[Engine]]:
    made = [Engine(shared_model(), cache, TOKENIZER) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()
    cache.check_integrity()


def change(cache: AsymmetricPagedCache) -> None:
    cache.release(cache.prefill(shared_model(), OTHER))


def test_turns_of_both_that_end_may_change_the_cache(engines, cache):
    """Each kept its own engine from stepping and waited for the other's."""
    is_there = [threading.Event(), threading.Event()]

    def on_end(reply):
        mine = int(reply.name)
        is_there[mine].set()
        is_there[1 - mine].wait(MOMENT_S)
        change(cache)

    turns = [
        engine.submit(prompt("Why?"), name=str(i), on_end=on_end, **LONG)
        for i, engine in enumerate(engines)
    ]
    for turn in turns:
        assert turn.result(WAIT_S).token_ids == alone("Why?", **LONG)


def test_who_has_paused_one_may_change_the_cache_while_another_does(engines, cache):
    def work(engine):
        for _ in range(20):
            with engine.paused():
                change(cache)
            change(cache)

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, engine) for engine in (*engines, engines[0])]
        for each in working:
            each.result(WAIT_S)


def test_a_forward_with_the_cache_needs_a_pause_of_one(engines, cache):
    wanted = shared_model().generate(torch.tensor([prompt("Why?")]), **LONG)
    with engines[0].paused():
        out = shared_model().generate(torch.tensor([prompt("Why?")]), **cached(cache), **LONG)
    assert torch.equal(out, wanted)


def test_one_is_closed_while_the_other_is_paused(engines):
    turn = engines[1].submit(prompt("Why?"), max_new_tokens=200)
    next(iter(turn))
    with engines[0].paused():
        engines[1].close()
    with pytest.raises(RuntimeError, match="takes no more turns"):
        engines[1].submit(prompt("Why?"))


def test_both_step_in_turns(engines):
    steps, options = [], {"max_new_tokens": 60, "eos_token_id": None}
    for name, engine in enumerate(engines):
        batch = engine._worker._batch
        batch.step = lambda step=batch.step, name=name: (steps.append(name), step())
    with engines[0].paused(), engines[1].paused():
        turns = [engine.submit(prompt("Why?"), **options) for engine in engines]
    for turn in turns:
        assert turn.result(WAIT_S).token_ids == alone("Why?", **options)
    runs = [len(list(run)) for _, run in groupby(steps)]
    # the last ones are of the one that has more to do
    assert max(runs[:-1]) <= 15


def test_a_wait_that_is_interrupted_keeps_nobody_out():
    lock, got = StepLock(), []

    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt

    inner, lock._lock = lock._lock, Interrupted()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    lock._lock = inner
    assert not lock.is_ours

    def waiting():
        with lock:
            got.append(True)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert got == [True]


def test_a_turn_whose_end_raises_what_ends_threads_fails_by_itself(engines):
    def leave(reply):
        raise SystemExit(1)

    with engines[0].gathering():
        bad = engines[0].submit(prompt("Why?"), on_end=leave, **LONG)
        bad.cancel()
        good = engines[0].submit(prompt("Who?"), **LONG)
    with pytest.raises(SystemExit):
        bad.result(WAIT_S)
    assert good.result(WAIT_S).token_ids == alone("Who?", **LONG)
