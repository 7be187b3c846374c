"""What agents come to share between and in their turns: held once, computed once, given back."""

import gc
import time
from contextlib import contextmanager

import pytest
import torch
from agents import CHATML, SHARED, byte_tokenizer, llama, new_runner
from test_multi_agent import plain_answer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import MultiAgentRunner

LONG = {"max_new_tokens": 10, "eos_token_id": None}
AT_LEAST = 16
TOLD = "The pumps ran all night, and the log says who was there and what he saw. "
# ends an assistant's message otherwise once another one follows, as templates do that drop thoughts
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(params=[None, CHATML, REWRITES], ids=["plain", "chatml", "rewrites"])
def runner(model, request):
    tokenizer = byte_tokenizer(request.param)
    with new_runner(model, tokenizer, min_shared_tokens=AT_LEAST) as runner:
        yield runner


def alone(runner, ids, **kwargs):
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    out = runner.model.generate(ids, attention_mask=mask, use_cache=False, **{**LONG, **kwargs})
    return tuple(out[0, ids.shape[1] :].tolist())


@contextmanager
def computed(runner):
    """The tokens of all forwards, from the embedding layer."""
    counts = []
    hook = runner.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: counts.append(args[0].numel())
    )
    try:
        yield counts
    finally:
        hook.remove()


def asked(runner, messages, **kwargs):
    """The report of a turn, in which everybody answers as alone and nothing is computed in vain."""
    options = {**LONG, **kwargs}
    prompts = {name: runner.prompt_ids(name, message) for name, message in messages.items()}
    with computed(runner) as counts:
        replies = runner.run(messages, **options)
    for name, ids in prompts.items():
        assert replies[name].token_ids == alone(runner, ids, **kwargs)
    report = runner.report()
    num_new = report.suffix_tokens - report.kept_tokens - report.shared_tokens
    assert sum(counts) == num_new + report.decoded_tokens
    engine_of(runner).check_integrity()
    return report


def engine_of(runner):
    return runner._answering._engine


def held(runner):
    engine = engine_of(runner)
    return 0 if engine is None else engine.idle_bytes + engine.row_bytes + engine.level_bytes


def levels(runner):
    return list(engine_of(runner)._rows.levels)


def leaf_of(runner, name):
    return runner.agents[name]._memory.kept.parked.prefix


@pytest.mark.smoke
def test_what_forks_held_before_is_promoted_and_not_computed(runner):
    asked(runner, {"ann": TOLD})
    ann = runner.agents["ann"]
    for name in ("twin", "other", "idle"):
        ann.fork(name)
    num_before = ann._memory.num_tokens
    report = asked(runner, {"ann": "Why?", "twin": "Who?", "other": "When?"})
    # whatever the template keeps of it
    assert len(TOLD) <= report.promoted_tokens <= num_before
    first = levels(runner)[0]
    assert first.parent is ann.prefix
    for name in runner.agents:
        memory = runner.agents[name]._memory
        assert memory is None or first in memory.kept.parked.prefix.chain
    # the one that was not asked holds what is left over, and no copy
    idle = runner.agents["idle"]._memory.kept.parked
    assert idle.num_tokens == num_before - first.num_tokens
    assert all(keys.shape[1] == idle.num_tokens for keys, _ in idle.tokens)
    assert f"{report.promoted_tokens} held before" in str(report)
    assert f"shared: {report.promoted_tokens} tokens that rows held" in runner.explain()
    # and goes on from there
    report = asked(runner, {"idle": "And?"})
    assert report.kept_tokens >= first.num_tokens


def test_shared_tokens_are_held_once(model):
    sizes = []
    for at_least in (AT_LEAST, 10**6):
        with new_runner(model, byte_tokenizer(CHATML), min_shared_tokens=at_least) as runner:
            asked(runner, {"ann": 3 * TOLD})
            for i in range(4):
                runner.agents["ann"].fork(f"twin-{i}")
            asked(runner, {f"twin-{i}": f"{i}?" for i in range(4)})
            report = runner.report()
            sizes.append(held(runner))
            assert report.hot_bytes == runner.agents["ann"].prefix.num_bytes + (
                engine_of(runner).level_bytes
            )
    num_bytes = 256 * 3 * len(TOLD)
    # one level, and what ann kept in her own row
    assert sizes[1] - sizes[0] > 3 * num_bytes


@pytest.mark.smoke
def test_a_broadcast_is_computed_by_one_agent(runner):
    prefix = runner.agents["ann"].prefix
    for name in ("dee", "eve", "fay"):
        runner.agent(name, prefix, "You listen.")
    told = dict.fromkeys(("dee", "eve", "fay"), TOLD)
    num_tokens = len(runner.prompt_ids("dee", TOLD)) - prefix.stop
    report = asked(runner, told)
    assert report.once_tokens == num_tokens - 1
    assert report.shared_tokens == 2 * (num_tokens - 1)
    assert report.kept_tokens == report.promoted_tokens == 0
    assert f"{num_tokens - 1} computed by one agent for several" in str(report)
    # their answers were the same, so their histories are again
    report = asked(runner, dict.fromkeys(told, "And what did he do then, when it was over?"))
    assert report.once_tokens + report.promoted_tokens > 0
    assert report.shared_tokens > 0
    # one that has heard nothing shares nothing of it but the beginning
    runner.agent("gus", prefix, "You listen.")
    report = asked(runner, {"gus": TOLD[:40] + " Or not?"})
    assert report.shared_tokens >= 40


def test_the_same_words_after_other_histories_are_not_shared(runner):
    asked(runner, {"ann": "Tell them.", "bo": "Why is that so?", "cy": "Who?"})
    said = runner.agents["ann"].history[-1]["content"]
    report = asked(runner, dict.fromkeys(("bo", "cy"), TOLD + said))
    assert (report.shared_tokens, report.once_tokens, report.promoted_tokens) == (0, 0, 0)
    assert levels(runner) == []


def test_differing_instructions_keep_the_same_broadcast_apart(runner):
    prefix = runner.agents["ann"].prefix
    for name in ("dee", "eve"):
        runner.agent(name, prefix, f"You are {name}.")
    report = asked(runner, dict.fromkeys(("dee", "eve"), TOLD))
    assert (report.shared_tokens, levels(runner)) == (0, [])


def test_a_level_is_cut_where_newcomers_part(runner):
    prefix = runner.agents["ann"].prefix
    for name in ("dee", "eve", "fay", "gus"):
        runner.agent(name, prefix)
    asked(runner, dict.fromkeys(("dee", "eve"), TOLD + "Who was it?"))
    (whole, *_) = levels(runner)
    report = asked(runner, dict.fromkeys(("fay", "gus"), TOLD + "When did he come?"))
    assert whole not in levels(runner)
    head, *_ = levels(runner)
    assert TOLD in runner.tokenizer.decode(head.token_ids)
    for name in ("dee", "eve", "fay", "gus"):
        assert leaf_of(runner, name).chain[1] is head
    # all of what the others were told, and the rest of what one of the two has computed
    assert report.shared_tokens >= 2 * head.num_tokens
    asked(runner, dict.fromkeys(("dee", "eve", "fay", "gus"), "Go on."))


def test_submitted_one_after_another_they_share_too(runner):
    prefix = runner.agents["ann"].prefix
    names = [f"agent-{i}" for i in range(4)]
    for name in names:
        runner.agent(name, prefix)
    ids = runner.prompt_ids(names[0], TOLD)
    with computed(runner) as counts:
        turns = [runner.submit(name, TOLD, max_new_tokens=40, eos_token_id=None) for name in names]
        answers = [turn.result(60).token_ids for turn in turns]
    assert set(answers) == {alone(runner, ids, max_new_tokens=40)}
    num_new = sum(counts) - 4 * 39
    # the first one may have gone on alone, but not for long
    assert num_new < 2 * (len(ids) - prefix.stop)


def test_sampled_answers_part_and_share_what_was_before(runner):
    prefix = runner.agents["ann"].prefix
    names = [f"agent-{i}" for i in range(3)]
    for i, name in enumerate(names):
        runner.agent(name, prefix, seed=i, do_sample=True, temperature=1.5)
    for message in (TOLD, "Why?"):
        prompts = {name: runner.prompt_ids(name, message) for name in names}
        replies = runner.run(dict.fromkeys(names, message), **LONG)
        for i, (name, ids) in enumerate(prompts.items()):
            torch.manual_seed(i)
            wanted = alone(runner, ids, do_sample=True, temperature=1.5)
            assert replies[name].token_ids == wanted
    assert len({reply.token_ids for reply in replies.values()}) == 3
    # but for the last token, which each computes to have something to draw from
    assert levels(runner)[0].num_tokens >= len(TOLD) - 1


def test_what_nobody_reads_any_more_is_given_back(runner):
    start = held(runner)
    asked(runner, {"ann": TOLD})
    twin, third = (runner.agents["ann"].fork(name) for name in ("twin", "third"))
    asked(runner, {"ann": "Why?", "twin": "Who?"})
    assert engine_of(runner).level_bytes > 0
    runner.agents["ann"].reset()
    twin.close()
    # the one that was never asked reads them still
    assert engine_of(runner).level_bytes > 0
    asked(runner, {"third": "When?"})
    third.reset()
    assert engine_of(runner).level_bytes == 0
    assert held(runner) == start
    hot = runner._shares.cache.rows.hot
    assert hot.num_bytes == runner.agents["ann"].prefix.num_bytes


def test_levels_go_without_being_asked_for(runner):
    asked(runner, {"ann": TOLD})
    twin = runner.agents["ann"].fork("twin")
    asked(runner, {"ann": "Why?", "twin": "Who?"})
    runner.agents["ann"].reset()
    twin.close()
    # on the engine's thread, which has nothing else to do
    until = time.monotonic() + 20
    while levels(runner) and time.monotonic() < until:
        time.sleep(0.01)
    assert levels(runner) == []


def test_a_history_that_was_changed_leaves_what_it_shared(runner):
    asked(runner, {"ann": TOLD})
    ann, twin = runner.agents["ann"], runner.agents["ann"].fork("twin")
    asked(runner, {"ann": "Why?", "twin": "Who?"})
    ann.history[0] = {"role": "user", "content": "Another thing, not less long than the first one."}
    twin.history[0] = {"role": "user", "content": TOLD[:50]}
    asked(runner, {"ann": "Why?", "twin": "Who?"})
    ann.history.clear()
    asked(runner, {"ann": TOLD})


def test_beams_go_beside_it(runner):
    asked(runner, {"ann": TOLD})
    runner.agents["ann"].fork("twin")
    asked(runner, {"ann": "Why?", "twin": "Who?"})
    prompts = {name: runner.prompt_ids(name, "And?") for name in ("ann", "twin")}
    replies = runner.run(dict.fromkeys(prompts, "And?"), num_beams=2, **LONG)
    for name, ids in prompts.items():
        assert replies[name].token_ids == alone(runner, ids, num_beams=2)
    asked(runner, {"ann": "Why?", "twin": "Why?"})


def test_a_model_that_changed_voids_what_is_shared():
    with new_runner(llama(), byte_tokenizer(CHATML), min_shared_tokens=AT_LEAST) as runner:
        asked(runner, {"ann": TOLD})
        runner.agents["ann"].fork("twin")
        asked(runner, {"ann": "Why?", "twin": "Who?"})
        with torch.no_grad():
            runner.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        prompts = {name: runner.prompt_ids(name, "And?") for name in ("ann", "twin")}
        replies = runner.run(dict.fromkeys(prompts, "And?"), **LONG)
        for name, ids in prompts.items():
            assert replies[name].token_ids == alone(runner, ids)
        report = runner.report()
        assert report.kept_tokens == report.promoted_tokens == 0
        # their histories differ by now, but for the first turn
        assert report.once_tokens >= len(TOLD)


@pytest.mark.parametrize(
    ("num_turns", "max_cold_slots"), [(50, None), (15, 900)], ids=["all_held", "budget"]
)
def test_many_turns_among_agents_that_share_leak_nothing(model, num_turns, max_cold_slots):
    """Two teams: a team is told the same, and its members fork, part and start again."""
    names = [f"agent-{i}" for i in range(6)]
    options = {"max_cold_slots": max_cold_slots, "min_shared_tokens": AT_LEAST}
    with MultiAgentRunner(model, byte_tokenizer(CHATML), **options) as runner:
        prefix = runner.share(SHARED)
        for i, name in enumerate(names):
            runner.agent(name, prefix, f"You are of team {i % 2}.")
        start, hot, most = held(runner), prefix.num_bytes, 0
        for turn in range(num_turns):
            for parity in (0, 1):
                team = [name for i, name in enumerate(names) if i % 2 == parity]
                message = f"{turn}: {TOLD[:30]}"
                ids = runner.prompt_ids(team[0], message)
                options = {"max_new_tokens": 3, "eos_token_id": None, "seed": turn}
                replies = runner.run(dict.fromkeys(team, message), **options)
                if turn % 10 == 0:
                    wanted = alone(runner, ids, max_new_tokens=3)
                    assert replies[team[0]].token_ids == wanted
                    engine_of(runner).check_integrity()
            most = max(most, held(runner))
            if turn % 5 == 4:
                # one goes, a fork of another one comes
                runner.agents[names[turn % 6]].close()
                runner.agents[names[(turn + 2) % 6]].fork(names[turn % 6])
                runner.agents[names[(turn + 1) % 6]].reset()
            for agent in runner.agents.values():
                del agent.history[:-8]
        figures = engine_of(runner).figures
        assert figures.shared_tokens > 0
        assert (figures.num_evictions > 0) == (max_cold_slots is not None)
        if max_cold_slots is not None:
            assert figures.peak_tokens <= max_cold_slots
        for agent in list(runner.agents.values()):
            agent.close()
        gc.collect()
        assert held(runner) == start < most
        assert runner._shares.cache.rows.hot.num_bytes == hot
        engine_of(runner).check_integrity()


def test_what_is_too_short_or_does_not_pay_is_said(model):
    with new_runner(model, byte_tokenizer(CHATML)) as runner:
        asked(runner, {"ann": TOLD})
        runner.agents["ann"].fork("twin")
        report = asked(runner, {"ann": "Why?", "twin": "Who?"})
        assert report.promoted_tokens == 0
        assert "tokens are common to 2 agents, it takes 129" in runner.explain()
        asked(runner, {"ann": 2 * TOLD})
        runner.agents["ann"].fork("third")
        # a tiny model computes faster than one more launch takes
        asked(runner, {"ann": "Why?", "third": "Who?"}, max_new_tokens=20)
        assert "agents would lose" in runner.explain()
    with pytest.raises(ValueError, match="min_shared_tokens is 0; give a positive number"):
        MultiAgentRunner(model, byte_tokenizer(), min_shared_tokens=0)


def test_another_attention_shares_when_told_so():
    tokenizer = byte_tokenizer(CHATML)
    for at_least in (None, AT_LEAST):
        with new_runner(llama("sdpa"), tokenizer, min_shared_tokens=at_least) as runner:
            asked(runner, {"ann": 2 * TOLD})
            runner.agents["ann"].fork("twin")
            report = asked(runner, {"ann": "Why?", "twin": "Who?"})
            assert (report.promoted_tokens > 0) == (at_least is not None)
            slow = "not shared: under attn_implementation='sdpa'"
            assert (slow in runner.explain()) == (at_least is None)


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_shares_where_it_pays(real_model_folder):
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    model = AutoModelForCausalLM.from_pretrained(
        real_model_folder, dtype=torch.float32, attn_implementation="granikv"
    )
    told = "Margit was lowered in June 2016, Bruna in August 2018. " * 12
    questions = {
        "ann": "When was Bruna lowered?",
        "bo": "When was Margit?",
        "cy": "Which is older?",
    }
    with MultiAgentRunner(model, tokenizer) as runner:
        prefix = runner.share("Answer in one sentence, from what you are told.")
        for name in questions:
            runner.agent(name, prefix)
        for messages in ({name: told + text for name, text in questions.items()}, questions):
            prompts = {name: runner.prompt_ids(name, text) for name, text in messages.items()}
            replies = runner.run(messages, max_new_tokens=10, do_sample=False)
            for name, ids in prompts.items():
                assert replies[name].token_ids == plain_answer(model, ids, max_new_tokens=10)
            if messages is not questions:
                assert runner.report().once_tokens > 200
                assert runner.report().shared_tokens == 2 * runner.report().once_tokens
        assert "2018" in replies["ann"].text
