"""An engine under a budget of bytes: more turns at a time than in half of it, and never a byte more."""

from typing import Any

import pytest
import torch
from agents import llama
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, WAIT_S, prompt
from token_bytes import TokenBytes

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.options import EngineOptions
from hf_granikv.errors import ColdPoolFullError

NUM_LAYERS = 8
# keys and values of two heads of eight numbers
TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 8 * 4
TEXTS = [
    *("Why?", "When is high water?", "Who?", "And the pumps, who keeps their log?", "So."),
    *("Where does the sluice leak?", "What of the mill?", "And then?", "Who was lowered in June?"),
]


@pytest.fixture(scope="module")
def model():
    return llama(num_hidden_layers=NUM_LAYERS)


class Watched(Engine):
    """Notes after every step what is held, and how many turns run."""

    def __init__(self, model: Any, *, cold_slots: int | None = None, **options: Any) -> None:
        cache = AsymmetricPagedCache(model.config, cold_slots=cold_slots)
        if model.config.vocab_size >= len(TOKENIZER):
            self.prefix = cache.prefill(model, torch.tensor([PREFIX_IDS]))
        super().__init__(model, cache, TOKENIZER, EngineOptions(**options))
        self.most_running = self.most_bytes = self.most_tables = self.most_shared = 0
        batch = self._worker._batch
        step = batch.step

        def watched() -> None:
            step()
            batch.check_integrity()
            self.most_running = max(self.most_running, len(batch._running))
            levels = self._rows.levels
            held = self._rows.num_bytes + self._memories.num_bytes + levels.num_bytes
            self.most_shared = max(self.most_shared, levels.num_tokens)
            self.most_bytes = max(self.most_bytes, held)
            tables = sum(pool.table.nbytes for pool in self._rows.pools)
            self.most_tables = max(self.most_tables, tables)

        batch.step = watched  # type: ignore[method-assign]

    def ask(self, text: str, memory: Any = None, **options: Any) -> Any:
        options = {**LONG, **options}
        prefix = self.prefix if memory is None else None
        return self.submit(prompt(text), prefix=prefix, memory=memory, name=text, **options)


def wanted(model: Any, text: str, **options: Any) -> list[int]:
    ids = torch.tensor([prompt(text)])
    return model.generate(ids, **{**LONG, **options})[0, ids.shape[1] :].tolist()


def test_more_turns_run_in_the_same_bytes(model, monkeypatch):
    max_bytes, options = 400 * TOKEN_BYTES, {"max_new_tokens": 40}
    engines = {
        "half": Watched(model, cold_slots=max_bytes // (2 * TOKEN_BYTES)),
        "all": Watched(model, max_bytes=max_bytes),
        "unlimited": Watched(model),
    }
    replies = {}
    for name, engine in engines.items():
        seen = TokenBytes(monkeypatch)
        with engine:
            with engine.gathering():
                turns = [engine.ask(text, **options) for text in TEXTS * 2]
            replies[name] = [turn.result(WAIT_S).token_ids for turn in turns]
        if name == "all":
            assert seen.peak + engine.most_tables <= max_bytes
            assert engine.most_bytes <= max_bytes * NUM_LAYERS * 2 // (NUM_LAYERS * 2 + 1)
            # most of it is tokens, and not free slots
            assert engine.figures.peak_tokens * TOKEN_BYTES >= 0.85 * max_bytes
    assert replies["all"] == replies["unlimited"]
    for text, ids in zip(TEXTS, replies["all"], strict=False):
        assert list(ids) == wanted(model, text, **options)
    running = {name: engine.most_running for name, engine in engines.items()}
    assert running["all"] >= 1.5 * running["half"]
    assert running["unlimited"] == len(TEXTS) * 2


def test_what_agents_keep_is_within_the_bytes(model, monkeypatch):
    """Three turns of eight agents, in bytes for four of them at the end."""
    seen, max_bytes = TokenBytes(monkeypatch), 300 * TOKEN_BYTES
    with Watched(model, max_bytes=max_bytes) as engine:
        memories = [engine.memory(engine.prefix) for _ in range(8)]
        told = [""] * 8
        for text in TEXTS[:3]:
            told = [heard + text for heard in told]
            turns = [engine.ask(*asked) for asked in zip(told, memories, strict=True)]
            for turn in turns:
                assert list(turn.result(WAIT_S).token_ids) == wanted(model, turn.name)
        assert seen.peak + engine.most_tables <= max_bytes
        assert engine.figures.num_evictions > 0
        assert engine.figures.kept_tokens > 0
        assert engine.idle_bytes > 0.4 * max_bytes
    assert engine.idle_bytes == 0


@pytest.mark.parametrize("num_tokens", [260, 400])
def test_what_agents_share_is_within_the_bytes(model, num_tokens):
    """Two turns of eight agents that have most of what they are asked in common."""
    max_bytes, head = num_tokens * TOKEN_BYTES, "The sluice leaks where the mill was. " * 2
    with Watched(model, max_bytes=max_bytes, min_shared_tokens=16) as engine:
        memories = [engine.memory(engine.prefix) for _ in range(8)]
        for told in ([head + text for text in TEXTS[:8]], [head + text * 2 for text in TEXTS[:8]]):
            with engine.gathering():
                turns = [engine.ask(*asked) for asked in zip(told, memories, strict=True)]
            for turn in turns:
                assert list(turn.result(WAIT_S).token_ids) == wanted(model, turn.name)
        assert engine.most_bytes <= max_bytes
        assert engine.most_shared >= len(head)
        for memory in memories:
            memory.close()
        assert engine.level_bytes == engine.idle_bytes == 0


def test_idle_agents_make_room_for_what_was_used_last(model):
    with Watched(model, max_bytes=150 * TOKEN_BYTES) as engine:
        memories = [engine.memory(engine.prefix) for _ in range(4)]
        for memory in memories:
            engine.ask(TEXTS[3], memory).result(WAIT_S)
        kept = [memory.num_tokens > 0 for memory in memories]
    # each of 46 tokens, and one of them twice while it is kept
    assert kept == [False, False, True, True]


def test_a_single_turn_may_take_all_of_it(model, monkeypatch):
    seen, max_bytes = TokenBytes(monkeypatch), 100 * TOKEN_BYTES
    with Watched(model, max_bytes=max_bytes) as engine:
        most = engine._limits.max_tokens
        assert most >= 93
        text = "x" * (most + 1 - LONG["max_new_tokens"])
        turn = engine.ask(text)
        assert list(turn.result(WAIT_S).token_ids) == wanted(model, text)
        with pytest.raises(ColdPoolFullError, match=f"up to {most + 1} private tokens was asked"):
            engine.ask(text + "x")
    # as it was before the step that gave the last token
    assert engine.figures.peak_tokens == most - 1
    assert seen.peak + engine.most_tables <= max_bytes


def test_a_history_that_cannot_be_there_twice_is_computed_again(model):
    with Watched(model, max_bytes=100 * TOKEN_BYTES) as engine:
        memory, text = engine.memory(engine.prefix), "x" * 60
        engine.ask(text, memory).result(WAIT_S)
        assert memory.num_tokens == 0
        again = engine.ask(text, memory)
        assert list(again.result(WAIT_S).token_ids) == wanted(model, text)
        assert engine.figures.num_preemptions == 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_states_are_within_the_bytes(tiny_model, family):
    """A row of these models holds states as large as many of its tokens; one moves at a time."""
    model = tiny_model(family)
    with Engine(model, AsymmetricPagedCache(model.config), TOKENIZER) as engine:
        memory = engine.memory()
        engine.submit([5, 6], max_new_tokens=1, memory=memory).result(WAIT_S)
        one_row = engine.idle_bytes
    rows = [[5 + i, 6, 7] for i in range(6)]
    with Watched(model, max_bytes=5 * one_row) as engine:
        assert engine._limits.tokens_per_row > 0
        turns = [engine.submit(row, max_new_tokens=4) for row in rows]
        for turn, row in zip(turns, rows, strict=True):
            out = model.generate(torch.tensor([row]), max_new_tokens=4)
            assert list(turn.result(WAIT_S).token_ids) == out[0, len(row) :].tolist()
        assert engine.most_bytes <= 5 * one_row
        assert 1 < engine.most_running < 6
