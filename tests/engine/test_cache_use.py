"""The cache of a running engine in the hands of others: they wait, or are told what to do."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agents import new_runner
from engine_rig import LONG, TOKENIZER, WAIT_S, alone, ask, prompt, shared_model
from prompts import cached
from test_engine import Gate

from hf_granikv.engine.engine import Engine

OTHER = torch.tensor([TOKENIZER("Another log.")["input_ids"]])
PROMPT = torch.tensor([prompt("Who?")])


def child(cache):
    return cache.prefill(shared_model(), OTHER, parent=cache.rows.prefixes.any)


USES = {
    "prefill": lambda cache, path: cache.prefill(shared_model(), OTHER),
    "prefill of a child": lambda cache, path: child(cache),
    "bind": lambda cache, path: cache.bind(PROMPT),
    "release": lambda cache, path: cache.release(cache.rows.prefixes.any),
    "invalidate": lambda cache, path: cache.invalidate(),
    "fork": lambda cache, path: cache.fork(),
    "load": lambda cache, path: cache.load(path, shared_model()),
}


@pytest.mark.parametrize("use", USES)
def test_what_changes_prefixes_waits_for_the_step_under_way(engine, cache, tmp_path, use):
    path, did, done = tmp_path / "prefix.safetensors", threading.Event(), []
    if use == "load":
        child(cache).save(path)
    turn = ask(engine, "Why?", max_new_tokens=40)
    next(iter(turn))

    def run():
        done.append(USES[use](cache, path))
        did.set()

    with Gate(shared_model()) as gate:
        assert gate.is_reached.wait(WAIT_S)
        using = threading.Thread(target=run)
        using.start()
        assert not did.wait(0.2)
        gate.is_open = True
        gate.let(1)
        assert did.wait(WAIT_S)
        using.join(WAIT_S)
    assert len(done) == 1
    # its rows hold what they read themselves
    assert turn.result(WAIT_S).token_ids[:12] == alone("Why?", **LONG)


def test_prefixes_come_and_go_while_turns_run(engine, cache):
    texts = [f"{word} {i}?" for i in range(6) for word in ("Why", "Who", "When")]

    def work(seed):
        ids = torch.tensor([[70 + seed, *OTHER[0].tolist()]])
        for _ in range(12):
            prefix = cache.prefill(shared_model(), ids)
            twin = cache.bind(PROMPT).fork()
            cache.release(prefix)
            del twin

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, seed) for seed in range(3)]
        for turn in [ask(engine, text) for text in texts]:
            assert turn.result(WAIT_S).token_ids == alone(turn.name, **LONG)
        for each in working:
            each.result(WAIT_S)
    assert cache.stats().hot_tokens == engine.prefix.num_tokens
    cache.check_integrity()


def test_forwards_with_the_cache_itself_are_refused_outside_of_a_pause(cache):
    wanted = shared_model().generate(PROMPT, **LONG)
    with Engine(shared_model(), cache, TOKENIZER) as engine:
        with pytest.raises(RuntimeError, match=r"inside `with engine.paused\(\):`, or with a fork"):
            shared_model().generate(PROMPT, **cached(cache), **LONG)
        assert cache.rows.num_rows == 0
        with engine.paused():
            assert torch.equal(shared_model().generate(PROMPT, **cached(cache), **LONG), wanted)
        twin = cache.fork()
        assert torch.equal(shared_model().generate(PROMPT, **cached(twin), **LONG), wanted)
        with engine.paused(), ThreadPoolExecutor(1) as pool:
            other = pool.submit(shared_model().generate, PROMPT, **cached(cache), **LONG)
            with pytest.raises(RuntimeError, match="an engine runs over this cache"):
                other.result(WAIT_S)
    assert torch.equal(shared_model().generate(PROMPT, **cached(cache), **LONG), wanted)


@pytest.mark.parametrize(
    "copied", [lambda cache: cache.fork(), copy.deepcopy], ids=["fork", "deepcopy"]
)
def test_copies_of_the_cache_generate_while_the_engine_decodes(engine, cache, copied):
    """Of the same model at the same time; and each with rows of its own."""
    wanted = shared_model().generate(PROMPT, **LONG)
    texts = [f"{word} {i}?" for i in range(6) for word in ("Why", "Who", "When")]
    turns = [ask(engine, text) for text in texts]

    def generated(_):
        return [shared_model().generate(PROMPT, **cached(copied(cache)), **LONG) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        for outs in pool.map(generated, range(2)):
            assert all(torch.equal(out, wanted) for out in outs)
    for turn in turns:
        assert turn.result(WAIT_S).token_ids == alone(turn.name, **LONG)
    assert cache.stats().hot_tokens == engine.prefix.num_tokens
    engine.check_integrity()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_a_thread_of_its_own_is_not_copied(engine, how):
    with pytest.raises(TypeError, match=r"Engine cannot be copied .* cache.fork\(\)"):
        how(engine)
    with (
        new_runner(shared_model(), TOKENIZER) as runner,
        pytest.raises(TypeError, match=r"MultiAgentRunner cannot be copied .* agent.fork\(name\)"),
    ):
        how(runner)


def test_the_engines_own_thread_need_not_wait_for_itself(engine, cache):
    made = []

    def on_end(reply):
        made.append(cache.prefill(shared_model(), OTHER))
        made.append(shared_model().generate(PROMPT, **cached(cache.bind(PROMPT)), **LONG))

    assert ask(engine, "Why?", on_end=on_end).result(WAIT_S).token_ids == alone("Why?", **LONG)
    assert torch.equal(made[1], shared_model().generate(PROMPT, **LONG))
    assert ask(engine, "Who?").result(WAIT_S).token_ids == alone("Who?", **LONG)


def test_a_forgotten_engine_refuses_nothing(cache):
    engine = Engine(shared_model(), cache, TOKENIZER)
    del engine
    wanted = shared_model().generate(PROMPT, **LONG)
    assert torch.equal(shared_model().generate(PROMPT, **cached(cache), **LONG), wanted)
