"""What turns and idle agents have in common: found, computed by one, held once, given up in time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from agents import byte_tokenizer
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, Rig, alone, reply
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import PREFIX, prefix_ids, tokens

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.memory import Memory
from hf_granikv.engine.options import EngineOptions
from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.worth import Worth

FIRST = TOKENIZER("Who keeps the log of the pumps?")["input_ids"]
ONE, TWO, THREE = (TOKENIZER(text)["input_ids"] for text in (" Why?", " Since when?", " So."))


def told_the_same(rig: Rig, num_agents: int) -> tuple[list[Memory], list[int]]:
    """Agents that were asked the same, and what it was."""
    memories, ids = [rig.memory() for _ in range(num_agents)], [*FIRST, *range(100, 120)]
    for memory in memories:
        rig.add(ids, memory=memory, **LONG)
    rig.run()
    return memories, ids


def shared(rig: Rig) -> list[int]:
    return [level.num_tokens for level in rig.rows.levels]


def fed(rig: Rig) -> int:
    return sum(sum(feeds.values()) for feeds in rig.fed)


def test_followers_wait_for_the_leader_and_no_longer() -> None:
    rig = Rig(min_shared_tokens=8, max_step_tokens=10)
    stranger = rig.add(THREE, **LONG)
    rows = [[*FIRST, *own] for own in (ONE, TWO, THREE)]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    rig.step()
    # the leader's chunk, and the one that has nothing in common with it
    assert rig.fed[-1] == {0: 4, 1: 6}
    rig.step()
    assert rig.fed[-1] == {0: 1, 1: 9}
    for _ in range(3):
        rig.step()
    # up to where they part; a blank comes first in all of them
    assert shared(rig) == [len(FIRST) + 1]
    rig.step()
    assert {1, 2} <= rig.fed[-1].keys()
    rig.run()
    assert [reply(job) for job in jobs] == [alone(ids, **LONG) for ids in rows]
    assert reply(stranger) == alone(THREE, **LONG)
    assert [job.turn.shared_tokens for job in jobs] == [0, len(FIRST) + 1, len(FIRST) + 1]
    assert [job.turn.computed_tokens for job in jobs] == [len(FIRST) + 5, len(TWO) - 1, 3]
    assert shared(rig) == []
    assert rig.rows.num_slots_used == 0


def test_a_tree_of_common_tokens_is_computed_level_by_level() -> None:
    rig = Rig(min_shared_tokens=8)
    left, right = [*FIRST, *range(100, 120)], [*FIRST, *range(130, 145)]
    rows = [[*left, *ONE], [*left, *TWO], [*right, *ONE], [*right, *TWO], [*FIRST, 99]]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    rig.step()
    # the first one has computed a level of all, and one of its own branch; the blank is in both
    assert shared(rig) == [len(FIRST), 21]
    rig.step()
    assert shared(rig) == [len(FIRST), 21, 16]
    rig.run()
    assert [reply(job) for job in jobs] == [alone(ids, **LONG) for ids in rows]
    num_new = len(FIRST) + 21 + 16 + 1 + 2 * (len(ONE) + len(TWO) - 2)
    assert fed(rig) == num_new + 5 * 11


@pytest.mark.parametrize("how", ["cancel", "fail", "short"])
def test_a_leader_that_leaves_is_replaced(how: str) -> None:
    rig = Rig(min_shared_tokens=8, max_step_tokens=10)
    rows = [[*FIRST, *own] for own in (ONE, TWO, THREE)]
    # a single token, so that it is over as soon as its prompt is; nobody keeps its row
    options = [{**LONG, "max_new_tokens": 1 if how == "short" else 12}, LONG, LONG]
    jobs = [rig.add(ids, **each) for ids, each in zip(rows, options, strict=True)]
    rig.step()
    if how == "cancel":
        rig.batch.cancel(jobs[0])
    elif how == "fail":
        rig.batch._fail(jobs[0], RuntimeError("broken"))
    rig.run()
    assert [reply(job) for job in jobs[1:]] == [alone(ids, **LONG) for ids in rows[1:]]
    num_shared = [job.turn.shared_tokens for job in jobs[1:]]
    # a second leader does it for the third, which has one token more in common with it
    assert num_shared == ([len(FIRST) + 1] * 2 if how == "short" else [0, len(FIRST) + 2])


def test_a_message_that_fails_every_leader_fails_each_of_its_turns_alone() -> None:
    rig = Rig(min_shared_tokens=8)
    rows = [[*FIRST, 77, *own] for own in (ONE, TWO)]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    other = rig.add([*FIRST, *THREE], **LONG)

    def fail(module: Any, args: Any, output: Any) -> None:
        if (args[0] == 77).any():
            raise RuntimeError("broken")

    hook = rig.model.get_input_embeddings().register_forward_hook(fail)
    rig.run()
    hook.remove()
    for job in jobs:
        with pytest.raises(RuntimeError, match="broken"):
            reply(job)
    assert reply(other) == alone([*FIRST, *THREE], **LONG)


def test_what_cannot_be_shared_after_all_is_computed_by_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(min_shared_tokens=8)

    def full(*_: Any) -> None:
        raise MemoryError("no room for a level")

    monkeypatch.setattr(rig.rows.levels, "promote", full)
    rows = [[*FIRST, *own] for own in (ONE, TWO)]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    rig.run()
    assert [reply(job) for job in jobs] == [alone(ids, **LONG) for ids in rows]
    assert "not shared: it failed: no room for a level (x1)" in rig.rows.levels.journal.lines()


def test_a_row_that_cannot_be_exchanged_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(min_shared_tokens=8)
    start, starts = rig.rows.start, []

    def fails_once(prefix: Any, parked: Any = None, **options: Any) -> Any:
        if parked is not None and not starts:
            starts.append(parked)
            raise MemoryError("no room for a row")
        return start(prefix, parked, **options)

    monkeypatch.setattr(rig.rows, "start", fails_once)
    rows = [[*FIRST, *own] for own in (ONE, TWO)]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    rig.run()
    assert starts
    assert [reply(job) for job in jobs] == [alone(ids, **LONG) for ids in rows]
    assert rig.rows.num_slots_used == 0


def test_salts_keep_equal_conversations_apart() -> None:
    rig = Rig(min_shared_tokens=8)
    ids = [*FIRST, *ONE]
    salted = [
        rig.cache.prefill(rig.model, torch.tensor([PREFIX_IDS]), salt=salt) for salt in ("a", "b")
    ]
    jobs, memories = [], []
    for prefix in (*salted, *salted, rig.prefix, None):
        memory = rig.memories.make(prefix)
        job = rig.add(ids, memory=memory, **LONG)
        if prefix is None:
            job.token_ids = [*PREFIX_IDS, *ids]
            job.num_prompt = len(job.token_ids)
        job.prefix = job.leaf = prefix
        jobs.append(job)
        memories.append(memory)
    rig.run()
    assert {reply(job) for job in jobs} == {alone(ids, **LONG)}
    by_salt = {level.salt: level for level in rig.rows.levels}
    assert {salt: level.parent for salt, level in by_salt.items()} == dict(
        zip(("a", "b"), salted, strict=True)
    )
    leaves = [memory.kept.parked.prefix for memory in memories]
    assert leaves == [by_salt["a"], by_salt["b"]] * 2 + [rig.prefix, None]
    assert [job.turn.shared_tokens > 0 for job in jobs] == [False] * 2 + [True] * 2 + [False] * 2


def test_prompts_over_no_prefix_share_their_heads() -> None:
    rig = Rig(min_shared_tokens=8)
    jobs = [rig.add([*FIRST, *own], **LONG) for own in (ONE, TWO)]
    for job in jobs:
        job.token_ids = [*PREFIX_IDS, *job.token_ids]
        job.prefix, job.num_prompt = None, len(job.token_ids)
        job.leaf = None
    rig.run()
    for job, own in zip(jobs, (ONE, TWO), strict=True):
        assert reply(job) == alone([*FIRST, *own], **LONG)
    assert [job.turn.shared_tokens for job in jobs] == [0, len(PREFIX_IDS) + len(FIRST) + 1]


def test_what_is_kept_after_a_level_that_was_cut_meanwhile_is_computed_again() -> None:
    """A fork that another thread made while the level was cut holds what reads it as it was."""
    rig = Rig(min_shared_tokens=8)
    memories, ids = told_the_same(rig, 2)
    late, kept = rig.memory(), memories[0].kept
    other = [*FIRST, *range(130, 150)]
    rig.add(other, **LONG)
    rig.run()
    late.kept = kept
    job = rig.add([*ids, *ONE], memory=late, **LONG)
    rig.run()
    assert reply(job) == alone([*ids, *ONE], **LONG)
    assert job.turn.shared_tokens + job.turn.kept_tokens >= len(ids) - 1


def test_readers_of_a_level_gain_nothing_by_sharing_it_with_one_more() -> None:
    asked: list[dict[str, int]] = []

    class Watched(Worth):
        def why_not(self, **figures: int) -> str | None:
            asked.append(figures)
            return super().why_not(**figures)

    rig = Rig(min_shared_tokens=8)
    rig.batch._sharing._worth = Watched(rig.model, 8)
    _, ids = told_the_same(rig, 3)
    assert asked[0] == {
        "num_rows": 3,
        "num_tokens": len(ids) - 1,
        "num_saved": 2 * (len(ids) - 1),
        "num_steps": 12,
    }
    asked.clear()
    rig.add([*FIRST, *range(130, 150)], **LONG)
    rig.step()
    assert asked[0] == {
        "num_rows": 1,
        "num_tokens": len(FIRST),
        "num_saved": len(FIRST),
        "num_steps": 12,
    }


def test_levels_count_in_the_budget_and_give_way() -> None:
    rig = Rig(min_shared_tokens=8, max_tokens=90)
    memories = [rig.memory() for _ in range(2)]
    rows = [[*FIRST, *own] for own in (ONE, TWO)]
    for ids, memory in zip(rows, memories, strict=True):
        rig.add(ids, memory=memory, **LONG)
    rig.run()
    assert shared(rig) == [len(FIRST) + 1]
    assert rig.batch.figures.held_tokens == len(FIRST) + 1 + 4 + 11 + len(TWO) - 1 + 11
    # needs all there is
    long = [*range(100, 178)]
    other = rig.add(long, **LONG)
    rig.run()
    assert reply(other) == alone(long, **LONG)
    assert shared(rig) == []
    assert [memory.num_tokens for memory in memories] == [0, 0]
    assert rig.batch.figures.num_evictions == 2


def test_a_turn_that_waits_gives_up_what_it_would_read_where_another_needs_the_room() -> None:
    rig = Rig(min_shared_tokens=8, max_tokens=90, max_rows=1)
    memories = [rig.memory() for _ in range(2)]
    rows = [[*FIRST, *own] for own in (ONE, TWO)]
    for ids, memory in zip(rows, memories, strict=True):
        rig.add(ids, memory=memory, **LONG)
    rig.run()
    long = [*range(100, 178)]
    jobs = [rig.add(long, **LONG), rig.add([*rows[0], *THREE], memory=memories[0], **LONG)]
    rig.step()
    assert shared(rig) == []
    rig.run()
    assert reply(jobs[0]) == alone(long, **LONG)
    assert reply(jobs[1]) == alone([*rows[0], *THREE], **LONG)
    assert jobs[1].turn.kept_tokens == jobs[1].turn.shared_tokens == 0


def test_offloaded_turns_read_what_is_cut_meanwhile() -> None:
    cost = PreemptionCost(True, 1e15, 1.0)
    rig = Rig(min_shared_tokens=8, lookahead=0, cost=cost)
    rows = [[*FIRST, *range(100, 120), *own] for own in (ONE, TWO)]
    jobs = [rig.add(ids, **LONG) for ids in rows]
    for _ in range(4):
        rig.step()
    (whole,) = rig.rows.levels
    rig.batch._preempt(jobs[1])
    assert jobs[1].offloaded is not None
    third = [*FIRST, *range(130, 150)]
    job = rig.add(third, **LONG)
    rig.step()
    assert whole not in rig.rows.levels
    assert jobs[1].leaf in rig.rows.levels
    rig.run()
    assert [reply(each) for each in (*jobs, job)] == [alone(ids, **LONG) for ids in (*rows, third)]
    assert job.turn.shared_tokens == len(FIRST)
    # nothing of what was offloaded was computed again
    assert sum(each.turn.computed_tokens for each in jobs) == len(FIRST) + 21 + 4 + len(TWO) - 1


def test_an_idle_agent_that_asks_otherwise_keeps_what_is_still_common() -> None:
    rig = Rig(min_shared_tokens=8)
    memories, ids = told_the_same(rig, 2)
    assert shared(rig) == [len(ids) - 1]
    # inside of what both read; the other one reads it still
    again = [*FIRST, *range(100, 110), 99]
    job = rig.add(again, memory=memories[0], **LONG)
    rig.run()
    assert reply(job) == alone(again, **LONG)
    assert (job.turn.kept_tokens, job.turn.computed_tokens) == (len(again) - 1, 1)
    assert sorted(shared(rig)) == [9, len(again) - 1]
    # now nobody reads the rest of it
    memories[1].close()
    rig.batch.tidy()
    assert shared(rig) == [len(again) - 1]
    rig.rows.levels._held.hot.check_integrity()


def test_an_unequal_ending_of_a_level_of_a_single_agent_is_kept_too() -> None:
    rig = Rig(min_shared_tokens=8)
    memories, ids = told_the_same(rig, 2)
    memories[1].close()
    again = [*ids[:-3], 99]
    job = rig.add(again, memory=memories[0], **LONG)
    rig.run()
    assert reply(job) == alone(again, **LONG)
    assert job.turn.computed_tokens == 1
    assert shared(rig) == [len(again) - 1]


def test_an_invalidated_cache_voids_levels() -> None:
    rig = Rig(min_shared_tokens=8)
    memory = rig.memory()
    for own in (ONE, TWO):
        rig.add([*FIRST, *own], memory=memory if own is ONE else None, **LONG)
    rig.run()
    assert shared(rig) != []
    rig.cache.invalidate()
    assert shared(rig) == []
    assert rig.cache.rows.hot.num_bytes == 0


SHARED_TEXTS = [FIRST, [*FIRST, *range(100, 112)], [*FIRST, *range(100, 106), *range(140, 150)]]
walk = st.lists(
    st.tuples(
        st.integers(0, 3),  # the agent; 3 keeps nothing
        st.integers(0, 2),  # the text
        st.sampled_from([ONE, TWO, THREE, []]),
        st.booleans(),  # after what it said before
        st.integers(0, 3),  # steps meanwhile
        st.sampled_from(["", "", "", "cancel", "close", "fork"]),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=60)
@given(walk, st.none() | st.integers(75, 140), st.integers(1, 4), st.sampled_from([7, 64]))
def test_tokens_do_not_depend_on_what_is_shared(
    asked: list[Any], max_tokens: int | None, max_rows: int, max_step_tokens: int
) -> None:
    options = {"max_new_tokens": 5, "eos_token_id": None}
    rig = Rig(max_tokens, max_rows, max_step_tokens, 1, min_shared_tokens=6)
    memories = [rig.memory() for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    busy: dict[int, Any] = {}
    jobs: list[Any] = []

    def wait(agent: int) -> None:
        while agent in busy and not busy[agent][0].turn.done():
            rig.step()
        job, ids = busy.pop(agent, (None, None))
        if job is not None:
            held[agent] = [*ids, *job.turn.token_ids]

    for agent, text, own, goes_on, steps, then in asked:
        ids = [*SHARED_TEXTS[text], *own]
        memory = None
        if agent < 3:
            wait(agent)
            memory = memories[agent]
            if goes_on and len(held[agent]) < 50:
                ids = [*held[agent], *own, 98]
        job = rig.add(ids, memory=memory, **options)
        jobs.append((job, ids))
        if agent < 3:
            busy[agent] = job, ids
        for _ in range(steps):
            rig.step()
        if then == "cancel":
            rig.batch.cancel(job)
        elif then == "close" and agent < 3:
            wait(agent)
            memories[agent].close()
            memories[agent], held[agent] = rig.memory(), []
        elif then == "fork" and agent < 3:
            wait(agent)
            wait((agent + 1) % 3)
            memories[(agent + 1) % 3].close()
            memories[(agent + 1) % 3] = memories[agent].fork()
            held[(agent + 1) % 3] = held[agent]
    rig.run()
    for job, ids in jobs:
        wanted, given_ids = alone(ids, **options), reply(job)
        assert given_ids == wanted[: len(given_ids)]
        assert given_ids == wanted or job.turn.finish_reason == "cancelled"
    for memory in memories:
        memory.close()
    rig.batch.tidy()
    assert (shared(rig), rig.rows.num_slots_used, rig.memories.num_bytes) == ([], 0, 0)
    assert rig.cache.rows.hot.num_bytes == rig.prefix.num_bytes
    rig.cache.check_integrity()


# packed, local layers, latents, no position_ids, other attention; what keeps states does not share
MODELS = [
    ("gpt_neox", "granikv", True),
    ("gemma3", "granikv", True),
    ("gpt_oss", "granikv", True),
    ("gemma3n", "granikv", True),
    ("llama4", "granikv", True),
    ("deepseek_v3", "granikv", True),
    ("bloom", "eager", True),
    ("llama", "sdpa", True),
    ("lfm2", "granikv", False),
    ("qwen3_next", "granikv", False),
]
GREEDY = {"max_new_tokens": 4, "eos_token_id": None}


@pytest.mark.parametrize(("family", "attention", "shares"), MODELS)
def test_forks_and_broadcasts_on_models_of_every_kind(
    tiny_model: Any, family: str, attention: str, shares: bool
) -> None:
    model = tiny_model(family, attention)
    cache = AsymmetricPagedCache(model.config)
    prefix = cache.prefill(model, prefix_ids())
    options = EngineOptions(max_step_tokens=9, min_shared_tokens=6)
    told, more = tokens(21, seed=50), tokens(15, seed=51)

    def ask(memories: list[Any], prompts: list[list[int]]) -> list[list[int]]:
        with engine.gathering():
            turns = [
                engine.submit([*PREFIX, *ids], memory=memory, **GREEDY)
                for memory, ids in zip(memories, prompts, strict=True)
            ]
        replies = [list(turn.result(60).token_ids) for turn in turns]
        for ids, given_ids in zip(prompts, replies, strict=True):
            row = torch.tensor([[*PREFIX, *ids]])
            mask = torch.ones_like(row)
            out = model.generate(row, attention_mask=mask, use_cache=False, **GREEDY)
            assert given_ids == out[0, row.shape[1] :].tolist()
        engine.check_integrity()
        return [[*ids, *given_ids] for ids, given_ids in zip(prompts, replies, strict=True)]

    with Engine(model, cache, byte_tokenizer(), options) as engine:
        first = engine.memory(prefix)
        (held,) = ask([first], [told])
        forks = [first, first.fork(), first.fork()]
        ask(forks[:2], [[*held, 5, 6], [*held, 7]])
        assert (engine.journal.promoted_tokens >= len(told)) == shares
        ask(forks, [[*held, *more, own] for own in (5, 6, 7)])
        others = [engine.memory(prefix) for _ in range(2)]
        ask(others, [[*more, 5, 6], [*more, 9]])
        # inside of what they share, which local layers have forgotten
        ask(others, [[*more[:10], 5, 6], [*more[:10], 9]])
        assert (engine.journal.once_tokens >= 2 * len(more)) == shares
        assert (engine.level_bytes > 0) == shares
        refusals = [line for line in engine.journal.lines() if line.startswith("not shared: ")]
        refusal = "not shared: layers keep states, which are known after the last token of a row"
        assert any(line.startswith(refusal) for line in refusals) == (not shares)
        assert not any("it failed" in line for line in refusals)
        for memory in (*forks, *others):
            memory.close()
        assert engine.level_bytes + engine.idle_bytes + engine.row_bytes == 0


def test_rows_as_they_are_read_after_a_longer_chain() -> None:
    rig = Rig()
    row = rig.rows.start(rig.prefix)
    with torch.no_grad():
        rig._forward({row: FIRST})
    parked = rig.rows.park(row)
    level = rig.rows.levels.promote(parked, FIRST[:9])
    after = parked.after(level)
    assert (after.prefix, after.num_seen, after.num_tokens) == (level, level.stop, len(FIRST) - 9)
    for (keys, values), (old_keys, old_values) in zip(after.tokens, parked.tokens, strict=True):
        assert torch.equal(keys, old_keys[:, 9:])
        assert torch.equal(values, old_values[:, 9:])
        # the rest is freed with the old row
        assert keys.untyped_storage().nbytes() == keys.nbytes
    # of more than it holds, nothing is left
    longer = rig.rows.levels.promote(parked, FIRST)
    short = replace(
        after, tokens=tuple((k[:, :2], v[:, :2]) for k, v in after.tokens), num_tokens=2
    )
    assert short.after(longer).num_tokens == 0
