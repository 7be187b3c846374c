"""transformers' continuous batching, one step at a time in the caller's thread.

What it needs on a CPU, read off transformers 5.24 (`generation/continuous_batching`):

* Its attention there is SDPA over all requests of a batch at once: the keys of all of them are
  gathered, one after the other, and a dense mask `[tokens, all keys]` hides each request from the
  others. So a batch of n rows scores n times as many keys as its rows see, and from a few rows on
  smaller batches are faster: `max_rows`.
* `TRANSFORMERS_SDPA_FORCE_GQA=1` spares it a copy of the gathered keys and values for every query
  head; it is set around its forwards.
* The flash and block table paths, graphs and asynchronous batches need a GPU. `paged|eager` is
  slower, and so is its compiled path, which pads to intervals.
* Block sharing finds whole pages of prompts whose blocks were completed by a request that went on
  after them: `prime` lets one request for each prefix generate a second token.
* A batch can read as many tokens as the pool has room for, shared ones counted once for each reader,
  and pages of requests that have ended stay until the pool is short of them, when all that nobody
  reads go, prefixes too: `pool_tokens` leaves room for either.
"""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

_NO_LIMIT = 1 << 30
PAGE = 64


class ContinuousBatching:
    """The batch processor of `model.init_continuous_batching`, without its thread and queues.

    Args:
        model: The model; its attention is switched to `sdpa` during a step.
        num_tokens: Tokens the pool has room for, and the most that a batch may read.
        max_rows: Requests of one batch.
        max_batch_tokens: New tokens of one batch.
        page_size: Tokens of a page, the granularity of sharing.

    Raises:
        ValueError: This transformers has other settings for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_tokens: int,
        max_rows: int,
        max_batch_tokens: int,
        page_size: int = PAGE,
    ) -> None:
        if reason := continuous_unsupported():
            raise ValueError(f"{reason}; name other peers.")
        self._model = _Listening(model)
        inner: Any = model
        with self._attending():
            manager = inner.init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=page_size,
                    num_blocks=-(-num_tokens // page_size),
                    max_batch_tokens=max_batch_tokens,
                    max_requests_per_batch=max_rows,
                    allow_block_sharing=True,
                    safety_margin=0.0,
                    auto_switch_to_flash=False,
                    use_async_batching=False,
                ),
            )
            self._processor: Any = manager._create_batch_processor()
        self._manager = manager

    @property
    def bytes_held(self) -> int:
        """Bytes of the storage of the pool."""
        return int(self._processor.cache.cache_tensor.untyped_storage().nbytes())

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or runs."""
        return self._manager.input_queue.empty() and not self._processor.has_pending_requests()

    def prime(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Computes prefixes, so that requests find their whole pages."""
        for i, ids in enumerate(prefixes):
            # pages are registered while a request runs: one that ends with its first token leaves none
            self.submit(f"prefix {i}", [*ids, ids[0]], 2)
        while not self.is_empty:
            self.step()

    def submit(self, name: str, ids: Sequence[int], num_new: int = _NO_LIMIT) -> None:
        """Adds a request for `num_new` tokens after the whole prompt `ids`."""
        self._manager.add_request(list(ids), request_id=name, max_new_tokens=num_new)

    def step(self) -> dict[str, int]:
        """Runs one batch; the new tokens of those requests that got one."""
        processor = self._processor
        with self._attending(), torch.no_grad():
            if not processor.prepare_next_batch():
                return {}
            processor._generation_step(self._model)
            processor.update_batch()
        return {
            served.state.request_id: served.state.generated_tokens[-1]
            for served in processor.inputs_and_outputs.requests_in_batch
            if served.has_new_token
        }

    def step_of(self, tokens: Mapping[str, int]) -> Tensor:
        """Runs one batch of these running requests alone, each fed its token instead of its own.

        Returns:
            `[len(tokens), vocab_size]` logits.
        """
        scheduler = self._processor.scheduler
        running = scheduler.active_requests
        scheduler.active_requests = {name: running[name] for name in tokens}
        for name, token in tokens.items():
            running[name].generated_tokens[-1] = token
            running[name].tokens_to_process = [token]
        served = self.step()
        scheduler.active_requests = running
        assert list(served) == list(tokens), "the batch is one step of each request"
        return self._model.logits[0, : len(tokens)]

    def start(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Computes prompts in one batch of their own, up to their first tokens."""
        scheduler = self._processor.scheduler
        running, scheduler.active_requests = scheduler.active_requests, {}
        for name, ids in prompts.items():
            self.submit(name, ids)
        assert self.step().keys() == prompts.keys(), "max_batch_tokens has room for all of them"
        scheduler.active_requests |= running

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Sets the attention that it needs, for as long as it computes."""
        config, name = self._model.inner.config, "TRANSFORMERS_SDPA_FORCE_GQA"
        before = config._attn_implementation, os.environ.get(name)
        config._attn_implementation, os.environ[name] = "sdpa", "1"
        try:
            yield
        finally:
            config._attn_implementation = before[0]
            os.environ.pop(name)
            if before[1] is not None:
                os.environ[name] = before[1]


def continuous_unsupported() -> str:
    """Why it cannot run with the transformers that is installed; empty if it can."""
    if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters:
        return ""
    return f"continuous batching of transformers {transformers.__version__} has no page_size"


def pool_tokens(prefix_lens: Sequence[int], rows: Sequence[tuple[int, int]], max_rows: int) -> int:
    """The least room with which no batch and no page has to give way.

    Args:
        prefix_lens: Tokens of the prefixes.
        rows: Tokens of the prefix of each request, and of all of it.
        max_rows: Requests of one batch.
    """
    # a primed prefix has two tokens more for as long as it is computed
    pages = sum(-(-(length + 2) // PAGE) for length in prefix_lens)
    pages += sum(-(-whole // PAGE) - prefix_len // PAGE for prefix_len, whole in rows)
    read_at_once = sum(sorted(whole for _, whole in rows)[-max_rows:])
    return max(pages * PAGE, read_at_once)


class _Listening:
    """A model that keeps the logits of its last forward."""

    def __init__(self, inner: PreTrainedModel) -> None:
        self.inner = inner
        self.logits = torch.empty(0)
        self._supports_logits_to_keep = inner._supports_logits_to_keep

    def __call__(self, **kwargs: Any) -> Any:
        out = self.inner(**kwargs)
        self.logits = out.logits
        return out
