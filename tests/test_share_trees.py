"""Texts that begin alike: their common head is stored once, whoever comes first."""

import pytest
import torch
from agents import CHATML, byte_tokenizer, llama
from families import HYBRIDS, LOCAL
from test_shared_turns import computed

from hf_granikv import MultiAgentRunner

LONG = {"max_new_tokens": 8, "eos_token_id": None}
RULES = "The rules of the house, all of them, as they hang in the hall. "
TEXTS = {
    "kitchen": RULES + "In the kitchen nobody sings, and the pots are counted.",
    "cellar": RULES + "In the cellar lamps are lit, and doors are left open.",
    "attic": RULES[:40] + "of the attic are others; nobody knows them.",
    "yard": "There are no rules in the yard.",
}
ORDERS = [
    list(TEXTS),
    ["attic", "kitchen", "cellar", "yard"],
    ["yard", "cellar", "attic", "kitchen"],
]


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(params=[None, CHATML], ids=["plain", "chatml"])
def runner(model, request):
    with MultiAgentRunner(model, byte_tokenizer(request.param), min_shared_tokens=16) as runner:
        yield runner


def hot(runner):
    return runner._shares.cache.stats()


def check(runner, messages):
    prompts = {name: runner.prompt_ids(name, message) for name, message in messages.items()}
    replies = runner.run(messages, **LONG)
    for name, ids in prompts.items():
        ids = torch.tensor([ids])
        out = runner.model.generate(ids, use_cache=False, **LONG)
        assert replies[name].token_ids == tuple(out[0, ids.shape[1] :].tolist())
    runner._answering._engine.check_integrity()
    runner._shares.cache.check_integrity()
    return runner.report()


def num_distinct(runner):
    """Nodes of the trie over the ids of the texts, but for the one that has too little in common."""
    heads = set()
    for share in runner._shares:
        own = "yard" if "yard" in share.shared.text else ""
        heads |= {(own, *share.ids[:n]) for n in range(1, len(share.ids) + 1)}
    return len(heads)


@pytest.mark.parametrize("order", ORDERS, ids=["falling", "rising", "mixed"])
def test_the_common_head_of_texts_is_computed_and_stored_once(runner, order):
    handles = {}
    with computed(runner) as counts:
        for name in order:
            handles[name] = runner.share(TEXTS[name])
    assert sum(counts) == hot(runner).hot_tokens == num_distinct(runner)
    token_bytes = hot(runner).hot_bytes / hot(runner).hot_tokens
    assert token_bytes == 256
    # what was returned before stands for its text, and shows the same memory
    for name, handle in handles.items():
        agent = runner.agent(name, handle)
        assert agent.prefix.chain_ids.tolist() == handle.chain_ids.tolist() == agent.share.ids
        assert runner.share(TEXTS[name]) is agent.prefix
        ours = {t.untyped_storage().data_ptr() for p in agent.prefix.chain for t in p.keys}
        assert {t.untyped_storage().data_ptr() for t in handle.keys} <= ours
    report = check(runner, dict.fromkeys(TEXTS, "Why?"))
    assert report.prefix_tokens == num_distinct(runner)
    # rows of the three that begin alike read the head together
    kitchen, cellar, attic = (runner.agents[name].prefix for name in list(TEXTS)[:3])
    assert kitchen.chain[:-1] == cellar.chain[:-1]
    assert kitchen.chain[0] is attic.chain[0]


def test_a_text_that_is_the_head_of_another_one_is_there_already(runner):
    long = runner.share(TEXTS["kitchen"])
    with computed(runner) as counts:
        ids = runner._shares.of(long).ids
        head = runner._shares.add("the head", ids[:30])
    assert counts == []
    assert runner._shares.of(long).prefix.chain == (head.prefix, runner._shares.of(long).prefix)
    assert hot(runner).hot_tokens == len(ids)


def test_agents_in_a_conversation_go_on_over_what_was_cut(runner):
    handle = runner.share(TEXTS["kitchen"])
    told = "What the cook said was heard by everybody who was there. "
    for name in ("ann", "bo", "cy"):
        runner.agent(name, handle)
    check(runner, {"ann": told, "bo": told, "cy": "Who?"})
    engine = runner._answering._engine
    (level,) = engine._rows.levels
    turn = runner.submit("cy", "Why?", max_new_tokens=60, eos_token_id=None)
    ids = runner.prompt_ids("cy", "Why?")
    next(iter(turn))
    with computed(runner) as counts, engine.paused():
        num_before = sum(counts)
        runner.share(TEXTS["cellar"])
        num_computed = sum(counts) - num_before
    assert num_computed == runner._shares.of(runner.share(TEXTS["cellar"])).prefix.num_tokens
    assert level not in engine._rows.levels
    out = runner.model.generate(
        torch.tensor([ids]), max_new_tokens=60, eos_token_id=None, use_cache=False
    )
    assert turn.result(60).token_ids == tuple(out[0, len(ids) :].tolist())
    # nobody has to compute anything again
    report = check(runner, dict.fromkeys(("ann", "bo"), "And then?"))
    assert report.suffix_tokens - report.kept_tokens - report.shared_tokens < 2 * 40
    assert runner.agents["ann"]._memory.kept.parked.prefix.chain[:2] == handle_chain(runner, handle)
    for agent in list(runner.agents.values()):
        agent.close()
    assert engine.level_bytes == engine.idle_bytes == 0
    assert runner._shares.cache.rows.hot.num_tokens == hot(runner).hot_tokens


def handle_chain(runner, handle):
    return runner._shares.of(handle).prefix.chain


def test_a_turn_that_was_handed_over_before_reads_what_came_instead(runner):
    handle = runner.share(TEXTS["kitchen"])
    runner.agent("ann", handle)
    check(runner, {"ann": "Who?"})
    ids = runner.prompt_ids("ann", "Why?")
    engine = runner._answering._engine
    with engine.paused():
        turn = runner.submit("ann", "Why?", **LONG)
        runner.share(TEXTS["cellar"])
    out = runner.model.generate(torch.tensor([ids]), use_cache=False, **LONG)
    assert turn.result(60).token_ids == tuple(out[0, len(ids) :].tolist())


def test_short_heads_and_other_layers_are_left_whole(model):
    with MultiAgentRunner(model, byte_tokenizer()) as runner:
        for text in TEXTS.values():
            runner.share(text)
        assert all(share.prefix.parent is None for share in runner._shares)
    config = {"vocab_size": 260, "pad_token_id": 0}
    for family in (LOCAL["gemma2"], HYBRIDS["lfm2"]):
        model = family.model(attn_implementation="granikv", **config)
        with MultiAgentRunner(model, byte_tokenizer(), min_shared_tokens=16) as runner:
            for name, text in TEXTS.items():
                runner.agent(name, runner.share(text))
            assert all(share.prefix.parent is None for share in runner._shares)
            check(runner, dict.fromkeys(TEXTS, "Why?"))


def test_a_model_that_changed_stores_them_as_a_tree_again():
    with MultiAgentRunner(llama(), byte_tokenizer(), min_shared_tokens=16) as runner:
        handles = [runner.share(text) for text in TEXTS.values()]
        for name, handle in zip(TEXTS, handles, strict=True):
            runner.agent(name, handle)
        check(runner, dict.fromkeys(TEXTS, "Why?"))
        with torch.no_grad():
            runner.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        check(runner, {"attic": "Why?"})
        check(runner, dict.fromkeys(TEXTS, "Who?"))
        assert hot(runner).hot_tokens == num_distinct(runner)
        # nothing of the old ones is kept
        assert [runner._shares.of(handle) for handle in handles] == [None] * len(handles)
