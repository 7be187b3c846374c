"""Engines that answer requests as they come, one step at a time: submit, step, is_idle, bytes_held."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.bench.continuous import ContinuousBatching, pool_tokens
from hf_granikv.bench.peers import CONTINUOUS_ROWS
from hf_granikv.bench.trace_load import Request
from hf_granikv.live_rows import LiveRows, Row


@dataclass(frozen=True)
class Setting:
    """What engines are given.

    Attributes:
        model: The model.
        prefixes: Each `[1, prefix_len]` ids; computed before the first request comes.
        requests: All that will come, to know how much room they take.
        max_rows: The most requests that run at a time.
        max_step_tokens: The most new tokens of a step, prompts and answers together.
    """

    model: PreTrainedModel
    prefixes: tuple[Tensor, ...]
    requests: Sequence[Request]
    max_rows: int
    max_step_tokens: int


class TraceEngine(ABC):
    """Takes requests at any time, and works on those it has in steps."""

    name: ClassVar[str]

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Takes a request."""

    @abstractmethod
    def step(self) -> dict[str, int]:
        """Does the next piece of work; the new token of each request that got one."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether all requests are answered."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the storages of keys and values now."""


@dataclass(eq=False)
class _Running:
    """A request in the batch: the ids that its row has yet to take."""

    request: Request
    row: Row
    todo: list[int]
    answer: list[int] = field(default_factory=list)


class LiveEngine(TraceEngine):
    """Ours, reduced to what is measured: `LiveRows`, prompts in chunks between steps, greedy.

    Rows that answer take their token first; what `max_step_tokens` leaves goes to the prompts of
    newcomers, those first that came first. All of it is one forward.
    """

    name = "granikv"

    def __init__(self, setting: Setting) -> None:
        self._setting, self._model = setting, setting.model
        self._model.config._attn_implementation = "granikv"
        self._cache = AsymmetricPagedCache(self._model.config)
        self._prefixes = [self._cache.prefill(self._model, ids) for ids in setting.prefixes]
        self._live = LiveRows(self._model, self._cache)
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> dict[str, int]:
        self._model.config._attn_implementation = "granikv"
        while self._waiting and len(self._running) < self._setting.max_rows:
            request = self._waiting.popleft()
            row = self._live.start(self._prefixes[request.prefix_idx])
            self._running.append(_Running(request, row, list(request.suffix)))
        feeds = self._feeds()
        logits = self._live.forward({each.row: ids for each, ids in feeds.items()})
        ready = []
        for each, ids in feeds.items():
            del each.todo[: len(ids)]
            if not each.todo:
                ready.append(each)
        if not ready:
            return {}
        tokens = torch.stack([logits[each.row] for each in ready]).argmax(-1).tolist()
        for each, token in zip(ready, tokens, strict=True):
            each.todo = [token]
            each.answer.append(token)
            if len(each.answer) == each.request.num_new:
                self._live.drop(each.row)
                self._running.remove(each)
        return {each.request.name: token for each, token in zip(ready, tokens, strict=True)}

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def bytes_held(self) -> int:
        return self._cache.stats().hot_bytes + self._live.num_bytes

    def _feeds(self) -> dict[_Running, list[int]]:
        feeds = {each: each.todo[:1] for each in self._running if each.answer}
        left = self._setting.max_step_tokens - len(feeds)
        for each in self._running:
            if not each.answer and left > 0:
                feeds[each] = each.todo[:left]
                left -= len(feeds[each])
        return feeds


class ContinuousEngine(TraceEngine):
    """transformers' continuous batching with block sharing and its own scheduler (first in, first out).

    Args:
        setting: As for ours, with a pool that never makes a request wait for room.
        rows_per_step: The most requests of one forward, if that is less than `max_rows`: others wait
            until one of them is answered.
    """

    def __init__(self, setting: Setting, rows_per_step: int) -> None:
        self.name = f"continuous-{rows_per_step}"  # type: ignore[misc]
        self._prefixes = [ids[0].tolist() for ids in setting.prefixes]
        max_rows = min(rows_per_step, setting.max_rows)
        lengths = list(map(len, self._prefixes))
        rows = [
            (lengths[r.prefix_idx], lengths[r.prefix_idx] + len(r.suffix) + r.num_new)
            for r in setting.requests
        ]
        self._served = ContinuousBatching(
            setting.model,
            num_tokens=pool_tokens(lengths, rows, max_rows),
            max_rows=max_rows,
            max_batch_tokens=setting.max_step_tokens,
        )
        self._served.prime(self._prefixes)

    def submit(self, request: Request) -> None:
        prompt = [*self._prefixes[request.prefix_idx], *request.suffix]
        self._served.submit(request.name, prompt, request.num_new)

    def step(self) -> dict[str, int]:
        return self._served.step()

    @property
    def is_idle(self) -> bool:
        return self._served.is_empty

    @property
    def bytes_held(self) -> int:
        return self._served.bytes_held


ENGINES: dict[str, Callable[[Setting], TraceEngine]] = {
    LiveEngine.name: LiveEngine,
    **{f"continuous-{n}": partial(ContinuousEngine, rows_per_step=n) for n in CONTINUOUS_ROWS},
}
