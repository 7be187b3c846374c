"""Conversations sent as a whole: the answers of `generate`, and nothing computed twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agents import CHATML, NO_SYSTEM, SHARED, byte_tokenizer, llama

from hf_granikv import MultiAgentRunner

LONG = {"max_new_tokens": 10, "eos_token_id": None}
SYSTEM = {"role": "system", "content": SHARED}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
WITH_TOOLS = (
    "{% if tools %}{{ '[tools]' + tools | map(attribute='function') | map(attribute='name') | join(',') "
    "+ '\n' }}{% endif %}" + CHATML
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture
def runner(model):
    with MultiAgentRunner(model, byte_tokenizer(CHATML)) as runner:
        yield runner


def ids_of(runner, messages, tools=None):
    text = runner.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return runner.tokenizer(text, add_special_tokens=False)["input_ids"]


def generated(runner, ids, **options):
    out = runner.model.generate(torch.tensor([ids]), **{**LONG, **options})
    return tuple(out[0, len(ids) :].tolist())


def asked(runner, messages, **options):
    """Asks and checks the answer; gives the turn."""
    turn = runner.chat(messages, **{**LONG, **options})
    assert turn.result(60).token_ids == generated(runner, ids_of(runner, messages))
    return turn


def figures(runner):
    return runner._answering._engine.figures


def test_the_head_that_is_shared_is_not_computed(runner):
    prefix = runner.share([SYSTEM])
    for text in ("Why?", "Who keeps the log?"):
        turn = asked(runner, [SYSTEM, user(text)])
        prompt = ids_of(runner, [SYSTEM, user(text)])
        assert turn.computed_tokens + turn.kept_tokens == len(prompt) - prefix.stop
        assert turn.prompt_tokens == len(prompt)
    assert asked(runner, [user("Why?")]).kept_tokens == 0


def test_the_longest_text_is_read(runner):
    runner.share([SYSTEM])
    longer = [SYSTEM, user("What is said of the pumps?"), assistant("Nothing.")]
    prefix = runner.share(longer)
    turn = asked(runner, [*longer, user("Of the mill?")])
    prompt = ids_of(runner, [*longer, user("Of the mill?")])
    assert turn.computed_tokens == len(prompt) - prefix.stop


def test_a_conversation_goes_on_from_what_is_held(runner):
    shared = runner.share([SYSTEM]).stop
    messages = [SYSTEM, user("When is high water?")]
    for text in ("And low water?", "Why?", "Who says so?"):
        before = ids_of(runner, messages)
        reply = asked(runner, messages).result(60)
        messages += [assistant(reply.text), user(text)]
        turn = asked(runner, messages)
        wanted = ids_of(runner, messages)
        # all of the prompt before, and of the answer what is tokenized as it was generated
        assert turn.kept_tokens >= len(before) - shared
        assert turn.kept_tokens + turn.computed_tokens == len(wanted) - shared
        messages += [assistant(turn.result(60).text), user("Go on.")]
    assert len(runner._answering._conversations) == 1


def test_conversations_that_part_do_not_lose_what_they_have(runner):
    """Both start alike, beyond what is shared; the second one starts from a copy of the first."""
    opening = [user("It is about the tide, and the mill, and Margit in June. " * 2)]
    first = [*opening, assistant("Yes."), user("What of the mill?")]
    second = [*opening, assistant("No."), user("What of Margit?")]
    asked(runner, first)
    turn = asked(runner, second)
    assert turn.kept_tokens > len(ids_of(runner, opening)) - 12
    for messages in (first, second):
        messages += [assistant("So it is."), user("And then?")]
        before = ids_of(runner, messages[:-2])
        assert asked(runner, messages).kept_tokens == len(before)
    assert len(runner._answering._conversations) == 2


def test_what_has_hardly_anything_in_common_is_not_copied(runner):
    asked(runner, [user("It is about the tide, and the mill, and Margit in June. " * 8)])
    assert asked(runner, [user("Why?")]).kept_tokens == 0


def test_many_threads_ask_at_a_time(runner):
    runner.share([SYSTEM])

    def client(i):
        messages = [SYSTEM, user(f"Question {i}, and why?")]
        texts = []
        for text in ("And then?", "Who says so?"):
            turn = runner.chat(messages, **LONG)
            texts.append((list(messages), turn.result(60)))
            messages += [assistant(turn.result(60).text), user(text)]
        return texts

    with ThreadPoolExecutor(6) as pool:
        for texts in pool.map(client, range(6)):
            for messages, reply in texts:
                assert reply.token_ids == generated(runner, ids_of(runner, messages))
    assert figures(runner).kept_tokens > 0
    assert len(runner._answering._conversations) == 6


def test_a_prompt_may_be_asked_again_while_it_is_answered(runner):
    messages = [SYSTEM, user("Why?")]
    options = {**LONG, "do_sample": True, "temperature": 1.5}
    turns = [runner.chat(messages, seed=seed, name=str(seed), **options) for seed in range(3)]
    for seed, turn in enumerate(turns):
        torch.manual_seed(seed)
        wanted = generated(runner, ids_of(runner, messages), do_sample=True, temperature=1.5)
        assert (turn.result(60).token_ids, turn.name) == (wanted, str(seed))
    assert len({turn.result(60).token_ids for turn in turns}) == 3


def test_two_that_continue_a_conversation_at_a_time_both_have_it(runner):
    opening = [SYSTEM, user("When is high water?")]
    asked(runner, opening)
    ends = [
        [*opening, assistant("At noon."), user(text)] for text in ("Why?", "Sure?", "And then?")
    ]
    with runner._answering._engine.gathering():
        turns = [runner.chat(messages, **LONG) for messages in ends]
    for turn, messages in zip(turns, ends, strict=True):
        assert turn.result(60).token_ids == generated(runner, ids_of(runner, messages))
        assert turn.kept_tokens >= len(ids_of(runner, opening))
    assert len(runner._answering._conversations) == 3


def test_the_conversations_asked_longest_ago_are_forgotten(model):
    with MultiAgentRunner(model, byte_tokenizer(CHATML), max_rows=2) as runner:
        texts = ["When is high water at the mill?", "Who was lowered in June?", "Why?"]
        for text in texts:
            asked(runner, [user(text)])
        assert len(runner._answering._conversations) == 2
        again = [user(texts[0]), assistant("At noon."), user("Sure?")]
        assert asked(runner, again).kept_tokens < len(ids_of(runner, again[:1]))
        engine = runner._answering._engine
        assert engine.idle_bytes > 0
    assert engine.idle_bytes == 0


def test_pieces_come_as_they_are_generated(runner):
    turn = runner.chat([user("Why?")], **LONG)
    assert "".join(turn) == turn.result(60).text
    turn = runner.chat([user("Why?")], max_new_tokens=500, eos_token_id=None)
    next(iter(turn))
    turn.cancel()
    assert turn.result(60).finish_reason == "cancelled"


def test_tools_are_told_to_the_template(model):
    with MultiAgentRunner(model, byte_tokenizer(WITH_TOOLS)) as runner:
        prefix = runner.share([SYSTEM], tools=TOOLS)
        messages = [SYSTEM, user("Why?")]
        turn = runner.chat(messages, tools=TOOLS, **LONG)
        ids = ids_of(runner, messages, TOOLS)
        assert turn.result(60).token_ids == generated(runner, ids)
        assert ids != ids_of(runner, messages)
        assert turn.computed_tokens == len(ids) - prefix.stop
        # without them it is another text
        assert asked(runner, messages).computed_tokens == len(ids_of(runner, messages))
        # and agents of the runner that read it are told of them as well
        runner.agent("ann", prefix)
        assert runner.prompt_ids("ann", "Why?") == ids
        assert runner.run({"ann": "Why?"}, **LONG)["ann"].token_ids == generated(runner, ids)


def test_without_a_template_contents_are_joined(model):
    with MultiAgentRunner(model, byte_tokenizer()) as runner:
        prefix = runner.share(SHARED)
        for head, computed in ((SHARED, 4), ("Other. ", 11)):
            turn = runner.chat([user(head), user("Why?")], **LONG)
            ids = runner.tokenizer(head + "Why?")["input_ids"]
            assert turn.result(60).token_ids == generated(runner, ids)
            assert turn.computed_tokens == computed
        assert prefix.stop == len(runner.tokenizer(SHARED)["input_ids"])
        # what is exactly the shared text has no token to go on with after it
        turn = runner.chat([user(SHARED)], **LONG)
        assert turn.result(60).token_ids == generated(runner, prefix.chain_ids.tolist())
        assert turn.computed_tokens == prefix.stop


def test_a_model_that_changed_computes_everything_anew():
    with MultiAgentRunner(llama(), byte_tokenizer(CHATML)) as runner:
        runner.share([SYSTEM])
        messages = [SYSTEM, user("Why?")]
        asked(runner, messages)
        with torch.no_grad():
            runner.model.lm_head.weight.add_(0.1)
            runner.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        messages += [assistant("So."), user("Who?")]
        assert asked(runner, messages).kept_tokens == 0
        assert len(runner._answering._conversations) == 1


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ("Why?", {}, "chat was given a str; pass a list of messages"),
        ([{"role": "user"}], {}, "chat was given the message"),
        ([user(" ")], {}, "nothing to answer"),
        ([], {}, "nothing to answer"),
        ([user("Why?")], {"num_beams": 2}, "num_beams=2"),
        ([user("Why?")], {"input_ids": [1]}, "which it builds from the messages"),
    ],
)
def test_what_cannot_be_answered_is_refused(runner, messages, options, text):
    with pytest.raises(ValueError, match=text):
        runner.chat(messages, **options)
    assert len(runner._answering._conversations) == 0


def test_what_the_template_refuses_is_refused_with_its_words(model):
    with (
        MultiAgentRunner(model, byte_tokenizer(NO_SYSTEM)) as runner,
        pytest.raises(
            ValueError, match=r"refuses messages of system, user \(roles must alternate\)"
        ),
    ):
        runner.chat([SYSTEM, user("Why?")])


def test_tools_need_a_template(model):
    with MultiAgentRunner(model, byte_tokenizer()) as runner:
        for call in (runner.share, lambda text, tools: runner.chat([user(text)], tools=tools)):
            with pytest.raises(
                ValueError, match=r"1 tools, but the tokenizer has no chat template"
            ):
                call(SHARED, tools=TOOLS)
