"""Agents of smolagents, on any threads: answered in one batch, shared prompts stored once.

pip install smolagents
python examples/smolagents_model.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

import smolagents.models as sm
from _tiny import CHAT_TEMPLATE, tiny_model_and_tokenizer
from smolagents import CodeAgent, LogLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_granikv import MultiAgentRunner

DOCUMENT = "The mill turns when the tide turns. Margit was lowered in June, Bruna in August. " * 10
QUESTIONS = ["Who was lowered in June?", "Who was lowered in August?", "What turns the mill?"]


class GranikvModel(sm.Model):
    def __init__(self, runner, **generation_kwargs):
        super().__init__(flatten_messages_as_text=True, **generation_kwargs)
        self.runner, self.turns = runner, []

    def ask(self, messages, stop_sequences, tools_to_call_from=None, **kwargs):
        told = sm.get_clean_message_list(messages, sm.tool_role_conversions, False, True)
        told = [{**message, "role": sm.MessageRole(message["role"]).value} for message in told]
        tools = [sm.get_tool_json_schema(tool) for tool in tools_to_call_from or ()]
        if told[0]["role"] == "system":
            self.runner.share(told[:1], tools=tools)
        kwargs = {"stop_strings": stop_sequences or None, **kwargs, **self.kwargs}
        self.turns.append(self.runner.chat(told, tools=tools, **kwargs))
        return self.turns[-1]

    def generate(self, messages, stop_sequences=None, **kwargs):
        reply = self.ask(messages, stop_sequences, **kwargs).result()
        text = sm.remove_content_after_stop_sequences(reply.text, stop_sequences)
        usage = sm.TokenUsage(reply.prompt_tokens, len(reply.token_ids))
        return sm.ChatMessage(sm.MessageRole.ASSISTANT, text, raw=reply, token_usage=usage)

    def generate_stream(self, messages, stop_sequences=None, **kwargs):
        turn = self.ask(messages, stop_sequences, **kwargs)
        yield from (sm.ChatMessageStreamDelta(content=piece) for piece in turn)
        usage = sm.TokenUsage(turn.prompt_tokens, len(turn.token_ids))
        yield sm.ChatMessageStreamDelta(token_usage=usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    if path := parser.parse_args().model:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="granikv")
        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        model, tokenizer = tiny_model_and_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
    with MultiAgentRunner(model, tokenizer) as runner, ThreadPoolExecutor() as pool:
        served = GranikvModel(runner, max_new_tokens=64)
        options = {"instructions": DOCUMENT, "max_steps": 2, "verbosity_level": LogLevel.OFF}
        agents = [CodeAgent([], served, **options) for _ in QUESTIONS]
        for answer in pool.map(CodeAgent.run, agents, QUESTIONS):
            print(repr(answer)[:100])
        told = sum(turn.prompt_tokens for turn in served.turns)
        computed = sum(turn.computed_tokens for turn in served.turns)
        print(f"{len(served.turns)} prompts of {told} tokens, {computed} of them computed")


if __name__ == "__main__":
    main()
