"""A batch over one stored prefix, turns for it, and what each must give alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from agents import SHARED, byte_tokenizer, llama

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.batch import Batch
from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.engine.requests import Asked
from hf_granikv.engine.schedule import Limits
from hf_granikv.engine.turn import Turn
from hf_granikv.live_rows import LiveRows
from hf_granikv.worth import Worth

LONG = {"max_new_tokens": 12, "eos_token_id": None}
WAIT_S = 60
TOKENIZER = byte_tokenizer()
PREFIX_IDS = TOKENIZER(SHARED)["input_ids"]


@cache
def shared_model() -> Any:
    """One tiny model for all tests of the engine; never change its weights."""
    return llama()


def prompt(content: str | Sequence[int]) -> list[int]:
    """The ids of a prompt: those of a text after the prefix, or the ids given."""
    ids = TOKENIZER(content)["input_ids"] if isinstance(content, str) else content
    return [*PREFIX_IDS, *ids]


@cache
def _alone(
    ids: tuple[int, ...], seed: int | None, options: tuple[tuple[str, Any], ...]
) -> tuple[int, ...]:
    if seed is not None:
        torch.manual_seed(seed)
    kwargs: dict[str, Any] = dict(options)
    if "stop_strings" in kwargs:
        kwargs["tokenizer"] = TOKENIZER
    prompt = torch.tensor([list(ids)])
    # without a mask, generate would make one of the tokens that happen to be pads
    out = shared_model().generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
    return tuple(out[0, len(ids) :].tolist())


def alone(content: str | Sequence[int], seed: int | None = None, **options: Any) -> tuple[int, ...]:
    """What `generate` gives for a prompt alone, with transformers' own cache."""
    return _alone(tuple(prompt(content)), seed, tuple(sorted(options.items())))


@dataclass
class Rig:
    """A batch and its parts.

    The budget is watched in every forward: private tokens of rows and of idle agents, and what they
    share, together. Nothing is shared unless `min_shared_tokens` is given.
    """

    max_tokens: int | None = None
    max_rows: int = 64
    max_step_tokens: int = 64
    lookahead: int = 4
    cost: PreemptionCost | None = None
    cold_slots: int | None = None
    min_shared_tokens: int | None = None
    model: Any = field(default_factory=shared_model)

    def __post_init__(self) -> None:
        self.cache = AsymmetricPagedCache(self.model.config, cold_slots=self.cold_slots)
        self.prefix = self.cache.prefill(self.model, torch.tensor([PREFIX_IDS]))
        self.rows = LiveRows(self.model, self.cache)
        self.memories = Memories()
        limits = Limits(self.max_tokens, self.max_rows, self.max_step_tokens, self.lookahead)
        shares = self.min_shared_tokens is not None
        worth = Worth(self.model, self.min_shared_tokens) if shares else None
        self.batch = Batch(self.rows, limits, self.memories, self.cost, worth)
        self.fed: list[dict[int, int]] = []
        self._forward = self.rows.forward
        self.rows.forward = self._watched  # type: ignore[method-assign]

    def _watched(self, feeds: Any) -> Any:
        orders = {id(job.row): job.order for job in self.batch._running.values()}
        self.fed.append({orders[id(row)]: len(ids) for row, ids in feeds.items()})
        logits = self._forward(feeds)
        if self.max_tokens is not None:
            held = self.rows.num_slots_used + self.rows.levels.num_tokens
            assert held + sum(each.num_tokens for each in self.memories.idle()) <= self.max_tokens
        return logits

    def memory(self) -> Any:
        return self.memories.make(self.prefix)

    def add(
        self,
        content: str | Sequence[int],
        seed: int | None = None,
        memory: Any = None,
        name: str = "",
        **options: Any,
    ) -> Job:
        ids = prompt(content)
        sampler = Asked(self.model, options).sampler(ids, TOKENIZER, seed)
        turn = Turn(name, len(ids), TOKENIZER)
        job = Job(turn, sampler, ids[len(PREFIX_IDS) :], self.prefix, memory)
        self.batch.limits.check_fits(job.num_at_most)
        self.batch.add(job)
        return job

    def step(self) -> None:
        with torch.no_grad():
            self.batch.step()
        self.batch.check_integrity()

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if self.batch.is_empty:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def reply(job: Job) -> tuple[int, ...]:
    return job.turn.result(0).token_ids


def ask(engine: Any, text: str, **options: Any) -> Turn:
    """Submits a prompt over the prefix of the engine's fixture."""
    options = {**LONG, **options}
    return engine.submit(prompt(text), prefix=engine.prefix, name=text, **options)
