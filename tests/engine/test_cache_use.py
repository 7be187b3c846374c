"""The cache of a running engine in the hands of others: they wait, or are told what to do."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agents import new_runner
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, WAIT_S, alone, ask, prompt, shared_model
from prompts import cached
from test_engine import Gate

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.live_rows import LiveRows

OTHER = torch.tensor([TOKENIZER("Another log.")["input_ids"]])
PROMPT = torch.tensor([prompt("Who?")])


def child(cache):
    return cache.prefill(shared_model(), OTHER, parent=cache.rows.prefixes.any)


def parked(cache):
    rows = LiveRows(shared_model(), cache)
    row = rows.start(cache.rows.prefixes.any)
    with torch.no_grad():
        rows.forward({row: OTHER[0].tolist()})
    return rows.park(row)


def saved(cache, path):
    child(cache).save(path)
    return path


def nothing(cache, path):
    return None


# by method: what is needed for a call, and the call
WAIT = {
    "attach": (nothing, lambda cache, _: cache.attach(shared_model())),
    "prefill": (nothing, lambda cache, _: cache.prefill(shared_model(), OTHER)),
    "prefill of a child": (nothing, lambda cache, _: child(cache)),
    "promote": (lambda cache, _: parked(cache), lambda cache, row: cache.promote(row, OTHER[0])),
    "bind": (nothing, lambda cache, _: cache.bind(PROMPT)),
    "release": (nothing, lambda cache, _: cache.release(cache.rows.prefixes.any)),
    "invalidate": (nothing, lambda cache, _: cache.invalidate()),
    "fork": (nothing, lambda cache, _: cache.fork()),
    "load": (saved, lambda cache, path: cache.load(path, shared_model())),
}
# of the cache's report, and of rows that a pause has left in it: no engine reads them
OWN_ROWS = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-2),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "activate_past_recording": lambda cache: cache.activate_past_recording(),
    "time_groups": lambda cache: cache.time_groups(),
}
CHANGE_NOTHING = {"check_integrity", "explain", "stats"}
# which `announce` refuses, in front of its layers
OF_A_FORWARD = {
    "announce",
    "get_seq_length",
    "settle",
    "get_mask_sizes",
    "get_query_offset",
    "update",
}
OF_ENGINES = {"reading_alone"}


def test_every_method_of_a_cache_is_known_here():
    """What transformers has beside them goes through layers, to rows of the cache itself."""
    known = {each.split()[0] for each in WAIT} | CHANGE_NOTHING | OF_A_FORWARD | OF_ENGINES
    ours = [cls for cls in AsymmetricPagedCache.__mro__ if cls.__module__.startswith("hf_granikv")]
    methods = {name for cls in ours for name, value in vars(cls).items() if callable(value)}
    assert {name for name in methods if not name.startswith("_")} == known | set(OWN_ROWS)


@pytest.mark.parametrize("use", WAIT)
def test_what_changes_prefixes_waits_for_the_step_under_way(engine, cache, tmp_path, use):
    prepare, call = WAIT[use]
    needed, did, done = prepare(cache, tmp_path / "prefix.safetensors"), threading.Event(), []
    turn = ask(engine, "Why?", max_new_tokens=40)
    next(iter(turn))

    def run():
        done.append(call(cache, needed))
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


@pytest.mark.parametrize("use", OWN_ROWS)
def test_what_changes_rows_of_the_cache_itself_meets_no_engine(engine, cache, use):
    with engine.paused():
        shared_model().generate(PROMPT, **cached(cache), **LONG)
    turn = ask(engine, "Why?", max_new_tokens=40)
    next(iter(turn))
    with Gate(shared_model()) as gate:
        assert gate.is_reached.wait(WAIT_S)
        # in the middle of a step
        OWN_ROWS[use](cache)
    assert turn.result(WAIT_S).token_ids[:12] == alone("Why?", **LONG)
    assert ask(engine, "Who?").result(WAIT_S).token_ids == alone("Who?", **LONG)
    assert cache.stats().hot_tokens == engine.prefix.num_tokens


@pytest.mark.parametrize("use", ["attach", "prefill"])
def test_a_model_that_cannot_be_compared_with_an_engines_is_refused(cache, use):
    """It was taken, the engine's forgotten, and every turn from then on failed."""
    other = copy.deepcopy(shared_model())
    cache.release(cache.rows.prefixes.only)
    ids = torch.tensor([PREFIX_IDS])
    calls = {"attach": cache.attach, "prefill": lambda model: cache.prefill(model, ids)}
    with Engine(shared_model(), cache, TOKENIZER) as engine:
        with pytest.raises(ValueError, match=r"engine's model, close the engine, or build a cache"):
            calls[use](other)
        turn = engine.submit(prompt("Why?"), **LONG)
        assert turn.result(WAIT_S).token_ids == alone("Why?", **LONG)
    calls[use](other)
    assert torch.equal(
        other.generate(PROMPT, **cached(cache), **LONG), other.generate(PROMPT, **LONG)
    )


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
