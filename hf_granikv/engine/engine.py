"""A continuous engine: turns come from any thread, one thread computes them all."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from hf_granikv.agent import Reply
from hf_granikv.announce import device_of_ids, transformers_model
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.engine.batch import Batch
from hf_granikv.engine.figures import EngineFigures
from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.engine.memory import Memory
from hf_granikv.engine.options import EngineOptions
from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.engine.requests import Asked
from hf_granikv.engine.schedule import Limits
from hf_granikv.engine.turn import Turn
from hf_granikv.engine.worker import Worker
from hf_granikv.in_process import OneOfAKind
from hf_granikv.journal import Journal
from hf_granikv.live_rows import LiveRows
from hf_granikv.pools import Prefix
from hf_granikv.pools.budget import PoolBudget
from hf_granikv.row_budget import RowBudget
from hf_granikv.worth import Worth

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine(OneOfAKind):
    """Answers prompts in one batch that turns join and leave at any token.

    Prompts are computed in chunks between the steps of running answers. The tokens of a turn are those
    that `model.generate` gives for it alone, whoever else runs: processors, stopping criteria and random
    draws are its own. When the budget is short, agents that are idle lose what they hold first, then the
    youngest turn waits and resumes where it was. The engine's thread ends with `close`, at the end of a
    `with` block, or when the engine is forgotten.

    Args:
        model: The model that prefilled the cache.
        cache: Holds the prefixes. Its `cold_slots` limit the private tokens of all turns and of idle
            agents together.
        tokenizer: Makes text of answers.
        options: What turns may take.

    Raises:
        ValueError: If `max_bytes` is less than a token takes.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: AsymmetricPagedCache,
        tokenizer: "PreTrainedTokenizerBase",
        options: EngineOptions | None = None,
    ) -> None:
        options = options or EngineOptions()
        self._model = model
        self._tokenizer = tokenizer
        self._memories = memories = Memories()
        sizes = _sizes(model, cache, options.max_bytes)
        budget = None if sizes is None else RowBudget(sizes, lambda: memories.num_bytes)
        self._rows = LiveRows(model, cache, budget=budget)
        limits = [cache.rows.options.cold_slots, None if sizes is None else sizes.num_tokens]
        self._limits = Limits(
            min((limit for limit in limits if limit is not None), default=None),
            options.max_rows,
            options.max_step_tokens,
            tokens_per_row=0 if sizes is None else sizes.tokens_per_row,
            moves_rows=sizes is not None,
        )
        is_on_host = device_of_ids(transformers_model(model)).type == "cpu"
        cost = PreemptionCost(frees_budget=not is_on_host)
        worth = Worth(model, options.min_shared_tokens)
        batch = Batch(self._rows, self._limits, self._memories, cost, worth)
        self._figures = batch.figures
        self._worker = Worker(batch, cache.engines.step_lock)
        self._memories.on_close = self._worker.tidy
        cache.engines.add(self._worker)
        self._finalizer = weakref.finalize(self, self._worker.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        prefix: Prefix | None = None,
        memory: Memory | None = None,
        name: str = "",
        seed: int | None = None,
        on_end: Callable[[Reply], None] | None = None,
        **generation_kwargs: Any,
    ) -> Turn:
        """Lets a prompt be answered; from any thread.

        Args:
            token_ids: The whole prompt, the ids of the prefix included.
            prefix: The end of the chain of prefixes that it starts with; that of the memory if there
                is one.
            memory: What the agent held so far: only what comes after their common ids is computed. It
                holds this turn afterwards.
            name: Whose answer it is.
            seed: For `do_sample`: draws are those of `generate` after `torch.manual_seed(seed)`.
            on_end: Takes the reply on the engine's thread, before the turn is done; not if it fails.
            generation_kwargs: As `model.generate` takes them.

        Raises:
            ColdPoolFullError: The turn would not fit even if it were alone.
            RuntimeError: The engine is closed.
            ValueError: The ids do not start with those of the prefix or are no more than that, or an
                argument asks for what a row among others cannot do.
        """
        ids = [int(token_id) for token_id in token_ids]
        if memory is not None and prefix not in (None, memory.prefix):
            raise ValueError(
                f"prefix is {prefix}, the memory reads {memory.prefix}; leave one out."
            )
        prefix = memory.prefix if memory is not None else prefix
        num_shared = 0 if prefix is None else prefix.stop
        _check_prompt(ids, prefix)
        sampler = Asked(self._model, generation_kwargs).sampler(ids, self._tokenizer, seed)
        turn = Turn(name, len(ids), self._tokenizer)
        job = Job(turn, sampler, ids[num_shared:], prefix, memory)
        self._limits.check_fits(job.num_at_most)
        # until it is done the turn keeps the engine alive
        turn.on_cancel(partial(self._cancel, job))
        if on_end is not None:
            turn.on_end(on_end)
        self._worker.submit(job)
        return turn

    def memory(self, prefix: Prefix | None = None) -> Memory:
        """Gives a memory for an agent that reads these prefixes; it goes with the last one who knows it."""
        return self._memories.make(prefix)

    def paused(self) -> AbstractContextManager[object]:
        """Keeps all engines over the cache between two steps, for who runs the model or the cache.

        Methods of the cache that change its prefixes do so by themselves. Do not wait for a turn inside.
        """
        return self._worker.paused()

    def gathering(self) -> AbstractContextManager[None]:
        """Lets turns that are submitted meanwhile begin with the same step."""
        return self._worker.gathering()

    @property
    def figures(self) -> EngineFigures:
        """What has been done so far; counts go on changing while turns run."""
        return self._figures

    @property
    def idle_bytes(self) -> int:
        """Bytes that agents hold between their turns, each for itself."""
        with self.paused():
            return self._memories.num_bytes

    @property
    def level_bytes(self) -> int:
        """Bytes of what agents have come to share after the prefixes."""
        with self._worker.paused() as batch:
            batch.tidy()
            return self._rows.levels.num_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that running turns hold."""
        with self.paused():
            return self._rows.num_bytes

    @property
    def backend_steps(self) -> dict[str, int]:
        """How many steps each backend has run; goes on changing while turns run."""
        return self._rows.backend_steps

    @property
    def journal(self) -> Journal:
        """Which path ran how often, what has come to be shared, and why other things have not."""
        return self._rows.levels.journal

    def exchange(self, replaced: dict[Prefix, Prefix]) -> None:
        """Lets all who read some prefixes read others with the same ids, which the cache now holds."""
        with self._worker.paused() as batch:
            batch.exchange(replaced)

    def check_integrity(self) -> None:
        """Checks the pools, between two steps.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        with self._worker.paused() as batch:
            batch.check_integrity()

    def close(self, because: BaseException | None = None) -> None:
        """Cancels what runs, ends the thread after the step under way, and gives back what agents hold.

        Args:
            because: What turns fail with, if they are not to be merely cancelled.
        """
        self._finalizer.detach()
        self._worker.close(because)
        with self._worker.paused() as batch:
            self._memories.forget(each.key for each in self._memories.idle())  # type: ignore[misc]
            batch.tidy()

    def _cancel(self, job: Job) -> None:
        self._worker.cancel(job)


def _sizes(
    model: nn.Module, cache: AsymmetricPagedCache, max_bytes: int | None
) -> PoolBudget | None:
    """What rows may take, and what a token takes of it."""
    if max_bytes is None:
        return None
    rows = LiveRows(model, cache)
    rows.forward({rows.start(None): [0]})
    pool = rows.pools[-1]
    states = rows.num_bytes - pool.num_bytes
    sizes = PoolBudget(max_bytes, pool.bytes_per_token, pool.largest_bytes_per_token, states)
    if sizes.num_tokens <= sizes.tokens_per_row:
        raise ValueError(
            f"max_bytes is {max_bytes}, one private token takes "
            f"{sizes.bytes_for(sizes.tokens_per_row + 1)} with its table, the states of its row, and what "
            "is there twice while a pool grows; raise it."
        )
    return sizes


def _check_prompt(ids: list[int], prefix: Prefix | None) -> None:
    shared = np.zeros(0, dtype=np.int64) if prefix is None else prefix.chain_ids
    if not np.array_equal(ids[: len(shared)], shared):
        raise ValueError(
            f"the prompt of {len(ids)} tokens does not start with the {len(shared)} of its prefix; "
            "pass the whole prompt, or the prefix that it starts with."
        )
    if len(ids) == len(shared):
        raise ValueError(
            f"the prompt has no token after the {len(shared)} of its prefix; there is nothing to "
            "predict from."
        )
