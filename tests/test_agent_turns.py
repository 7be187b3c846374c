"""Agents of a runner over many turns: they keep what was computed, fork, reset, close, stream."""

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agents import CHATML, MESSAGES, SHARED, byte_tokenizer, llama, new_runner

from hf_granikv import MultiAgentRunner
from hf_granikv.report import RunReport

LONG = {"max_new_tokens": 10, "eos_token_id": None}
SAMPLED = {**LONG, "do_sample": True, "temperature": 1.5}


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(params=[None, CHATML], ids=["plain", "chatml"])
def runner(model, request):
    with new_runner(model, byte_tokenizer(request.param)) as runner:
        yield runner


def alone(runner, ids, seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    out = runner.model.generate(torch.tensor([ids]), **{**LONG, **kwargs})
    return tuple(out[0, len(ids) :].tolist())


def held(runner):
    """Bytes that agents and rows hold."""
    engine = runner._answering._engine
    return 0 if engine is None else engine.idle_bytes + engine.row_bytes


def test_texts_that_start_alike_make_a_tree(runner):
    counted = []
    hook = runner.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: counted.append(args[0].numel())
    )
    long = runner.share(SHARED + " And more was said of it, at length, by everybody who was there.")
    hook.remove()
    short = runner.agents["ann"].prefix
    starts_alike = runner.agents["ann"].share.ids == long.chain_ids[: short.stop].tolist()
    assert (long.parent is short) == starts_alike
    assert sum(counted) == long.num_tokens
    runner.agent("dee", long, "You read all of it.")
    asked = dict.fromkeys((*MESSAGES, "dee"), "What then?")
    prompts = {name: runner.prompt_ids(name, message) for name, message in asked.items()}
    replies = runner.run(asked, **LONG)
    for name, ids in prompts.items():
        assert replies[name].token_ids == alone(runner, ids)
    levels = {level for agent in runner.agents.values() for level in agent.prefix.chain}
    assert runner.report().prefix_tokens == sum(level.num_tokens for level in levels)


@pytest.mark.smoke
def test_a_later_turn_computes_only_what_is_new(runner):
    computed = []
    hook = runner.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: computed.append(args[0].numel())
    )
    try:
        runner.run(MESSAGES, **LONG)
        for question in ("And then?", "Since when?"):
            asked = dict.fromkeys(MESSAGES, question)
            prompts = {name: runner.prompt_ids(name, question) for name in asked}
            computed.clear()
            replies = runner.run(asked, **LONG)
            num_computed, report = sum(computed), runner.report()
            for name, ids in prompts.items():
                assert replies[name].token_ids == alone(runner, ids)
            assert num_computed == report.suffix_tokens - report.kept_tokens + 3 * 9
            # the question, the template around it, and what the answer's text does not repeat
            assert report.suffix_tokens - report.kept_tokens < 3 * (len(question) + 70)
            assert f"({report.kept_tokens} held before)" in str(report)
    finally:
        hook.remove()


def test_a_history_may_be_changed_between_turns(runner):
    runner.run(MESSAGES, **LONG)
    ann = runner.agents["ann"]
    ann.history[1] = {"role": "assistant", "content": "At noon."}
    ids = runner.prompt_ids(ann, "Why?")
    assert runner.run({ann: "Why?"}, **LONG)["ann"].token_ids == alone(runner, ids)
    ann.history.clear()
    ids = runner.prompt_ids(ann, "Why?")
    assert runner.run({ann: "Why?"}, **LONG)["ann"].token_ids == alone(runner, ids)


def test_beams_and_the_engine_take_turns(runner):
    runner.run(MESSAGES, **LONG)
    ids = runner.prompt_ids("ann", "Why?")
    reply = runner.run({"ann": "Why?"}, num_beams=3, **LONG)["ann"]
    assert reply.token_ids == alone(runner, ids, num_beams=3)
    ids = runner.prompt_ids("ann", "Who?")
    assert runner.run({"ann": "Who?"}, **LONG)["ann"].token_ids == alone(runner, ids)
    # rows of generate are not kept
    assert runner._shares.cache.stats().cold_bytes == 0


def test_a_fork_goes_its_own_way_from_the_same_tokens(runner):
    runner.run(MESSAGES, **LONG)
    ann = runner.agents["ann"]
    before = held(runner)
    twin = ann.fork("twin")
    assert held(runner) == before
    assert (twin.history, twin.prefix) == (ann.history, ann.prefix)
    prompts = {"ann": runner.prompt_ids("ann", "Why?"), "twin": runner.prompt_ids("twin", "Who?")}
    replies = runner.run({"ann": "Why?", "twin": "Who?"}, **LONG)
    for name, ids in prompts.items():
        assert replies[name].token_ids == alone(runner, ids)
    report = runner.report()
    assert report.kept_tokens > report.suffix_tokens / 3
    assert len(ann.history) == len(twin.history) == 4
    assert ann.history != twin.history


def test_reset_and_close_give_everything_back(runner):
    start = held(runner)
    runner.run(MESSAGES, **LONG)
    ann, bo, cy = runner.agents.values()
    twin = ann.fork("twin")
    for agent in (ann, bo, twin):
        assert held(runner) > start
        agent.reset()
        assert agent.history == []
    cy.close()
    assert held(runner) == start
    assert list(runner.agents) == ["ann", "bo", "twin"]
    with pytest.raises(ValueError, match="'cy' is unknown"):
        runner.run({"cy": "Why?"})
    with pytest.raises(ValueError, match="'cy' has no runner"):
        cy.reset()
    ids = runner.prompt_ids("ann", "Why?")
    assert runner.run({"ann": "Why?"}, **LONG)["ann"].token_ids == alone(runner, ids)
    # the name is free again
    runner.agent("cy", ann.prefix)


@pytest.mark.parametrize(
    ("num_turns", "max_cold_slots"), [(50, None), (15, 700)], ids=["all_held", "budget"]
)
def test_many_turns_among_eight_agents_leak_nothing(model, num_turns, max_cold_slots):
    """Each agent is told what another one has said; with a budget they lose tokens in between."""
    names = [f"agent-{i}" for i in range(8)]
    tokenizer = byte_tokenizer(CHATML)
    options = {"max_cold_slots": max_cold_slots, "max_rows": 8}
    with MultiAgentRunner(model, tokenizer, **options) as runner:
        prefix = runner.share(SHARED)
        for name in names:
            runner.agent(name, prefix, f"You are {name}.")
        hot, start = prefix.num_bytes, held(runner)
        said, most = dict.fromkeys(names, "Begin."), 0
        for turn in range(num_turns):
            asked = {name: f"{turn}: {said[names[i - 1]][:3]}" for i, name in enumerate(names)}
            prompts = {name: runner.prompt_ids(name, text) for name, text in asked.items()}
            replies = runner.run(asked, max_new_tokens=3, eos_token_id=None)
            said = {name: reply.text for name, reply in replies.items()}
            most = max(most, held(runner))
            if turn % 7 == 0 or turn == num_turns - 1:
                runner._answering._engine.check_integrity()
                name = names[turn % 8]
                wanted = alone(runner, prompts[name], max_new_tokens=3)
                assert replies[name].token_ids == wanted
            if turn == num_turns // 2:
                # a conversation that starts again in the middle
                runner.agents[names[0]].reset()
            # answers of old turns are cut, so that prompts stay within the model's positions
            for agent in runner.agents.values():
                del agent.history[:-8]
        figures = runner._answering._engine.figures
        assert figures.num_turns == num_turns * 8
        assert (figures.num_evictions > 0) == (max_cold_slots is not None)
        for agent in list(runner.agents.values()):
            agent.close()
        gc.collect()
        assert held(runner) == start < most
        assert runner._shares.cache.stats().hot_bytes == hot
        runner._answering._engine.check_integrity()


def test_each_agent_has_arguments_of_its_own(model):
    with MultiAgentRunner(model, byte_tokenizer()) as runner:
        prefix = runner.share(SHARED)
        runner.agent("ann", prefix, seed=1, **SAMPLED)
        runner.agent("bo", prefix, seed=2, **SAMPLED)
        runner.agent("cy", prefix, max_new_tokens=3, eos_token_id=None)
        asked = dict.fromkeys(("ann", "bo", "cy"), "Why?")
        ids = runner.prompt_ids("ann", "Why?")
        replies = runner.run(asked)
        assert replies["ann"].token_ids == alone(runner, ids, 1, **SAMPLED)
        assert replies["bo"].token_ids == alone(runner, ids, 2, **SAMPLED)
        assert replies["cy"].token_ids == alone(runner, ids)[:3]
        for agent in runner.agents.values():
            agent.reset()
        # the call's come first
        replies = runner.run(asked, seed=5, do_sample=True, max_new_tokens=4)
        options = {**SAMPLED, "max_new_tokens": 4}
        assert replies["ann"].token_ids == alone(runner, ids, 5, **options)
        assert replies["ann"] == replies["ann"].__class__(
            **{**vars_of(replies["bo"]), "name": "ann"}
        )
        twin = runner.agents["ann"].fork("twin")
        assert twin.generation == {"seed": 1, **SAMPLED}


def vars_of(reply):
    return {name: getattr(reply, name) for name in reply.__slots__}


def test_a_seed_is_for_draws_of_one_agent(runner):
    with pytest.raises(ValueError, match=r"seed=3 .* num_beams=2 .* torch.manual_seed instead"):
        runner.run(MESSAGES, seed=3, num_beams=2)


def test_without_a_seed_a_seeded_program_repeats_itself(runner):
    texts = []
    for _ in range(2):
        torch.manual_seed(4)
        texts.append([reply.text for reply in runner.run(MESSAGES, **SAMPLED).values()])
        for agent in runner.agents.values():
            agent.reset()
    assert texts[0] == texts[1]


# ---- turns that come piece by piece


def test_submitted_turns_give_what_run_gives(model, runner):
    wanted = new_runner(model, runner.tokenizer).run(MESSAGES, **LONG)
    turns = {name: runner.submit(name, message, **LONG) for name, message in MESSAGES.items()}
    for name, turn in turns.items():
        assert "".join(turn) == wanted[name].text
        assert turn.result(60) == wanted[name]
        # as soon as the turn is done
        assert runner.agents[name].history[1]["content"] == wanted[name].text


def test_streams_give_the_pieces_of_all_agents(model, runner):
    wanted = new_runner(model, runner.tokenizer).run(MESSAGES, **LONG)

    async def listen():
        return [pair async for pair in runner.astream(MESSAGES, **LONG)]

    for listened in (lambda: list(runner.stream(MESSAGES, **LONG)), lambda: asyncio.run(listen())):
        texts = dict.fromkeys(MESSAGES, "")
        for name, piece in listened():
            texts[name] += piece
        assert texts == {name: reply.text for name, reply in wanted.items()}
        num_tokens = sum(len(reply.token_ids) for reply in wanted.values())
        assert runner.report().generated_tokens == num_tokens
        runner._report = RunReport()
        for agent in runner.agents.values():
            assert len(agent.history) == 2
            agent.reset()


def test_a_stream_that_is_broken_off_is_in_no_report(runner):
    pieces = runner.stream(MESSAGES, **LONG)
    next(pieces)
    pieces.close()
    assert runner.report() == RunReport()


def test_a_stream_that_ends_with_its_runner_is_in_no_report(model, runner):
    other = new_runner(model, runner.tokenizer)
    pieces = other.stream(MESSAGES, **LONG)
    other.close()
    assert "".join(piece for _, piece in pieces) == ""
    assert other.report() == RunReport()


def test_a_report_is_of_the_agents_that_were_asked_and_of_the_time_they_took(runner):
    runner.run(MESSAGES, **LONG)
    alone = {"ann": "And then?"}
    whole = runner.report()
    for _ in runner.stream(alone, **LONG):
        pass
    report = runner.report()
    assert report.num_agents == 1
    # conversations of one length or nearly so, one of which is longer now
    assert report.cold_bytes < whole.cold_bytes
    assert report.dense_equivalent_bytes > report.cold_bytes
    pieces = runner.stream(alone, **LONG)
    first = next(pieces)
    assert runner.agents["ann"]._turn.wait(60)
    time.sleep(1.0)
    assert [first, *pieces]
    assert runner.report().generate_s < 1.0


def test_arun_gives_what_run_gives(model, runner):
    for way in ({}, {"num_beams": 2}):
        wanted = new_runner(model, runner.tokenizer).run(MESSAGES, **LONG, **way)
        assert asyncio.run(runner.arun(MESSAGES, **LONG, **way)) == wanted
        assert runner.report().num_agents == 3
        for agent in runner.agents.values():
            assert len(agent.history) == 2
            agent.reset()


def test_conversations_on_many_threads_do_not_mix(model, runner):
    names = [f"client-{i}" for i in range(6)]
    for name in names:
        runner.agent(name, runner.agents["ann"].prefix)

    def converse(name):
        answers = []
        for message in ("Why?", f"Who is {name}?", "When?"):
            ids = runner.prompt_ids(name, message)
            answers.append((ids, runner.submit(name, message, **LONG).result(60).token_ids))
        return answers

    with ThreadPoolExecutor(6) as pool:
        for answers in pool.map(converse, names):
            for ids, token_ids in answers:
                assert token_ids == alone(runner, ids)


def test_an_agent_answers_one_question_at_a_time(runner):
    turn = runner.submit("ann", "Why?", max_new_tokens=500, eos_token_id=None)
    for ask in (
        lambda: runner.submit("ann", "Who?"),
        lambda: runner.run({"ann": "Who?"}),
        lambda: runner.agents["ann"].fork("twin"),
        lambda: runner.agents["ann"].reset(),
    ):
        with pytest.raises(ValueError, match="'ann' is answering; wait for its turn, cancel it"):
            ask()
    turn.cancel()
    # one that was cancelled is waited for
    assert runner.run({"ann": "Who?"}, **LONG)["ann"].finish_reason == "length"
    assert turn.finish_reason == "cancelled"
    assert [message["content"] for message in runner.agents["ann"].history[:1]] == ["Who?"]


def test_closing_an_agent_cancels_its_turn(runner):
    start = held(runner)
    turn = runner.submit("ann", "Why?", max_new_tokens=500, eos_token_id=None)
    next(iter(turn))
    runner.agents["ann"].close()
    assert turn.result(60).finish_reason == "cancelled"
    assert held(runner) == start


def test_what_does_not_come_piece_by_piece_is_refused(runner):
    for ask in (runner.stream, runner.astream):
        with pytest.raises(ValueError, match="cannot be decoded with num_beams=2; ask with run"):
            ask(MESSAGES, num_beams=2)
    with pytest.raises(ValueError, match=r"assistant_model=.*; ask with run"):
        runner.submit("ann", "Why?", assistant_model=object())


def test_one_failing_turn_ends_a_run_and_changes_no_history(runner):
    ids = runner.tokenizer("%", add_special_tokens=False)["input_ids"]

    def fail(module, args, output):
        if (args[0] == ids[0]).any():
            raise RuntimeError("broken")

    hook = runner.model.get_input_embeddings().register_forward_hook(fail)
    report = runner.report()
    try:
        with pytest.raises(RuntimeError, match="broken"):
            runner.run({**MESSAGES, "bo": "50 %?"}, max_new_tokens=200, eos_token_id=None)
    finally:
        hook.remove()
    assert all(agent.history == [] for agent in runner.agents.values())
    assert runner.report() is report
    assert runner.run(MESSAGES, **LONG)["ann"].finish_reason == "length"


def test_an_interrupt_cancels_a_run(runner, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_granikv.engine.turn.Turn.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.run(MESSAGES, max_new_tokens=500, eos_token_id=None)
    assert all(agent._turn.is_cancelling for agent in runner.agents.values())
    assert runner.run(MESSAGES, **LONG)["ann"].finish_reason == "length"


def test_a_budget_of_bytes_is_kept(model):
    prompts = {name: len(message) + 9 for name, message in MESSAGES.items()}
    # 256 bytes per token, a quarter of them twice while a pool grows, and room for two of three
    with new_runner(model, byte_tokenizer(), max_bytes=256 * 78) as runner:
        wanted = new_runner(model, byte_tokenizer()).run(MESSAGES, **LONG)
        assert runner.run(MESSAGES, **LONG) == wanted
        assert sum(prompts.values()) > 60 >= runner._answering._engine.figures.peak_tokens


def test_a_model_that_changed_voids_what_agents_hold():
    runner = new_runner(llama(), byte_tokenizer())
    runner.run(MESSAGES, **LONG)
    with torch.no_grad():
        runner.model.lm_head.weight.add_(0.1)
        runner.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    ids = runner.prompt_ids("ann", "And?")
    reply = runner.run({"ann": "And?"}, **LONG)["ann"]
    assert runner.report().kept_tokens == 0
    assert reply.token_ids == alone(runner, ids)
    runner.close()


def test_a_closed_runner_says_so(model):
    with new_runner(model, byte_tokenizer()) as runner:
        turn = runner.submit("ann", "Why?", max_new_tokens=500, eos_token_id=None)
    assert turn.result(60).finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="closed"):
        runner.run(MESSAGES)


def test_equal_texts_are_stored_once_and_equal_ids_apart(model):
    tokenizer = byte_tokenizer()
    with MultiAgentRunner(model, tokenizer) as runner:
        first, again, other = (runner.share(text) for text in (SHARED, SHARED, "Another log."))
        assert first is again
        assert runner._shares.cache.stats().hot_bytes == first.num_bytes + other.num_bytes
        runner.agent("ann", first)
        runner.agent("bo", other)
        prompts = {name: runner.prompt_ids(name, "Why?") for name in ("ann", "bo")}
        replies = runner.run(dict.fromkeys(prompts, "Why?"), **LONG)
        for name, ids in prompts.items():
            assert replies[name].token_ids == alone(runner, ids)
        assert runner.report().prefix_tokens == first.stop + other.stop
