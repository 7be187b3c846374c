"""Turns that join, leave, wait and resume: each gives the tokens of `generate` for it alone."""

import pytest
import torch
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, Rig, alone, prompt, reply
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.errors import ColdPoolFullError

TEXTS = ["Why?", "When is high water?", "Who?", "And the pumps, who keeps their log?", "So."]
SAMPLED = {**LONG, "do_sample": True, "temperature": 1.5, "top_k": 20, "repetition_penalty": 1.3}


@pytest.mark.smoke
def test_turns_that_join_and_leave_give_what_each_gives_alone():
    rig, jobs = Rig(), []
    for i, text in enumerate(TEXTS):
        options = {"max_new_tokens": 3 + 4 * i, "eos_token_id": None}
        jobs.append((rig.add(text, **options), alone(text, **options)))
        rig.step()
        rig.step()
    rig.run()
    assert [reply(job) for job, _ in jobs] == [wanted for _, wanted in jobs]
    assert [job.turn.finish_reason for job, _ in jobs] == ["length"] * len(TEXTS)
    assert rig.rows.num_slots_used == 0


@pytest.mark.smoke
def test_each_turn_has_parameters_and_seeds_of_its_own():
    rig = Rig()
    asked = [
        ("Why?", None, LONG),
        ("Why?", 1, SAMPLED),
        ("Why?", 2, SAMPLED),
        ("Why?", 1, {**SAMPLED, "temperature": 0.7}),
        ("Why?", None, {**LONG, "no_repeat_ngram_size": 1}),
        ("Why?", None, {"max_new_tokens": 20, "stop_strings": "l"}),
        ("Why?", None, {"max_new_tokens": 20, "eos_token_id": 179}),
    ]
    jobs = [rig.add(text, seed, **options) for text, seed, options in asked]
    rig.run()
    assert [reply(job) for job in jobs] == [alone(t, seed, **o) for t, seed, o in asked]
    assert [job.turn.finish_reason for job in jobs] == ["length"] * 5 + ["stop"] * 2
    assert len({reply(job) for job in jobs}) == len(jobs)


def test_a_newcomer_is_computed_in_chunks_while_others_go_on():
    rig = Rig(max_step_tokens=6)
    first = rig.add("So.", **LONG)
    rig.step()
    second = rig.add(TEXTS[3], **LONG)
    for step in range(1, 7):
        rig.step()
        assert len(first.turn.token_ids) == step + 1
        assert len(second.turn.token_ids) == 0
        assert rig.fed[-1] == {0: 1, 1: 5}
    rig.run()
    assert (reply(first), reply(second)) == (alone("So.", **LONG), alone(TEXTS[3], **LONG))


@pytest.mark.parametrize("options", [LONG, SAMPLED], ids=["greedy", "sampled"])
def test_a_preempted_turn_resumes_exactly(options):
    rig = Rig(max_tokens=40, lookahead=0)
    jobs = [rig.add(text, i, **options) for i, text in enumerate(TEXTS[:3])]
    rig.run()
    assert rig.batch.figures.num_preemptions > 0
    assert [reply(job) for job in jobs] == [
        alone(text, i, **options) for i, text in enumerate(TEXTS[:3])
    ]
    # what was given back is counted as computed again
    again = sum(job.turn.computed_tokens for job in jobs) - sum(map(len, TEXTS[:3]))
    assert again > 0
    assert rig.batch.figures.prompt_tokens == again + sum(map(len, TEXTS[:3]))


def test_kept_tokens_of_a_preempted_turn_are_not_computed_again():
    rig = Rig(max_tokens=40, lookahead=0, cost=PreemptionCost(True, 1e15, 1.0))
    jobs = [rig.add(text, i, **SAMPLED) for i, text in enumerate(TEXTS[:3])]
    rig.run()
    assert rig.batch.figures.num_preemptions > 0
    assert [reply(job) for job in jobs] == [
        alone(text, i, **SAMPLED) for i, text in enumerate(TEXTS[:3])
    ]
    assert rig.batch.figures.prompt_tokens == sum(map(len, TEXTS[:3]))


turns = st.lists(
    st.tuples(
        st.sampled_from(TEXTS[:4]),
        st.sampled_from([LONG, SAMPLED]),
        st.integers(0, 6),
        st.none() | st.integers(0, 25),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15)
@given(turns, st.none() | st.integers(47, 70), st.integers(1, 4), st.integers(1, 30))
def test_tokens_do_not_depend_on_the_company(asked, max_tokens, max_rows, max_step_tokens):
    rig = Rig(max_tokens, max_rows, max_step_tokens, lookahead=1)
    jobs = []
    asked = [(text, i % 3, *rest) for i, (text, *rest) in enumerate(asked)]
    for text, seed, options, steps_before, _ in asked:
        for _ in range(steps_before):
            rig.step()
        jobs.append(rig.add(text, seed, **options))
    for step in range(400):
        for job, (*_, cancelled) in zip(jobs, asked, strict=True):
            if cancelled == step:
                rig.batch.cancel(job)
        if rig.batch.is_empty and step > 25:
            break
        rig.step()
    for job, (text, seed, options, _, cancelled) in zip(jobs, asked, strict=True):
        wanted, given_ids = alone(text, seed, **options), reply(job)
        assert given_ids == wanted[: len(given_ids)]
        assert job.turn.finish_reason == ("length" if given_ids == wanted else "cancelled")
        assert given_ids == wanted or cancelled is not None
    assert rig.rows.num_slots_used == 0


def test_a_cancelled_turn_frees_its_place_at_once():
    rig = Rig(max_rows=1)
    first, second = rig.add("Why?", **LONG), rig.add("Who?", **LONG)
    rig.step()
    assert second.turn.token_ids == ()
    rig.batch.cancel(first)
    assert first.turn.result(0).finish_reason == "cancelled"
    assert reply(first) == alone("Why?", **LONG)[:1]
    rig.step()
    assert second.turn.token_ids == alone("Who?", **LONG)[:1]
    rig.batch.cancel(second)
    # again is harmless
    rig.batch.cancel(second)
    assert rig.batch.is_empty
    assert rig.rows.num_slots_used == 0


def test_a_turn_that_can_never_fit_is_refused_at_once():
    rig = Rig(max_tokens=15)
    rig.add("Why?", **LONG)
    with pytest.raises(
        ColdPoolFullError, match="up to 16 private tokens was asked, the budget is 15"
    ):
        rig.add("Why??", **LONG)
    rig.run()


class Breaks:
    """Breaks every forward over a row that reads a certain token."""

    def __init__(self, model, token_id, error):
        self.handle = model.get_input_embeddings().register_forward_hook(self.hook)
        self.token_id, self.error = token_id, error

    def hook(self, module, args, output):
        if (args[0] == self.token_id).any():
            raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), torch.OutOfMemoryError("full")], ids=["error", "memory"]
)
def test_who_breaks_a_step_fails_alone(error):
    rig = Rig()
    bad_id = prompt("%")[-1]
    jobs = [rig.add(text, **LONG) for text in ("Why?", "50 %, why?", "Who?")]
    breaks = Breaks(rig.model, bad_id, error)
    try:
        rig.run()
    finally:
        breaks.handle.remove()
    with pytest.raises(type(error), match=str(error)):
        reply(jobs[1])
    assert (reply(jobs[0]), reply(jobs[2])) == (alone("Why?", **LONG), alone("Who?", **LONG))
    assert jobs[1].turn.finish_reason is None
    assert jobs[1].turn.done()
    assert rig.rows.num_slots_used == 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_rows_that_lost_their_states_to_another_ones_failure_start_again(
    caplog, tiny_model, family
):
    model, options = tiny_model(family), {"max_new_tokens": 5, "suppress_tokens": [95]}
    rows = [[5, 6, 7], [8, 9, 10, 11], [12], [13, 14]]
    with Engine(model, AsymmetricPagedCache(model.config), TOKENIZER) as engine:
        breaks = Breaks(model, 95, RuntimeError("broken"))
        try:
            with engine.gathering():
                turns = [engine.submit(row, **options) for row in rows[:3]]
                bad = engine.submit([5, 6, 95, 7], **options)
                turns.append(engine.submit(rows[3], **options))
            with pytest.raises(RuntimeError, match="broken"):
                bad.result(60)
            for turn, row in zip(turns, rows, strict=True):
                out = model.generate(torch.tensor([row]), **options)
                assert list(turn.result(60).token_ids) == out[0, len(row) :].tolist()
            assert engine.figures.num_repeated == 1
            assert "a forward of 5 rows failed and is repeated row by row" in caplog.text
            # the prompt that was computed before the bad one; shorter ones come after it
            assert engine.figures.num_preemptions == 1
        finally:
            breaks.handle.remove()


class Fails(LogitsProcessor):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise ValueError("this processor is broken")
        return scores


def test_a_broken_processor_ends_its_own_turn():
    rig = Rig()
    jobs = [
        rig.add("Why?", 3, **SAMPLED),
        rig.add("Why?", logits_processor=[Fails(2)], **LONG),
        rig.add("Why?", 4, **SAMPLED),
    ]
    rig.run()
    with pytest.raises(ValueError, match="processor is broken"):
        reply(jobs[1])
    assert jobs[1].turn.token_ids == alone("Why?", **LONG)[:2]
    assert [reply(jobs[i]) for i in (0, 2)] == [alone("Why?", seed, **SAMPLED) for seed in (3, 4)]


def test_a_pool_smaller_than_the_budget_is_found_out():
    rig = Rig(cold_slots=60, max_tokens=1000)
    jobs = [rig.add(text, **LONG) for text in TEXTS]
    rig.run()
    assert rig.batch.figures.num_preemptions > 0
    assert [reply(job) for job in jobs] == [alone(text, **LONG) for text in TEXTS]


def test_what_no_pool_can_hold_fails_and_the_rest_goes_on():
    rig = Rig(cold_slots=44, max_tokens=1000)
    jobs = [rig.add(text, **LONG) for text in ("Why?", TEXTS[3], "Who?")]
    rig.run()
    with pytest.raises(ColdPoolFullError):
        reply(jobs[1])
    assert (reply(jobs[0]), reply(jobs[2])) == (alone("Why?", **LONG), alone("Who?", **LONG))


def test_a_step_that_does_not_fit_is_cut_smaller():
    rig, seen = Rig(), []
    forward = rig.rows.forward

    def small(feeds):
        seen.append(sum(map(len, feeds.values())))
        if seen[-1] > 5:
            raise torch.OutOfMemoryError("activations")
        return forward(feeds)

    rig.rows.forward = small
    job = rig.add(TEXTS[3], **LONG)
    rig.run()
    assert reply(job) == alone(TEXTS[3], **LONG)
    assert seen[:4] == [35, 17, 8, 4]


def test_the_prefix_is_not_computed_again():
    rig = Rig()
    for text in TEXTS:
        rig.add(text, **LONG)
    rig.run()
    steps = sum(len(each) for each in rig.fed)
    assert sum(sum(each.values()) for each in rig.fed) == sum(map(len, TEXTS)) + 11 * len(TEXTS)
    assert steps < sum(map(len, TEXTS)) + len(PREFIX_IDS)
