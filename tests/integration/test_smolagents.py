"""Agents of smolagents over the model class of the example: their answers, and what is not computed."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from agents import CHATML, byte_tokenizer, llama
from transformers import LogitsProcessor

from hf_granikv import MultiAgentRunner

smolagents = pytest.importorskip("smolagents")
EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENT = "The mill turns when the tide turns. Margit was lowered in June. "
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": DOCUMENT}]},
    {"role": "user", "content": [{"type": "text", "text": "Who was lowered?"}]},
]
TOLD = [{**message, "content": message["content"][0]["text"]} for message in MESSAGES]
LONG = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module")
def model_class():
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "smolagents_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module.GranikvModel


@pytest.fixture
def runner():
    with MultiAgentRunner(llama(max_position_embeddings=20000), byte_tokenizer(CHATML)) as runner:
        yield runner


def generated(runner, messages, **options):
    text = runner.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = runner.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = runner.model.generate(ids, **options)
    return runner.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def test_a_message_is_what_generate_gives(runner, model_class):
    model = model_class(runner, **LONG)
    message = model.generate([smolagents.ChatMessage.from_dict(dict(m)) for m in MESSAGES])
    text, num_prompt = generated(runner, TOLD, **LONG)
    assert (message.content, message.role, message.tool_calls) == (text, "assistant", None)
    assert message.token_usage.input_tokens == num_prompt
    assert message.token_usage.output_tokens == 12
    deltas = list(model.generate_stream(MESSAGES))
    assert "".join(delta.content or "" for delta in deltas) == text
    assert deltas[-1].token_usage == message.token_usage


def test_a_schema_for_the_answer_is_refused(runner, model_class):
    with pytest.raises(ValueError, match="response_format"):
        model_class(runner).generate(MESSAGES, response_format={"type": "json_schema"})


class Script(LogitsProcessor):
    """Lets a model that knows nothing say what an agent understands."""

    def __init__(self, tokenizer, lines):
        self.lines = {key: tokenizer(text)["input_ids"] for key, text in lines.items()}
        self.tokenizer = tokenizer
        self.marker = tokenizer("<|im_start|>assistant\n")["input_ids"]

    def __call__(self, input_ids, scores):
        ids, size = input_ids[0].tolist(), len(self.marker)
        start = next(i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == self.marker)
        told, said = self.tokenizer.decode(ids[:start]), len(ids) - start - size
        line = next(line for key, line in self.lines.items() if key in told)
        forced = torch.full_like(scores, -torch.inf)
        forced[0, line[said] if said < len(line) else self.tokenizer.eos_token_id] = 0
        return forced


def test_stop_sequences_end_an_answer_and_are_cut_off(runner, model_class):
    script = Script(runner.tokenizer, {"lowered": "It was her. Observation: none. And so on."})
    model = model_class(runner, max_new_tokens=60, logits_processor=[script])
    message = model.generate(MESSAGES, stop_sequences=["Observation:", "</code>"])
    assert message.content == "It was her. "
    assert message.token_usage.output_tokens == len("It was her. Observation:")


# the latest of these that has been said decides what comes next
CODE = {
    "about 42": "Thought: I add up.\n<code>\nprint('so far', 40 + 2)\nfinal_answer(40 + 2)\n</code>",
    "so far 7": "Thought: I know.\n<code>\nfinal_answer('seven')\n</code>",
    "about 7": "Thought: I look.\n<code>\nprint('so far', 3 + 4)\n</code>",
}


def test_code_agents_on_several_threads_share_their_prompt(runner, model_class):
    model = model_class(
        runner, max_new_tokens=120, logits_processor=[Script(runner.tokenizer, CODE)]
    )
    quiet = {"verbosity_level": smolagents.LogLevel.OFF, "instructions": DOCUMENT, "max_steps": 3}
    tasks = ["It is about 42.", "It is about 7.", "It is about 7, once more."]
    agents = [smolagents.CodeAgent([], model, **quiet) for _ in tasks]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(smolagents.CodeAgent.run, agents, tasks))
    assert answers == [42, "seven", "seven"]
    # one step, and twice two
    assert len(model.turns) == 5
    shared = next(iter(runner._shares)).prefix
    assert len(runner._shares) == 1
    told = sum(turn.prompt_tokens for turn in model.turns)
    assert shared.stop > 0.9 * told / 5
    computed = sum(turn.computed_tokens for turn in model.turns)
    kept = sum(turn.kept_tokens for turn in model.turns)
    assert computed + kept == told - 5 * shared.stop
    # the second steps go on from the first ones
    assert all(turn.kept_tokens > 0 for turn in model.turns if turn.prompt_tokens > 1.01 * told / 5)
    usages = [agent.monitor.get_total_token_counts() for agent in agents]
    assert sum(usage.input_tokens for usage in usages) == told


def test_a_streaming_agent(runner, model_class):
    model = model_class(
        runner, max_new_tokens=120, logits_processor=[Script(runner.tokenizer, CODE)]
    )
    agent = smolagents.CodeAgent(
        [], model, stream_outputs=True, verbosity_level=smolagents.LogLevel.OFF, max_steps=3
    )
    assert agent.run("It is about 7.") == "seven"


def test_tools_of_a_tool_calling_agent_are_called(runner, model_class):
    @smolagents.tool
    def lowered(month: str) -> str:
        """Says who was lowered.

        Args:
            month: The month.
        """
        return {"June": "Margit"}[month]

    calls = {
        "Margit": '{"name": "final_answer", "arguments": {"answer": "It was her."}}',
        "Who": '{"name": "lowered", "arguments": {"month": "June"}}',
    }
    model = model_class(
        runner, max_new_tokens=120, logits_processor=[Script(runner.tokenizer, calls)]
    )
    agent = smolagents.ToolCallingAgent(
        [lowered], model, verbosity_level=smolagents.LogLevel.OFF, max_steps=3
    )
    assert agent.run("Who was lowered in June?") == "It was her."
    assert len(model.turns) == 2
    assert model.turns[1].kept_tokens > 0
