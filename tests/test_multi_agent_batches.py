"""What an agent answers does not depend on who is asked beside it."""

import pytest
from agents import SHARED, byte_tokenizer, llama
from families import HYBRIDS
from padded_rows import CASES, COUNTED, Batch, ended
from prompts import left_padded, new_tokens
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_granikv.multi_agent import MultiAgentRunner

# the shortest first
MESSAGES = {"bo": "Why?", "ann": "When is high water?", "cy": "Who keeps the log of the pumps?"}


def new_runner(model: PreTrainedModel, end: int | None = None) -> MultiAgentRunner:
    tokenizer = byte_tokenizer()
    if end is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
        assert tokenizer.pad_token_id == end
    runner = MultiAgentRunner(model, tokenizer)
    prefix = runner.share(SHARED)
    for name in MESSAGES:
        runner.agent(name, prefix)
    return runner


def prompts(model: PreTrainedModel) -> list[list[int]]:
    runner = new_runner(model)
    return [runner.prompt_ids(name, message) for name, message in MESSAGES.items()]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3, "length_penalty": 0.0}], ids=["greedy", "beams"]
)
@pytest.mark.parametrize("name", [name for name in COUNTED if CASES[name].end is None])
def test_agents_answer_as_alone_though_pads_are_end_tokens(name: str, way: dict) -> None:
    model = llama()
    batch = Batch(model, name, prompts(model), **way)
    options = {"eos_token_id": batch.end, "max_new_tokens": 8, **batch.options()}
    replies = new_runner(model, batch.end).run(MESSAGES, **options)
    for reply, row, alone in zip(replies.values(), batch.rows, batch.alone, strict=True):
        want = ended(alone.sequences[0, len(row) :].tolist(), batch.end)
        assert list(reply.token_ids) == want


# ---- models that would read pads as tokens


class AsTheyAre(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


# a processor of the caller's own may look at all rows, so generate runs it
@pytest.mark.parametrize("num_batches", [1, 3], ids=["engine", "generate"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_agents_of_a_hybrid_answer_as_alone(family: str, num_batches: int) -> None:
    way = {"logits_processor": LogitsProcessorList([AsTheyAre()])} if num_batches > 1 else {}
    model = HYBRIDS[family].model(vocab_size=260, attn_implementation="granikv")
    messages = {**MESSAGES, "dee": "Who?", "eve": "What keeps the dog of the bumps"}
    runner = new_runner(model)
    for name in ("dee", "eve"):
        runner.agent(name, runner.agents["bo"].prefix)
    asked = {name: runner.prompt_ids(name, message) for name, message in messages.items()}
    replies = runner.run(messages, max_new_tokens=6, **way)
    assert list(replies) == list(messages)
    for name, ids in asked.items():
        want = new_tokens(model, left_padded([ids]), num_new=6, use_cache=False)[0]
        assert list(replies[name].token_ids) == want
    report = runner.report()
    assert (report.num_agents, report.prefix_tokens) == (5, len(SHARED))
    # a step for each token of an answer but the first, in each batch
    assert (report.generated_tokens, report.decode_steps) == (5 * 6, num_batches * 5)
    assert report.hot_bytes == runner.agents["bo"].prefix.num_bytes


def test_other_models_take_all_agents_at_once() -> None:
    runner = new_runner(llama())
    runner.run(MESSAGES, max_new_tokens=6, eos_token_id=-1)
    assert runner.report().decode_steps == 5
