"""Turns of hybrids: whatever their lengths and prefixes, those that answer are one forward."""

from functools import cache
from typing import Any

import pytest
import torch
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, Rig, prompt, reply
from families import HYBRIDS
from test_live_states import shapes_of

from hf_granikv.engine.preemption import PreemptionCost

TEXTS = [
    "Why?",
    "When is high water?",
    "Who?",
    "And the pumps, who keeps their log?",
    "So.",
    "And?",
]
SAMPLED = {**LONG, "do_sample": True, "temperature": 1.5, "top_k": 20, "repetition_penalty": 1.3}


def hybrid_rig(tiny_model: Any, family: str, **options: Any) -> Rig:
    return Rig(model=tiny_model(family, vocab_size=len(TOKENIZER)), **options)


@cache
def _alone(
    model: Any, ids: tuple[int, ...], seed: int | None, options: tuple[tuple[str, Any], ...]
) -> tuple[int, ...]:
    if seed is not None:
        torch.manual_seed(seed)
    inputs = torch.tensor([list(ids)])
    # the ids of an answer may contain the padding id
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), use_cache=False, **dict(options)
    )
    return tuple(out[0, len(ids) :].tolist())


def alone(rig: Rig, ids: list[int], seed: int | None = None, **options: Any) -> tuple[int, ...]:
    return _alone(rig.model, tuple(ids), seed, tuple(sorted(options.items())))


def run_counted(rig: Rig, at_step: dict[int, Any]) -> int:
    """Runs until all turns are done; gives the most rows of a forward."""
    most = 0
    for number in range(300):
        at_step.get(number, lambda: None)()
        if rig.batch.is_empty:
            return most
        had_ids = {job.order: job.num_private > 0 for job in rig.batch._running.values()}
        with shapes_of(rig.model) as shapes:
            rig.step()
        fed = rig.fed[-1].items()
        decoding = [order for order, count in fed if count == 1 and had_ids.get(order)]
        prompts = sorted((count for order, count in fed if order not in decoding), reverse=True)
        wanted = [*((1, count) for count in prompts), *([(len(decoding), 1)] if decoding else [])]
        assert sorted(shapes) == sorted(wanted)
        most = max(most, len(decoding))
    raise AssertionError("not done")


@pytest.mark.smoke
@pytest.mark.parametrize("family", HYBRIDS)
def test_turns_that_join_and_leave_decode_in_one_forward(tiny_model, family):
    rig = hybrid_rig(tiny_model, family, max_step_tokens=24)
    other = rig.cache.prefill(
        rig.model, torch.tensor([prompt("And the mill? ")[len(PREFIX_IDS) :]]), parent=rig.prefix
    )
    own = [len(PREFIX_IDS), other.stop]
    asked, jobs = [], []

    def ask(text: str, seed: int | None = None, *, deep: bool = False, **options: Any) -> None:
        text = "And the mill? " + text if deep else text
        job = rig.add(text, seed, **options)
        if deep:
            # it reads the longer chain
            job.prefix = job.leaf = other
            job.token_ids = job.token_ids[own[1] - own[0] :]
        jobs.append(job)
        asked.append((prompt(text), seed, options))

    ask(TEXTS[0], **LONG)
    ask(TEXTS[1], 3, **SAMPLED)
    ask(TEXTS[2], deep=True, **{**LONG, "max_new_tokens": 5})
    cancelled = rig.add(TEXTS[3], **LONG)
    most = run_counted(
        rig,
        {
            4: lambda: ask(TEXTS[4], 5, deep=True, **SAMPLED),
            6: lambda: rig.batch.cancel(cancelled),
            7: lambda: ask(TEXTS[5], **LONG),
        },
    )
    assert most >= 4
    assert cancelled.turn.finish_reason == "cancelled"
    assert [reply(job) for job in jobs] == [alone(rig, ids, seed, **o) for ids, seed, o in asked]
    assert rig.rows.num_bytes == rig.rows.num_slots_used == 0


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("frees_budget", [False, True], ids=["computed_again", "kept"])
def test_turns_that_are_sent_away_resume_exactly(tiny_model, family, frees_budget):
    cost = PreemptionCost(frees_budget, bytes_per_s=1e15, tokens_per_s=1)
    rig = hybrid_rig(tiny_model, family, max_tokens=60, lookahead=0, cost=cost)
    jobs = [rig.add(text, **LONG) for text in TEXTS]
    rig.run()
    assert rig.batch.figures.num_preemptions > 0
    for job, text in zip(jobs, TEXTS, strict=True):
        assert reply(job) == alone(rig, prompt(text), **LONG)
    assert rig.rows.num_bytes == 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_agents_go_on_from_states_that_they_kept(tiny_model, family):
    rig = hybrid_rig(tiny_model, family)
    memories, told = [rig.memory() for _ in range(3)], [prompt(text) for text in TEXTS[:3]]
    for number in range(3):
        jobs = [
            rig.add(ids[len(PREFIX_IDS) :], memory=memory, **LONG)
            for ids, memory in zip(told, memories, strict=True)
        ]
        run_counted(rig, {})
        for i, job in enumerate(jobs):
            assert reply(job) == alone(rig, told[i], **LONG)
            assert job.turn.kept_tokens == 0 or number
            told[i] = [*told[i], *reply(job), *prompt(TEXTS[3 + number])[len(PREFIX_IDS) :]]
    assert rig.batch.figures.kept_tokens > 0
    assert rig.rows.num_bytes == 0
    for memory in memories:
        memory.close()
    assert rig.memories.num_bytes == 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_a_decode_step_that_fails_is_made_good(tiny_model, family):
    """Once, whatever it reads: all that answered start again, and nobody's turn fails."""
    rig, calls = hybrid_rig(tiny_model, family), []
    jobs = [rig.add(text, **LONG) for text in TEXTS[:4]]

    def breaks(module: Any, args: Any, out: Any) -> None:
        calls.append(args[0].shape[:2])
        if args[0].shape[:2] == (4, 1) and len(calls) > 8:
            handle.remove()
            raise RuntimeError("a layer broke")

    handle = rig.model.base_model.layers[-1].register_forward_hook(breaks)
    rig.run()
    handle.remove()
    assert rig.batch.figures.num_preemptions == 4
    for job, text in zip(jobs, TEXTS, strict=False):
        assert reply(job) == alone(rig, prompt(text), **LONG)
