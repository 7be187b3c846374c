"""Every way people call a model for text, and what each prompt of a batch gets from it.

A mode gives the same for a prompt in a batch and alone: random numbers too, see `draws_by_prompt`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from prompts import SUFFIX_LENGTHS, suffixes, tokens
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

Inputs = dict[str, Tensor]


class Result(NamedTuple):
    """What one prompt gets: the new tokens of each of its sequences, and numbers by name and step."""

    sequences: list[list[int]]
    numbers: dict[str, list[Tensor]]


Call = Callable[..., list[Result]]


@contextmanager
def draws_by_prompt(num_prompts: int) -> Iterator[None]:
    """Every prompt of a batch draws what it would draw alone.

    As `torch.multinomial` on a CPU, which takes the largest of probability over exponential noise,
    but with the same noise for every prompt: it differs by step and by sequence of a prompt.
    """
    steps = count()

    def multinomial(probs: Tensor, num_samples: int, **_: Any) -> Tensor:
        generator = torch.Generator().manual_seed(next(steps))
        noise = torch.empty(len(probs) // num_prompts, probs.shape[1])
        noise.exponential_(generator=generator)
        return (probs / noise.repeat(num_prompts, 1)).topk(num_samples).indices

    with patch.object(torch, "multinomial", multinomial):
        yield


def generated(model: PreTrainedModel, inputs: Inputs, num_new: int, **options: Any) -> list[Result]:
    """Calls `generate`, and takes apart what it gives: tokens, scores, logits, scores of beams."""
    num_prompts = len(inputs["attention_mask"])
    returned = ("return_dict_in_generate", "output_scores", "output_logits")
    with draws_by_prompt(num_prompts):
        out = model.generate(
            **inputs,
            **dict.fromkeys(returned, True),
            **{"max_new_tokens": num_new, "do_sample": False, **options},
        )
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    by_prompt = lambda t: t.unflatten(0, (num_prompts, -1))  # noqa: E731
    numbers = {name: [by_prompt(step) for step in out[name]] for name in ("scores", "logits")}
    if out.get("sequences_scores") is not None:
        numbers["sequences_scores"] = [by_prompt(out.sequences_scores)]
    sequences = by_prompt(out.sequences[:, width:]).tolist()
    return [
        Result(sequences[i], {name: [step[i] for step in numbers[name]] for name in numbers})
        for i in range(num_prompts)
    ]


def from_embeddings(
    model: PreTrainedModel, inputs: Inputs, num_new: int, **options: Any
) -> list[Result]:
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    return generated(model, inputs, num_new, **options)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.is_ended = False

    def put(self, value: Tensor) -> None:
        self.seen.append(value)

    def end(self) -> None:
        self.is_ended = True


def streamed(model: PreTrainedModel, inputs: Inputs, num_new: int, **options: Any) -> list[Result]:
    """Gives the tokens that a streamer is handed, after the prompt as it was given."""
    streamer = Collector()
    results = generated(model, inputs, num_new, streamer=streamer, **options)
    prompt, *steps = streamer.seen
    assert torch.equal(prompt, inputs["input_ids"])
    assert streamer.is_ended
    seen = torch.stack(steps, 1).tolist()
    return [result._replace(sequences=[seen[i]]) for i, result in enumerate(results)]


def by_hand(model: PreTrainedModel, inputs: Inputs, num_new: int, **options: Any) -> list[Result]:
    """A greedy loop over `model(...)`, which grows the mask by itself."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    chosen, logits = [], []
    for _ in range(num_new):
        with torch.no_grad():
            last = model(input_ids=ids, attention_mask=mask, **options).logits[:, -1]
        ids = last.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        chosen.append(ids)
        logits.append(last)
    rows = torch.cat(chosen, 1).tolist()
    return [
        Result([row], {"logits": [step[i : i + 1] for step in logits]})
        for i, row in enumerate(rows)
    ]


class EndsAtMultiples(StoppingCriteria):
    """Ends a row at a token that is a multiple of four."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 4 == 0


@dataclass(frozen=True)
class Mode:
    """A way to call a model, on suffixes of these lengths.

    Attributes:
        options: Arguments of the call.
        lengths: Of the suffixes; 0 is a row that is the prefix itself.
        call: What calls the model.
        reference: Arguments of the uncached call of each row, where other ones than `options`.
        is_drafted: Whether tokens are guessed ahead, which must not change the greedy ones.
        prefix_chunk: The prefix is computed in chunks of so many tokens.
        layouts: Which it takes; None for all.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = SUFFIX_LENGTHS
    call: Call = generated
    reference: dict[str, Any] | None = None
    is_drafted: bool = False
    prefix_chunk: int | None = None
    layouts: tuple[str, ...] | None = None

    def suffixes(self) -> list[list[int]]:
        """Suffixes; a lone one repeats itself, so that prompt lookup finds something."""
        if len(self.lengths) == 1:
            return [tokens(3, seed=8) * (self.lengths[0] // 3)]
        return suffixes(*self.lengths)


EVEN, LONE = (5, 5), (9,)
# a forward by hand, and embeddings, have a token at least
NOT_THE_PREFIX = (3, 7, 1, 5)

MODES: dict[str, Mode] = {
    "greedy": Mode(),
    "sampling": Mode({"do_sample": True, "top_k": 20, "temperature": 1.3}),
    "3 sequences each": Mode({"do_sample": True, "num_return_sequences": 3}),
    "beams": Mode({"num_beams": 3, "num_return_sequences": 2}, (3, 7, 0)),
    "beam sampling": Mode({"num_beams": 3, "do_sample": True, "top_k": 30}, (3, 7, 0)),
    "prompt lookup": Mode({"prompt_lookup_num_tokens": 3}, LONE, reference={}, is_drafted=True),
    "assistant": Mode({"assistant_model": True}, LONE, reference={}, is_drafted=True),
    "guidance": Mode({"guidance_scale": 1.5}),
    "repetition penalty": Mode({"repetition_penalty": 1.8}),
    "no repeated n-grams": Mode({"no_repeat_ngram_size": 2}),
    "all processors of ids": Mode(
        {
            "bad_words_ids": [[47], [13, 42]],
            "encoder_no_repeat_ngram_size": 3,
            "encoder_repetition_penalty": 1.1,
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.2,
            "sequence_bias": [[[5, 9], 4.0], [[7], -3.0]],
        }
    ),
    "early end": Mode({"eos_token_id": [*range(2, 97, 8)], "min_new_tokens": 2}),
    "stopping criteria": Mode({"stopping_criteria": StoppingCriteriaList([EndsAtMultiples()])}),
    "streamer": Mode(call=streamed),
    "prefix and prompts in chunks": Mode({"prefill_chunk_size": 3}, reference={}, prefix_chunk=7),
    "inputs_embeds": Mode(lengths=NOT_THE_PREFIX, call=from_embeddings),
    "a loop over model(...) by hand": Mode(
        lengths=NOT_THE_PREFIX, call=by_hand, layouts=("suffix ids, whole mask",)
    ),
}
