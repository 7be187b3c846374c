"""Levels of many turns become one as long as nobody reads a part of them alone."""

from typing import Any

import pytest
from engine_rig import LONG, Rig, alone, reply
from prompts import tokens

from hf_granikv.engine.job import Job

Conversation = tuple[Any, list[int]]
# too few to be shared by themselves
SHORT = {**LONG, "max_new_tokens": 5}


def broadcast(rig: Rig, told: list[Conversation], message: list[int]) -> list[Job]:
    """One turn: everybody hears the same, and what is held of each goes on with the answer."""
    jobs = []
    for memory, ids in told:
        ids += message
        jobs.append(rig.add(ids, memory=memory, **SHORT))
    rig.run()
    for (_, ids), job in zip(told, jobs, strict=True):
        assert reply(job) == alone(ids, **SHORT)
        ids += reply(job)
    return jobs


def conversations(rig: Rig, count: int) -> list[Conversation]:
    return [(rig.memory(), []) for _ in range(count)]


def shared(rig: Rig) -> list[int]:
    return [level.num_tokens for level in rig.rows.levels]


def test_the_chain_of_a_conversation_does_not_grow_with_its_turns() -> None:
    rig = Rig(min_shared_tokens=8)
    told = conversations(rig, 3)
    for turn in range(12):
        jobs = broadcast(rig, told, tokens(10, seed=turn))
        assert len(shared(rig)) <= 2
        assert sum(shared(rig)) == len(told[0][1]) - 6
        # the last token of the answer and the message by one of them, what is predicted from by each
        num_computed = sum(job.turn.computed_tokens for job in jobs)
        assert num_computed == (13 if turn else 12)
    assert rig.rows.levels.journal.merged_levels == 10
    assert "10 times two levels with the same readers became one" in "".join(
        rig.rows.levels.journal.lines()
    )
    for memory, _ in told:
        memory.close()
    rig.batch.tidy()
    assert shared(rig) == []
    assert rig.rows.num_slots_used == 0
    rig.cache.check_integrity()


def test_a_level_at_whose_end_somebody_stays_is_left_to_him() -> None:
    rig = Rig(min_shared_tokens=8)
    told = conversations(rig, 3)
    for turn in range(2):
        broadcast(rig, told, tokens(10, seed=turn))
    behind, *ahead = told
    at = behind[0].kept.parked.prefix
    for turn in range(2, 6):
        broadcast(rig, ahead, tokens(10, seed=turn))
        assert behind[0].kept.parked.prefix.stop == at.stop
        assert len(shared(rig)) <= 3
    # what he has in common with them ends where his own question begins
    (job,) = broadcast(rig, [behind], tokens(5, seed=9))
    assert job.turn.computed_tokens == 6
    broadcast(rig, ahead, tokens(10, seed=7))


def test_rows_that_run_go_over_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer parts from a level on the way, and two levels become one, under running rows."""
    rig = Rig(min_shared_tokens=8)
    told = conversations(rig, 2)
    for turn in range(2):
        broadcast(rig, told, tokens(10, seed=turn))
    assert len(shared(rig)) == 2
    more = {**LONG, "max_new_tokens": 20}
    jobs = [rig.add([*ids, 30 + i], memory=m, **more) for i, (m, ids) in enumerate(told)]
    for _ in range(3):
        rig.step()
    assert (shared(rig), [job.row is None for job in jobs]) == ([24], [False] * 2)
    started, rows = [], [job.row for job in jobs]
    start = rig.rows.start
    monkeypatch.setattr(rig.rows, "start", lambda *a, **k: started.append(a) or start(*a, **k))
    newcomer = rig.add([*told[0][1][:12], 40], **LONG)
    rig.step()
    assert sorted(shared(rig)) == [12, 12]
    assert len(started) == 1
    assert [job.row for job in jobs] == rows
    rig.run()
    assert reply(newcomer) == alone([*told[0][1][:12], 40], **LONG)
    for i, job in enumerate(jobs):
        assert reply(job) == alone([*told[i][1], 30 + i], **more)


def test_levels_that_cannot_become_one_are_read_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(min_shared_tokens=8)

    def full(*_: Any) -> None:
        raise MemoryError("no room for both")

    monkeypatch.setattr(rig.rows.levels, "merge", full)
    told = conversations(rig, 2)
    for turn in range(4):
        broadcast(rig, told, tokens(10, seed=turn))
    assert len(shared(rig)) == 4
    assert rig.rows.levels.journal.merged_levels == 0
