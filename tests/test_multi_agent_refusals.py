"""What a `MultiAgentRunner` refuses, and what it says then."""

import pytest
from agents import CHATML, MESSAGES, SHARED, byte_tokenizer, llama, new_runner

from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.errors import ColdPoolFullError
from hf_granikv.multi_agent import MultiAgentRunner


@pytest.fixture
def model():
    return llama()


@pytest.mark.parametrize(
    ("messages", "kwargs", "text"),
    [
        ({}, {}, "no messages"),
        ({"dee": "Why?"}, {}, "'dee' is unknown; known: ann, bo, cy"),
        ({"ann": "Why?"}, {"num_return_sequences": 2, "do_sample": True}, "model.generate"),
        ({"ann": "Why?"}, {CACHE_ARGUMENT: None}, "builds from the messages"),
        ({"ann": ""}, {}, "'ann' is blank; ask it something"),
        ({"ann": " \n"}, {}, "'ann' is blank; ask it something"),
        ({"ann": None}, {}, "'ann' is a NoneType; pass a str"),
        ({1: "Why?"}, {}, "agent 1 is unknown; known: ann, bo, cy"),
        (MESSAGES, {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens works for one agent"),
        (MESSAGES, {"assistant_model": object()}, "assistant_model works for one agent"),
    ],
    ids=[
        "empty",
        "unknown",
        "many_answers",
        "own_argument",
        "empty_message",
        "blank",
        "none",
        "no_name",
        "lookup",
        "assistant",
    ],
)
def test_what_run_cannot_serve_is_refused(model, messages, kwargs, text):
    with pytest.raises(ValueError, match=text):
        new_runner(model, byte_tokenizer()).run(messages, **kwargs)


def test_an_agent_is_asked_once(model):
    runner = new_runner(model, byte_tokenizer())
    with pytest.raises(ValueError, match="asked twice"):
        runner.run({"ann": "Why?", runner.agents["ann"]: "Who?"})


def test_names_and_prefixes_belong_to_their_runner(model):
    runner, other = new_runner(model, byte_tokenizer()), new_runner(model, byte_tokenizer())
    with pytest.raises(ValueError, match="'ann' is there already"):
        runner.agent("ann", runner.agents["bo"].prefix)
    with pytest.raises(ValueError, match="does not hold"):
        runner.agent("dee", other.agents["bo"].prefix)
    with pytest.raises(ValueError, match="'bo' is unknown"):
        runner.run({other.agents["bo"]: "Why?"})


@pytest.mark.parametrize("content", ["", " \n", [], [{"role": "system", "content": ""}]])
def test_nothing_to_share_is_refused(model, content):
    with pytest.raises(ValueError, match="nothing to share"):
        MultiAgentRunner(model, byte_tokenizer(CHATML)).share(content)


def test_messages_without_a_template_are_refused(model):
    with pytest.raises(ValueError, match="no chat template"):
        MultiAgentRunner(model, byte_tokenizer()).share([{"role": "user", "content": SHARED}])


def test_a_larger_tokenizer_is_refused(model):
    model.resize_token_embeddings(200)
    with pytest.raises(ValueError, match="knows 260 tokens, the model embeds 200"):
        MultiAgentRunner(model, byte_tokenizer())


def test_a_model_and_a_tokenizer_that_were_swapped_are_refused(model):
    with pytest.raises(ValueError, match="pass the model first, then its tokenizer"):
        MultiAgentRunner(byte_tokenizer(), model)


def test_a_prompt_that_lost_its_head_is_refused(model):
    tokenizer = byte_tokenizer(CHATML)
    runner = new_runner(model, tokenizer)
    tokenizer.chat_template = "now " + CHATML
    with pytest.raises(ValueError, match="share the text as a user message"):
        runner.run(MESSAGES)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "given a NoneType; pass a str, or a list of messages"),
        (5, "given a int; pass a str"),
        ([{"role": "user"}], "a 'content' that are one str"),
        ([{"content": "a"}], "a 'role' and"),
        (["a"], "a 'role' and"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "join the text parts"),
    ],
    ids=["none", "number", "no_content", "no_role", "texts", "parts"],
)
@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chatml"])
def test_what_is_no_text_cannot_be_shared(model, template, content, text):
    with pytest.raises(ValueError, match=text):
        MultiAgentRunner(model, byte_tokenizer(template)).share(content)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dispatch": "x"}, "dispatch 'x' is unknown; known: auto"),
        ({"max_cold_slots": -4}, "^max_cold_slots is -4; give a positive number"),
    ],
    ids=["dispatch", "slots"],
)
def test_options_are_checked_at_once(model, options, text):
    with pytest.raises(ValueError, match=text):
        MultiAgentRunner(model, byte_tokenizer(), **options)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ({}, "the budget is 8 for all; raise max_cold_slots or max_bytes"),
        ({"num_beams": 2}, "max_cold_slots=8, .* raise max_cold_slots"),
    ],
    ids=["engine", "generate"],
)
def test_full_pool_names_the_runners_argument(model, way, text):
    runner = new_runner(model, byte_tokenizer(), max_cold_slots=8)
    with pytest.raises(ColdPoolFullError, match=text):
        runner.run(MESSAGES, max_new_tokens=4, **way)
    assert runner.agents["ann"].history == []


def test_one_agent_may_look_prompts_up(model):
    plain = new_runner(model, byte_tokenizer()).run({"ann": "Why?"}, max_new_tokens=6)
    runner = new_runner(model, byte_tokenizer())
    assert runner.run({"ann": "Why?"}, max_new_tokens=6, prompt_lookup_num_tokens=2) == plain
