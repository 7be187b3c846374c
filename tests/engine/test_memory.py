"""What agents keep between turns: only what is new is computed, and nothing is left behind."""

import gc

import pytest
import torch
from engine_rig import TOKENIZER, Rig, alone, reply
from hypothesis import given
from hypothesis import strategies as st
from prompts import PREFIX, prefix_ids, tokens

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.memory import num_common

LONG = {"max_new_tokens": 8, "eos_token_id": None}
FIRST, SECOND = TOKENIZER("Why? ")["input_ids"], TOKENIZER(" And?")["input_ids"]


def answered(rig, ids, memory=None):
    job = rig.add(ids, memory=memory, **LONG)
    rig.run()
    return job


def test_a_second_turn_computes_only_what_is_new():
    rig = Rig()
    memory = rig.memory()
    first = answered(rig, FIRST, memory)
    assert first.turn.computed_tokens == 5
    # the last token of an answer is chosen, and not computed
    assert memory.num_tokens == 5 + 7
    ids = [*FIRST, *reply(first), *SECOND]
    second = answered(rig, ids, memory)
    assert reply(second) == alone(ids, **LONG)
    assert second.turn.computed_tokens == 1 + len(SECOND)
    assert rig.batch.figures.kept_tokens == 12
    assert memory.num_tokens == len(ids) + 7


@pytest.mark.parametrize("num_same", [0, 1, 5, 9, 12, 13])
def test_a_prompt_that_went_another_way_keeps_the_common_part(num_same):
    rig = Rig()
    memory = rig.memory()
    first = answered(rig, FIRST, memory)
    ids = [*[*FIRST, *reply(first)][:num_same], 99, 98, 97]
    second = answered(rig, ids, memory)
    assert reply(second) == alone(ids, **LONG)
    assert second.turn.computed_tokens == len(ids) - min(num_same, 12)


def test_the_same_prompt_again_computes_its_last_token():
    rig = Rig()
    memory = rig.memory()
    first, second = answered(rig, FIRST, memory), answered(rig, FIRST, memory)
    assert reply(first) == reply(second) == alone(FIRST, **LONG)
    assert second.turn.computed_tokens == 1


def test_forks_start_from_the_same_tokens_and_part():
    rig = Rig()
    memory = rig.memory()
    first = answered(rig, FIRST, memory)
    held = rig.memories.num_bytes
    twin = memory.fork()
    assert rig.memories.num_bytes == held
    assert [each.num_tokens for each in rig.memories.idle()] == [12]
    rows = [[*FIRST, *reply(first), *SECOND], [*FIRST, *reply(first), 99, 98]]
    jobs = [rig.add(ids, memory=m, **LONG) for ids, m in zip(rows, (memory, twin), strict=True)]
    rig.run()
    assert [reply(job) for job in jobs] == [alone(ids, **LONG) for ids in rows]
    assert [job.turn.computed_tokens for job in jobs] == [1 + len(SECOND), 1 + 2]


def test_idle_agents_give_way_and_lose_nothing_but_time():
    rig = Rig(max_tokens=40)
    memory = rig.memory()
    first = answered(rig, FIRST, memory)
    other = answered(rig, TOKENIZER("When is high water, and why so late?")["input_ids"][:30])
    assert rig.batch.figures.num_evictions == 1
    assert memory.num_tokens == 0
    ids = [*FIRST, *reply(first), *SECOND]
    second = answered(rig, ids, memory)
    assert reply(second) == alone(ids, **LONG)
    assert second.turn.computed_tokens == len(ids)
    assert other.turn.finish_reason == "length"


def test_idle_tokens_say_who_waits_for_them():
    rig = Rig(max_rows=1)
    memory, other = rig.memory(), rig.memory()
    answered(rig, FIRST, memory)
    answered(rig, SECOND, other)
    waiting = rig.add(FIRST, memory=memory, **LONG)
    assert [each.wanted_by for each in rig.memories.idle([waiting])] == [waiting.order, None]
    # what a fork holds too stays behind when one of the two goes on
    twin = memory.fork()
    assert [each.wanted_by for each in rig.memories.idle([waiting])] == [None, None]
    assert twin.num_tokens == memory.num_tokens


def test_a_cancelled_turn_leaves_what_it_computed():
    rig = Rig()
    memory = rig.memory()
    job = rig.add(FIRST, memory=memory, **LONG)
    for _ in range(3):
        rig.step()
    rig.batch.cancel(job)
    assert memory.num_tokens == 5 + 2
    assert answered(rig, FIRST, memory).turn.computed_tokens == 1


def test_a_forgotten_agent_gives_its_tokens_back():
    rig = Rig()
    memory = rig.memory()
    answered(rig, FIRST, memory)
    assert rig.memories.num_bytes > 0
    del memory
    gc.collect()
    assert rig.memories.num_bytes == 0


def test_a_closed_memory_keeps_nothing():
    rig = Rig()
    memory = rig.memory()
    memory.close()
    answered(rig, FIRST, memory)
    assert (memory.num_tokens, rig.rows.num_slots_used) == (0, 0)


def test_states_that_have_read_further_are_computed_again(tiny_model):
    model = tiny_model("qwen3_next")
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids())
    with Engine(model, cache, TOKENIZER) as engine:
        memory, own = engine.memory(prefix), tokens(5, seed=1)
        first = engine.submit([*PREFIX, *own], memory=memory, max_new_tokens=4)
        ids = [*PREFIX, *own, *first.result(60).token_ids, 50]
        second = engine.submit(ids, memory=memory, max_new_tokens=4)
        second.result(60)
        third = engine.submit([*PREFIX, *own, 51], memory=memory, max_new_tokens=4)
        third.result(60)
    assert second.computed_tokens == 2
    assert third.computed_tokens == 6
    for turn, row in ((second, ids), (third, [*PREFIX, *own, 51])):
        out = model.generate(torch.tensor([row]), max_new_tokens=4)
        assert list(turn.token_ids) == out[0, len(row) :].tolist()


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2), min_size=1))
def test_what_is_common_leaves_a_token_to_compute(held, wanted):
    count = num_common(held, wanted)
    assert held[:count] == wanted[:count]
    assert count < len(wanted)
    assert count in (len(held), len(wanted) - 1) or held[count] != wanted[count]
