"""What is compared, behind the same verbs: prepare, step, bytes_held."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.bench.continuous import (
    PAGE,
    ContinuousBatching,
    continuous_unsupported,
    pool_tokens,
)
from hf_granikv.bench.runs import NO_CONTEXT
from hf_granikv.bench.workload import Workload
from hf_granikv.compat import CACHE_ARGUMENT

CONTINUOUS_ROWS = (1, 2, 4, 8, 16)


class PeerAbsent(Exception):
    """A peer cannot be measured here; the message says why."""


class Peer(ABC):
    """Something that has computed the prompts of a workload, and decodes a token per row and step.

    Args:
        model: The model whose weights are used.
    """

    name: ClassVar[str]
    attention: ClassVar[str] = "sdpa"
    # whether its results have to be those of the others
    is_compared: ClassVar[bool] = True
    # whether it does not run the model of transformers, but a rounding of its own
    is_other_engine: ClassVar[bool] = False
    # whether it computes in threads that are not torch's
    has_own_threads: ClassVar[bool] = False
    # whether the rest of its step is what the model alone takes, as `NoContext` runs it
    has_models_time: ClassVar[bool] = True
    # what has to be known about its figures
    note: str = ""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # what a forward calls
        self.run: Callable[..., Any] = model
        self.cache: Any = None

    @abstractmethod
    def prepare(self, workload: Workload, num_steps: int) -> None:
        """Computes the prompts, with room for `num_steps` tokens more.

        Raises:
            PeerAbsent: It does not run here.
        """

    @abstractmethod
    def step(self, ids: Tensor) -> Tensor:
        """One step of new tokens.

        Args:
            ids: [num_rows, 1].

        Returns:
            [num_rows, vocab_size] logits, valid until the next step.
        """

    def warm(self, ids: Tensor) -> None:
        """Takes a step and takes it back, to begin as in a loop of one's own; nothing by default.

        Where peers with threads of their own take turns with others, the first step after each change
        is some milliseconds slower: pauses of any kind before it made that worse.

        Args:
            ids: [num_rows, 1].
        """

    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the storages of keys and values."""

    def backends(self) -> str:
        """Which of our backends ran in how many steps."""
        return ""

    def missing(self) -> str:
        """Why it can never run here, known without computing anything; empty if it can."""
        return ""

    def bytes_needed(self, workload: Workload, num_steps: int) -> int:
        """Bytes that `prepare` is known to need; 0 if they are few."""
        return 0

    def forward(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """One forward of the model with this peer's attention and cache."""
        # the attention implementation is a setting of the model, and peers take turns on one model
        self.model.config._attn_implementation = self.attention
        kwargs = {CACHE_ARGUMENT: self.cache, **kwargs}
        out = self.run(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs)
        logits: Tensor = out.logits[:, -1]
        return logits


class OnePrefixPeer(Peer):
    """Rows of one length over one prefix: the position of a new token is the same in all of them."""

    num_columns = 0

    def step(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.num_columns, self.num_columns + ids.shape[1])
        logits = self.forward(ids, position_ids=positions.expand(len(ids), -1))
        self.num_columns += ids.shape[1]
        return logits


class Dynamic(OnePrefixPeer):
    """`DynamicCache`, the prefix computed once and repeated for every row."""

    name = "DynamicCache"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.step(workload.prefixes[0])
        self.cache.batch_repeat_interleave(workload.num_rows)
        self.step(workload.suffixes)

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)

    def bytes_needed(self, workload: Workload, num_steps: int) -> int:
        return dense_bytes(self.model, workload, num_steps)


class Static(OnePrefixPeer):
    """`StaticCache` of exactly the length needed, filled from a `DynamicCache`."""

    name = "StaticCache"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        source = Dynamic(self.model)
        source.prepare(workload, num_steps)
        self.num_columns = source.num_columns
        self.cache = StaticCache(
            config=self.model.config, max_cache_len=self.num_columns + num_steps
        )
        for layer_idx, layer in enumerate(source.cache.layers):
            self.cache.update(layer.keys, layer.values, layer_idx)
            # freed one by one: there is no room for two caches of all rows
            layer.keys = layer.values = None

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)

    def bytes_needed(self, workload: Workload, num_steps: int) -> int:
        return dense_bytes(self.model, workload, num_steps)


class Granikv(OnePrefixPeer):
    """`AsymmetricPagedCache`."""

    name = "granikv"
    attention = "granikv"
    dispatch: ClassVar[str] = "auto"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.cache = AsymmetricPagedCache(self.model.config, dispatch=self.dispatch)
        self.cache.prefill(self.model, workload.prefixes[0])
        self.num_columns = workload.prefixes[0].shape[1]
        self.step(workload.suffixes)

    def bytes_held(self) -> int:
        stats = self.cache.stats()
        return stats.hot_bytes + stats.cold_bytes

    def backends(self) -> str:
        return backend_steps(self.cache)


class GranikvCascade(Granikv):
    """Ours, the cascade backend forced."""

    name = "granikv-cascade"
    dispatch = "cascade"


class GranikvGemm(Granikv):
    """Ours, the GEMM backend forced."""

    name = "granikv-batched_gemm"
    dispatch = "batched_gemm"


class GranikvPerRow(Granikv):
    """Ours, every row reading the prefix by itself."""

    name = "granikv-per_row"
    dispatch = "per_row"


class Continuous(Peer):
    """transformers' continuous batching with block sharing.

    A step runs its rows in batches of `max_rows`, one after the other, until each has its token: its
    own scheduler would give the first rows all of theirs before the others start, in the same number
    of the same batches. What it makes of the logits, and the bookkeeping of its requests, is part of it.
    """

    name = "continuous"

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        super().__init__(model)
        self.name = f"continuous-{max_rows}"  # type: ignore[misc]
        self.max_rows = max_rows

    def missing(self) -> str:
        return continuous_unsupported()

    def prepare(self, workload: Workload, num_steps: int) -> None:
        names = [f"row {row}" for row in range(workload.num_rows)]
        self.batches = [
            names[start : start + self.max_rows] for start in range(0, len(names), self.max_rows)
        ]
        prefixes = [ids[0].tolist() for ids in workload.prefixes]
        prompts = {
            name: prefixes[read] + suffix.tolist()
            for name, read, suffix in zip(names, workload.reads, workload.suffixes, strict=True)
        }
        suffix_len = workload.suffixes.shape[1]
        lengths = [
            (len(prefixes[read]), len(prefixes[read]) + suffix_len + num_steps)
            for read in workload.reads
        ]
        self.cache = ContinuousBatching(
            self.model,
            num_tokens=pool_tokens(list(map(len, prefixes)), lengths, self.max_rows),
            max_rows=self.max_rows,
            max_batch_tokens=max(256, self.max_rows * (suffix_len + PAGE)),
        )
        self.cache.prime(prefixes)
        for batch in self.batches:
            self.cache.start({name: prompts[name] for name in batch})

    def step(self, ids: Tensor) -> Tensor:
        tokens = iter(ids[:, 0].tolist())
        logits = [
            self.cache.step_of({name: next(tokens) for name in batch}) for batch in self.batches
        ]
        return torch.cat(logits)

    def bytes_held(self) -> int:
        held: int = self.cache.bytes_held
        return held


class NoContext(Peer):
    """The model on the new tokens alone: what no cache can save. Its logits are other ones."""

    name = NO_CONTEXT
    is_compared = False

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.positions = torch.tensor(
            [[workload.prefixes[read].shape[1] + num_steps] for read in workload.reads]
        )

    def step(self, ids: Tensor) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        return self.forward(ids, position_ids=self.positions)

    def warm(self, ids: Tensor) -> None:
        self.step(ids)

    def bytes_held(self) -> int:
        return 0


PeerFactory = Callable[[PreTrainedModel], Peer]
CONTINUOUS: dict[str, PeerFactory] = {
    f"continuous-{n}": partial(Continuous, max_rows=n) for n in CONTINUOUS_ROWS
}


def storage_bytes(cache: Any) -> int:
    """Bytes of the storages of a cache of transformers."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def values_per_token(model: PreTrainedModel) -> int:
    """Numbers that keys and values of one token are made of, in all layers."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return count


def dense_bytes(model: PreTrainedModel, workload: Workload, num_steps: int) -> int:
    """Bytes of keys and values of all rows, each with its own copy of a prefix."""
    num_columns = max(ids.shape[1] for ids in workload.prefixes) + workload.suffixes.shape[1]
    num_tokens = workload.num_rows * (num_columns + num_steps)
    return num_tokens * values_per_token(model) * model.dtype.itemsize


def backend_steps(cache: AsymmetricPagedCache) -> str:
    """Which backend of a cache ran in how many steps."""
    return ", ".join(f"{name} {n}" for name, n in cache.stats().backend_steps.items())
