"""One engine thread, many callers: blocking, streaming, cancelling, closing."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, WAIT_S, alone, ask, prompt, shared_model

from hf_granikv.engine.engine import Engine
from hf_granikv.engine.options import EngineOptions
from hf_granikv.errors import ColdPoolFullError


class Gate:
    """Lets forwards of a model through one by one."""

    def __init__(self, model):
        self.model, self.permits, self.is_open = model, threading.Semaphore(0), False
        self.is_reached = threading.Event()

    def __enter__(self):
        self.hook = self.model.register_forward_pre_hook(self.wait)
        return self

    def wait(self, *_):
        self.is_reached.set()
        if not self.is_open:
            assert self.permits.acquire(timeout=WAIT_S)

    def let(self, count):
        self.permits.release(count)

    def __exit__(self, *_):
        self.is_open = True
        self.permits.release(1000)
        self.hook.remove()


def engine_threads():
    return [thread for thread in threading.enumerate() if "hf_granikv" in thread.name]


@pytest.mark.smoke
def test_replies_and_pieces_are_those_of_each_alone(engine):
    turns = [ask(engine, text) for text in ("Why?", "Who?", "When is high water?")]
    for turn in turns:
        pieces = list(turn)
        reply = turn.result(WAIT_S)
        assert reply.token_ids == alone(turn.name, **LONG)
        assert "".join(pieces) == reply.text == TOKENIZER.decode(reply.token_ids, True)
        assert list(turn) == pieces or "".join(turn) == reply.text
        assert (reply.name, reply.prompt_tokens) == (turn.name, len(prompt(turn.name)))
        assert reply.finish_reason == turn.finish_reason == "length"


def test_clients_on_many_threads_get_their_own(engine):
    texts = [f"{word} {i}?" for i in range(4) for word in ("Why", "Who", "When")]

    def client(text):
        seed = len(text)
        turn = ask(engine, text, do_sample=True, seed=seed, temperature=2.0)
        text_of_pieces = "".join(turn)
        return turn.result(WAIT_S), text_of_pieces

    with ThreadPoolExecutor(6) as pool:
        for text, (reply, streamed) in zip(texts, pool.map(client, texts), strict=True):
            wanted = alone(text, len(text), do_sample=True, temperature=2.0, **LONG)
            assert reply.token_ids == wanted
            assert reply.text == streamed
    assert engine.figures.num_turns == len(texts)


def test_a_late_turn_is_done_while_an_early_one_goes_on(engine):
    with Gate(shared_model()) as gate:
        early = ask(engine, "Why?", max_new_tokens=200)
        gate.let(3)
        late = ask(engine, "Who?", max_new_tokens=2)
        gate.let(6)
        assert late.result(WAIT_S).token_ids == alone("Who?", **LONG)[:2]
        assert not early.done()
        assert early.token_ids[:3] == alone("Why?", **LONG)[: len(early.token_ids[:3])]
        early.cancel()
        gate.let(5)
        assert early.result(WAIT_S).finish_reason == "cancelled"


def test_a_cancelled_turn_ends_the_loop_over_its_pieces(engine):
    turn = ask(engine, "Why?", max_new_tokens=300)
    pieces = []
    for piece in turn:
        pieces.append(piece)
        turn.cancel()
    reply = turn.result(WAIT_S)
    assert reply.finish_reason == "cancelled"
    assert "".join(pieces) == reply.text
    # too late, and harmless
    turn.cancel()


def test_waiting_has_an_end(engine):
    with Gate(shared_model()) as gate:
        turn = ask(engine, "Why?")
        with pytest.raises(TimeoutError, match=r"'Why\?' has 0 tokens after 0.01 seconds"):
            turn.result(0.01)
        gate.let(100)
        assert turn.result(WAIT_S).token_ids == alone("Why?", **LONG)


@pytest.mark.parametrize("face", ["result", "pieces"])
def test_an_interrupt_of_the_caller_cancels_its_turn(engine, monkeypatch, face):
    def interrupted(*_):
        raise KeyboardInterrupt

    with Gate(shared_model()) as gate:
        turn, other = ask(engine, "Why?"), ask(engine, "Who?")
        with monkeypatch.context() as patch:
            patch.setattr(turn._changed, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                turn.result() if face == "result" else list(turn)
        gate.let(100)
        assert turn.result(WAIT_S).finish_reason == "cancelled"
        assert other.result(WAIT_S).finish_reason == "length"


def test_errors_are_raised_where_the_outcome_is_asked_for(engine):
    def broken(reply):
        raise OSError("the disk is full")

    turn = ask(engine, "Why?", on_end=broken)
    with pytest.raises(OSError, match="disk"):
        turn.result(WAIT_S)
    pieces = []
    with pytest.raises(OSError, match="disk"):
        pieces.extend(turn)
    assert turn.finish_reason is None
    assert ask(engine, "Who?").result(WAIT_S).token_ids == alone("Who?", **LONG)


def test_what_hangs_on_a_reply_is_done_before_the_turn_is(engine):
    seen = []
    turn = ask(engine, "Why?", on_end=lambda reply: seen.append((reply.text, turn.done())))
    assert turn.result(WAIT_S).text == seen[0][0]
    assert seen[0][1] is False


def test_a_listener_that_fails_disturbs_nobody(engine):
    def broken():
        raise OSError("the screen is gone")

    turns = [ask(engine, text, max_new_tokens=40) for text in ("Why?", "Who?")]
    turns[0].listen(broken)
    for turn in turns:
        assert turn.result(WAIT_S).token_ids[:12] == alone(turn.name, **LONG)


def test_a_broken_engine_fails_its_turns_and_serves_the_next(engine, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("no schedule")

    with monkeypatch.context() as patch:
        patch.setattr("hf_granikv.engine.batch.step_feeds", broken)
        with pytest.raises(ZeroDivisionError):
            ask(engine, "Why?").result(WAIT_S)
    assert ask(engine, "Why?").result(WAIT_S).token_ids == alone("Why?", **LONG)


def test_who_pauses_the_engine_has_the_model_alone(engine):
    running = []

    def note(*_):
        running.append(threading.current_thread().name)

    hook = shared_model().register_forward_pre_hook(note)
    try:
        turn = ask(engine, "Why?", max_new_tokens=60)
        next(iter(turn))
        for _ in range(3):
            with engine.paused(), engine.paused():
                before = len(running)
                alone("Who?", max_new_tokens=2)
                assert {*running[before:]} <= {threading.current_thread().name}
        assert turn.result(WAIT_S).token_ids[:12] == alone("Why?", **LONG)
    finally:
        hook.remove()


def test_a_pause_waits_for_the_step_under_way(engine):
    with Gate(shared_model()) as gate:
        turn, entered = ask(engine, "Why?"), threading.Event()

        def pause():
            with engine.paused():
                entered.set()

        assert gate.is_reached.wait(WAIT_S)
        pausing = threading.Thread(target=pause)
        pausing.start()
        assert not entered.wait(0.2)
        gate.let(1)
        assert entered.wait(WAIT_S)
        gate.let(100)
        pausing.join(WAIT_S)
        assert turn.result(WAIT_S).token_ids == alone("Why?", **LONG)


def test_a_prefix_may_be_added_while_turns_run(engine, cache):
    turn = ask(engine, "Why?", max_new_tokens=30)
    ids = TOKENIZER("Another log.")["input_ids"]
    with engine.paused():
        other = cache.prefill(shared_model(), torch.tensor([ids]))
    second = engine.submit([*ids, 70], prefix=other, **LONG)
    out = shared_model().generate(torch.tensor([[*ids, 70]]), **LONG)
    assert list(second.result(WAIT_S).token_ids) == out[0, len(ids) + 1 :].tolist()
    assert turn.result(WAIT_S).token_ids[:12] == alone("Why?", **LONG)


def test_closing_cancels_and_ends_the_thread(cache):
    before = len(engine_threads())
    engine = Engine(shared_model(), cache, TOKENIZER)
    engine.prefix = cache._state.prefixes.only
    assert len(engine_threads()) == before
    memory = engine.memory(engine.prefix)
    engine.submit(prompt("Why?"), memory=memory, max_new_tokens=2).result(WAIT_S)
    assert engine.idle_bytes > 0
    turn = ask(engine, "Why?", max_new_tokens=500)
    next(iter(turn))
    assert len(engine_threads()) == before + 1
    engine.close()
    engine.close()
    assert turn.result(0).finish_reason == "cancelled"
    assert len(engine_threads()) == before
    assert (engine.idle_bytes, memory.num_tokens) == (0, 0)
    with pytest.raises(RuntimeError, match="closed and takes no more turns"):
        ask(engine, "Why?")


def test_a_forgotten_engine_ends_its_thread_and_frees_its_cache(cache):
    before = len(engine_threads())
    engine = Engine(shared_model(), cache, TOKENIZER)
    engine.prefix = cache._state.prefixes.only
    turn = ask(engine, "Why?")
    gone = weakref.ref(engine)
    # the turn needs it until it is done
    del engine
    gc.collect()
    assert turn.result(WAIT_S).token_ids == alone("Why?", **LONG)
    gc.collect()
    assert gone() is None
    assert len(engine_threads()) == before


def test_the_callers_random_numbers_are_its_own(engine):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ask(engine, "Why?", do_sample=True, seed=1).result(WAIT_S)
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_are_a_budget_too(cache):
    prefix = cache._state.prefixes.only
    # a token takes 256 bytes in two layers with two heads of eight numbers
    with Engine(shared_model(), cache, TOKENIZER, EngineOptions(max_bytes=80 * 256)) as engine:
        engine.prefix = prefix
        # a fifth is set aside for the tensor of four that is there twice while a pool grows
        assert engine._limits.max_tokens == 61
        with pytest.raises(ColdPoolFullError, match="up to 62 private tokens"):
            ask(engine, "x" * 51)
        turns = [ask(engine, text) for text in ("Why?", "When is high water?", "Who?")]
        while not all(turn.done() for turn in turns):
            assert engine.row_bytes + engine.idle_bytes <= 80 * 256
        for turn in turns:
            assert turn.result(WAIT_S).token_ids == alone(turn.name, **LONG)
        assert engine.figures.peak_tokens <= 61


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_rows": 0}, "max_rows is 0; give a positive number"),
        ({"max_step_tokens": -1}, "max_step_tokens is -1"),
        ({"max_bytes": 2.5}, "max_bytes is 2.5"),
        ({"max_bytes": 331}, "max_bytes is 331, one private token takes 332 with its table"),
    ],
)
def test_options_are_checked(cache, options, text):
    with pytest.raises(ValueError, match=text):
        Engine(shared_model(), cache, TOKENIZER, EngineOptions(**options))


def test_prompts_are_checked(engine):
    with pytest.raises(ValueError, match="does not start with the 42 of its prefix"):
        engine.submit([1, 2, 3], prefix=engine.prefix)
    with pytest.raises(ValueError, match="no token after the 42 of its prefix"):
        engine.submit(PREFIX_IDS, prefix=engine.prefix)
    with pytest.raises(ValueError, match="num_beams=2"):
        ask(engine, "Why?", num_beams=2)
    assert engine_threads() == []
