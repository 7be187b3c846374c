import io

import pytest
import torch
from agents import (
    CHATML,
    LAST_USER_SYSTEM,
    MESSAGES,
    NO_SYSTEM,
    SHARED,
    byte_tokenizer,
    llama,
    new_runner,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteriaList,
)
from transformers.generation import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_granikv import timing
from hf_granikv.multi_agent import MultiAgentRunner


@pytest.fixture(params=["granikv", "sdpa"])
def model(request):
    return llama(request.param)


@pytest.fixture(params=[None, CHATML, NO_SYSTEM], ids=["plain", "chatml", "no_system"])
def tokenizer(request):
    return byte_tokenizer(request.param)


def plain_ids(tokenizer, shared, conversation):
    """The ids of a prompt, written down a second time from what the runner's docstring says."""
    if tokenizer.chat_template is None:
        head, text = shared, shared + "".join(m["content"] for m in conversation)
    elif tokenizer.chat_template == CHATML:
        opening = [{"role": "system", "content": shared}]
        head = tokenizer.apply_chat_template(opening, tokenize=False)
        text = tokenizer.apply_chat_template(
            opening + conversation, tokenize=False, add_generation_prompt=True
        )
    else:
        head = f"<bos>[user]{shared}\n\n"
        first, *rest = conversation
        opening = {"role": "user", "content": f"{shared}\n\n{first['content']}"}
        text = tokenizer.apply_chat_template([opening, *rest], tokenize=False)
    assert text.startswith(head)
    rest = tokenizer(text[len(head) :], add_special_tokens=False)["input_ids"]
    return tokenizer(head, add_special_tokens=False)["input_ids"] + rest


def plain_answer(model, ids, **kwargs):
    kwargs = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **kwargs)
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.smoke
def test_replies_equal_plain_generate_for_each_agent_alone(model, tokenizer):
    runner = new_runner(model, tokenizer)
    replies = runner.run(MESSAGES, max_new_tokens=12, do_sample=False)
    assert list(replies) == list(MESSAGES)
    for name, message in MESSAGES.items():
        ids = plain_ids(tokenizer, SHARED, [{"role": "user", "content": message}])
        assert replies[name].token_ids == plain_answer(model, ids)
        assert replies[name].prompt_tokens == len(ids)
        assert replies[name].text == tokenizer.decode(
            replies[name].token_ids, skip_special_tokens=True
        )


@pytest.mark.smoke
def test_second_turn_reads_the_history(model, tokenizer):
    runner = new_runner(model, tokenizer)
    first = runner.run(MESSAGES, max_new_tokens=12, do_sample=False)
    second = runner.run({"bo": "And then?", runner.agents["cy"]: "Since when?"}, max_new_tokens=12)
    for name, message in {"bo": "And then?", "cy": "Since when?"}.items():
        conversation = [
            {"role": "user", "content": MESSAGES[name]},
            {"role": "assistant", "content": first[name].text},
            {"role": "user", "content": message},
        ]
        assert second[name].token_ids == plain_answer(
            model, plain_ids(tokenizer, SHARED, conversation)
        )
        assert [m["content"] for m in runner.agents[name].history[:3]] == [
            m["content"] for m in conversation
        ]
    assert len(runner.agents["ann"].history) == 2


def test_instructions_stand_before_the_first_message(model, tokenizer):
    runner = MultiAgentRunner(model, tokenizer)
    runner.agent("ann", runner.share(SHARED), "Be brief.")
    reply = runner.run({"ann": "Why?"}, max_new_tokens=12)["ann"]
    joined = "Be brief.Why?" if tokenizer.chat_template is None else "Be brief.\n\nWhy?"
    ids = plain_ids(tokenizer, SHARED, [{"role": "user", "content": joined}])
    assert reply.token_ids == plain_answer(model, ids)


def test_each_prefix_is_its_own_batch(model, tokenizer):
    runner = MultiAgentRunner(model, tokenizer)
    texts = {"ann": SHARED, "bo": "Another log, much shorter."}
    for name, text in texts.items():
        runner.agent(name, runner.share(text))
    replies = runner.run({"bo": "Why?", "ann": "Who?"}, max_new_tokens=12)
    for name, message in {"bo": "Why?", "ann": "Who?"}.items():
        ids = plain_ids(tokenizer, texts[name], [{"role": "user", "content": message}])
        assert replies[name].token_ids == plain_answer(model, ids)
    assert runner.report().num_agents == 2


def test_beams_equal_plain_beams_and_leave_times_unknown(model, tokenizer):
    runner = new_runner(model, tokenizer)
    replies = runner.run(MESSAGES, max_new_tokens=8, num_beams=3)
    for name, message in MESSAGES.items():
        ids = plain_ids(tokenizer, SHARED, [{"role": "user", "content": message}])
        assert replies[name].token_ids == plain_answer(model, ids, max_new_tokens=8, num_beams=3)
    assert runner.report().decode_s is None
    assert "not separated" in str(runner.report())


def test_shared_messages_stand_first(model):
    tokenizer = byte_tokenizer(CHATML)
    runner = MultiAgentRunner(model, tokenizer)
    messages = [
        {"role": "system", "content": "Answer from the log."},
        {"role": "user", "content": SHARED},
    ]
    prefix = runner.share(messages)
    runner.agent("ann", prefix)
    reply = runner.run({"ann": "Why?"}, max_new_tokens=12)["ann"]
    messages[1]["content"] += "\n\nWhy?"
    ids = tokenizer(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )["input_ids"]
    assert reply.token_ids == plain_answer(model, ids)
    assert prefix.token_ids.flatten().tolist() == ids[: prefix.num_tokens]


def test_text_leads_the_first_user_message_where_a_system_message_would_move(model):
    tokenizer = byte_tokenizer(LAST_USER_SYSTEM)
    runner = MultiAgentRunner(model, tokenizer)
    prefix = runner.share(SHARED)
    assert tokenizer.decode(prefix.token_ids.flatten()) == f"[user]{SHARED}\n\n"
    runner.agent("ann", prefix)
    for message in ("Why?", "Who?"):
        runner.run({"ann": message}, max_new_tokens=4)


def test_plain_text_gets_the_opening_token_and_no_closing_one(model):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    ids = MultiAgentRunner(model, tokenizer).share("tide").token_ids.flatten().tolist()
    assert ids == [1, *tokenizer("tide", add_special_tokens=False)["input_ids"]]


def test_answer_ends_at_the_end_token(model):
    tokenizer = byte_tokenizer()
    runner = new_runner(model, tokenizer)
    full = runner.run({"ann": "Why?"}, max_new_tokens=12)["ann"]
    assert full.finish_reason == "length"
    runner = new_runner(model, tokenizer)
    end = full.token_ids[4]
    stopped = runner.run({"ann": "Why?"}, max_new_tokens=12, eos_token_id=[2, end])["ann"]
    assert stopped.token_ids == full.token_ids[: full.token_ids.index(end) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_a_row_that_a_criterion_stopped_carries_no_pads(model, pad_token):
    class FirstRowAfterOne(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            done = torch.zeros(len(input_ids), dtype=torch.bool)
            done[0] = True
            return done

    runner = new_runner(model, byte_tokenizer(pad_token=pad_token))
    replies = runner.run(
        MESSAGES, max_new_tokens=6, stopping_criteria=StoppingCriteriaList([FirstRowAfterOne()])
    )
    assert [len(reply.token_ids) for reply in replies.values()] == [1, 6, 6]
    assert [r.finish_reason for r in replies.values()] == ["stop", "length", "length"]
    assert runner.report().generated_tokens == 13


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_a_beam_that_a_criterion_stopped_carries_no_pads(model, pad_token):
    """Beam search fills with the end token where the pad id is 0."""

    class UnpaddedRow(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, 0] > 2

    runner = new_runner(model, byte_tokenizer(pad_token=pad_token))
    criteria = StoppingCriteriaList([UnpaddedRow()])
    options = {"num_beams": 2, "early_stopping": True, "max_new_tokens": 6}
    replies = runner.run(MESSAGES, stopping_criteria=criteria, **options)
    assert [len(reply.token_ids) for reply in replies.values()] == [6, 6, 1]
    assert 2 not in replies["cy"].token_ids


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_stop_strings_in_a_config_end_an_answer(model, pad_token):
    tokenizer = byte_tokenizer(pad_token=pad_token)
    options = {"max_new_tokens": 8, "do_sample": False}
    full = new_runner(model, tokenizer).run(MESSAGES, **options)
    # one row stops at its third token, beside rows that go on
    char = full["ann"].text[2]
    config = GenerationConfig(stop_strings=[char], **options)
    replies = new_runner(model, tokenizer).run(MESSAGES, generation_config=config)
    assert replies["ann"].text.endswith(char)
    assert replies["ann"].finish_reason == "stop"
    for reply in replies.values():
        assert tokenizer.pad_token_id not in reply.token_ids
        assert 2 not in reply.token_ids


def test_an_end_token_may_come_as_a_tensor(model):
    full = new_runner(model, byte_tokenizer()).run({"ann": "Why?"}, max_new_tokens=12)["ann"]
    end = full.token_ids[4]
    reply = new_runner(model, byte_tokenizer()).run(
        {"ann": "Why?"}, max_new_tokens=12, eos_token_id=torch.tensor([2, end])
    )["ann"]
    assert reply.token_ids == full.token_ids[: full.token_ids.index(end) + 1]


def test_no_end_token_means_none(model):
    """The model's own end token came back for the cut, though generate had run past it."""
    runner = new_runner(model, byte_tokenizer())
    model.generation_config.eos_token_id = runner.run({"ann": "Why?"}, max_new_tokens=6)[
        "ann"
    ].token_ids[2]
    runner = new_runner(model, byte_tokenizer())
    assert len(runner.run({"ann": "Why?"}, max_new_tokens=6)["ann"].token_ids) < 6
    runner = new_runner(model, byte_tokenizer())
    reply = runner.run({"ann": "Why?"}, max_new_tokens=6, eos_token_id=None)["ann"]
    assert len(reply.token_ids) == 6
    assert reply.finish_reason == "length"


def test_share_shows_the_layers_it_has_done(model, monkeypatch):
    bars = []

    class Bar(timing.tqdm):
        def __init__(self, *args, **kwargs):
            assert kwargs["disable"] is None
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr(timing, "tqdm", Bar)
    MultiAgentRunner(model, byte_tokenizer()).share(SHARED)
    assert [(bar.desc, bar.n, bar.total) for bar in bars] == [("granikv prefix of 42 tokens", 2, 2)]
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_generation_config_replaces_the_default_length(model):
    runner = new_runner(model, byte_tokenizer())
    config = GenerationConfig(max_new_tokens=3, eos_token_id=-1)
    assert len(runner.run({"bo": "Why?"}, generation_config=config)["bo"].token_ids) == 3


def test_streamer_hears_the_prompt_and_every_step(model):
    class Steps(BaseStreamer):
        def __init__(self):
            self.heard = []

        def put(self, value):
            self.heard.append(tuple(value.shape))

        def end(self):
            self.heard.append("end")

    steps = Steps()
    runner = new_runner(model, byte_tokenizer())
    replies = runner.run(MESSAGES, max_new_tokens=4, streamer=steps, eos_token_id=-1)
    width = max(reply.prompt_tokens for reply in replies.values())
    assert steps.heard == [(3, width), (3,), (3,), (3,), (3,), "end"]


def test_report_counts_tokens_steps_and_bytes(model):
    runner = new_runner(model, byte_tokenizer())
    assert runner.report().generated_tokens == 0
    replies = runner.run(MESSAGES, max_new_tokens=5, eos_token_id=-1)
    report = runner.report()
    assert report.prefix_tokens == len(SHARED)
    assert report.suffix_tokens == sum(len(message) for message in MESSAGES.values())
    assert report.generated_tokens == sum(len(reply.token_ids) for reply in replies.values()) == 15
    assert (report.decode_steps, report.decoded_tokens) == (4, 12)
    assert report.suffix_prefill_s + report.decode_s <= report.generate_s
    assert report.s_per_step == pytest.approx(report.decode_s / 4)
    assert report.dense_ratio == report.dense_equivalent_bytes / report.held_bytes
    for word in ("prefix 42 (computed once)", "generated 15", "4 steps", "dense"):
        assert word in str(report)


def test_prefix_is_computed_once(model):
    seen = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(args[0].numel())
    )
    runner = new_runner(model, byte_tokenizer())
    runner.run(MESSAGES, max_new_tokens=4, eos_token_id=-1)
    suffixes = sum(map(len, MESSAGES.values()))
    assert sum(seen) == len(SHARED) + suffixes + 3 * 3


def test_turns_of_any_size_read_one_prefix(model):
    """Three requests, then five, then one; each as alone, and the prefix stays where it lies."""
    runner = new_runner(model, byte_tokenizer())
    prefix = runner.agents["ann"].prefix
    places = [tensor.data_ptr() for tensor in (*prefix.keys, *prefix.values)]
    for size in (3, 5, 1):
        names = [f"{size}-{i}" for i in range(size)]
        asked = {runner.agent(name, prefix): "Why? " * (i + 1) for i, name in enumerate(names)}
        prompts = [runner.prompt_ids(agent, message) for agent, message in asked.items()]
        replies = runner.run(asked, max_new_tokens=5, eos_token_id=-1)
        for name, ids in zip(names, prompts, strict=True):
            alone = model.generate(
                torch.tensor([ids]), max_new_tokens=5, eos_token_id=-1, use_cache=False
            )
            assert list(replies[name].token_ids) == alone[0, len(ids) :].tolist()
        assert [tensor.data_ptr() for tensor in (*prefix.keys, *prefix.values)] == places


def test_a_failing_turn_changes_no_history(model):
    class Broken(BaseStreamer):
        def put(self, value):
            if value.ndim == 1:
                raise RuntimeError("the caller's screen is gone")

    runner = new_runner(model, byte_tokenizer())
    first = runner.run(MESSAGES, max_new_tokens=4)
    history, report = list(runner.agents["ann"].history), runner.report()
    with pytest.raises(RuntimeError, match="screen"):
        runner.run(MESSAGES, max_new_tokens=4, streamer=Broken())
    assert runner.agents["ann"].history == history
    assert runner.report() is report
    fresh = new_runner(model, byte_tokenizer())
    assert fresh.run(MESSAGES, max_new_tokens=4) == first
    assert runner.run(MESSAGES, max_new_tokens=4) == fresh.run(MESSAGES, max_new_tokens=4)


@pytest.mark.real_model
@pytest.mark.slow
def test_real_model_answers_as_alone(real_model_folder):
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    model = AutoModelForCausalLM.from_pretrained(
        real_model_folder, dtype=torch.float32, attn_implementation="granikv"
    )
    runner = MultiAgentRunner(model, tokenizer)
    prefix = runner.share("Margit was lowered in June 2016, Bruna in August 2018. " * 20)
    questions = {"ann": "When was Bruna lowered?", "bo": "What is older, Margit or Bruna? Say why."}
    for name in questions:
        runner.agent(name, prefix)
    prompts = {name: runner.prompt_ids(name, question) for name, question in questions.items()}
    replies = runner.run(questions, max_new_tokens=24, do_sample=False)
    model.set_attn_implementation("sdpa")
    for name, ids in prompts.items():
        assert replies[name].token_ids == plain_answer(model, ids, max_new_tokens=24)
    assert "2018" in replies["ann"].text
