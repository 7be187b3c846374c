"""Ways to decode rows of several prefixes together, behind three verbs: prepare, step, bytes_held."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from continuous import PAGE, ContinuousBatching, pool_tokens
from group_workload import GroupWorkload
from peers import storage_bytes
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.config import CacheOptions


class GroupPeer(ABC):
    """Something that has computed the prompts of a workload, and decodes a token per row and step."""

    name: ClassVar[str]
    attention: ClassVar[str] = "sdpa"
    is_compared: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: Any = None

    @abstractmethod
    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        """Computes the prompts, with room for `num_steps` tokens more."""

    @abstractmethod
    def step(self, ids: Tensor) -> Tensor:
        """One step of new tokens `[num_rows, 1]`; the logits `[num_rows, vocab_size]`."""

    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the storages of the cache."""

    def backends(self) -> str:
        """Which of our backends ran in how many steps."""
        return ""

    def forward(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """One forward of the model with this peer's attention and cache."""
        # the attention implementation is a setting of the model, and peers take turns on one model
        self.model.config._attn_implementation = self.attention
        kwargs = {CACHE_ARGUMENT: self.cache, **kwargs}
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs)
        logits: Tensor = out.logits[:, -1]
        return logits


class GroupGranikv(GroupPeer):
    """`AsymmetricPagedCache`: each prefix stored once, and read once for the rows bound to it."""

    name = "granikv"
    attention = "granikv"

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        self.cache = _prefilled(self.model, workload).fork()
        self.cache.rows.options = CacheOptions(dispatch=self.dispatch(workload))
        self.cache.bind(**workload.padded_prompts())
        self.step(workload.suffixes)

    def dispatch(self, workload: GroupWorkload) -> str:
        """The option of the cache."""
        return "auto"

    def step(self, ids: Tensor) -> Tensor:
        return self.forward(ids)

    def bytes_held(self) -> int:
        stats = self.cache.stats()
        return stats.hot_bytes + stats.cold_bytes

    def backends(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in self.cache.stats().backend_steps.items())


class BatchGlobal(GroupGranikv):
    """Batch-global cascade over our own pools: the rule of vLLM, re-implemented.

    vLLM takes the shared path for the blocks that every running request has in common
    (`get_num_common_prefix_blocks`, `use_cascade_attention`) and for no others; where there are none,
    each request reads all of its own blocks, stored once or not. So here: one prefix for all rows is
    read by them together, with our choice of backend, and several prefixes are read row by row.

    Row by row is our `per_row` backend: the rows of a prefix in one call of torch's fused kernel,
    with stride 0 over the prefix, so nothing is gathered, padded or copied, and rows that run at the
    same time find their keys in the processor's caches. Beyond a single call for prefix and suffix,
    as vLLM makes, it pays for the merge of the two.
    """

    name = "batch-global"

    def dispatch(self, workload: GroupWorkload) -> str:
        return "auto" if len(set(workload.reads)) == 1 else "per_row"


class BatchPerPrefix(GroupPeer):
    """Ours, a cache and a forward for each prefix: what several prefixes cost without `bind`."""

    name = "granikv-apart"
    attention = "granikv"

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        self.rows = [workload.rows_of(i) for i in range(len(workload.prefixes))]
        source = _prefilled(self.model, workload)
        self.caches = [source.fork() for _ in self.rows]
        for i, cache in enumerate(self.caches):
            for prefix in source.rows.prefixes.all:
                if prefix is not source.rows.prefixes.all[i]:
                    cache.release(prefix)
        self.step(workload.suffixes)

    def step(self, ids: Tensor) -> Tensor:
        logits: dict[int, Tensor] = {}
        for cache, rows in zip(self.caches, self.rows, strict=True):
            out = self.forward(ids[rows], **{CACHE_ARGUMENT: cache})
            logits.update(zip(rows, out, strict=True))
        return torch.stack([logits[row] for row in sorted(logits)])

    def bytes_held(self) -> int:
        stats = [cache.stats() for cache in self.caches]
        return sum(each.hot_bytes + each.cold_bytes for each in stats)


class PaddedDynamic(GroupPeer):
    """`DynamicCache` over left-padded rows, each with its own copy of its prefix."""

    name = "DynamicCache"

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        self.pads, self.cache = workload.pads, DynamicCache(config=self.model.config)
        self.fill(workload)

    def fill(self, workload: GroupWorkload) -> None:
        """Stores the prompts, the pads of shorter ones as zeros."""
        order = [row for i in range(len(workload.prefixes)) for row in workload.rows_of(i)]
        positions = torch.tensor(order).argsort()
        alone = [self._group(workload, i) for i in range(len(workload.prefixes))]
        for layer_idx in range(len(alone[0].layers)):
            keys, values = (
                torch.cat(
                    [
                        _padded(getattr(cache.layers[layer_idx], side), int(workload.pads[rows[0]]))
                        for i, cache in enumerate(alone)
                        if (rows := workload.rows_of(i))
                    ]
                )[positions]
                for side in ("keys", "values")
            )
            self.cache.update(keys, values, layer_idx)
            for cache in alone:
                cache.layers[layer_idx].reset()
        self.num_columns = int(workload.pads[0]) + workload.prefixes[workload.reads[0]].shape[1]
        self.num_columns += workload.suffixes.shape[1]

    def step(self, ids: Tensor) -> Tensor:
        mask = torch.arange(self.num_columns + 1) >= self.pads[:, None]
        positions = self.num_columns - self.pads[:, None]
        self.num_columns += 1
        return self.forward(ids, attention_mask=mask.long(), position_ids=positions)

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)

    def _group(self, workload: GroupWorkload, prefix_idx: int) -> DynamicCache:
        """The rows of one prefix, without pads."""
        cache = deepcopy(_stock_prefix(self.model, workload.prefixes[prefix_idx]))
        rows = workload.rows_of(prefix_idx)
        cache.batch_repeat_interleave(len(rows))
        start, count = cache.get_seq_length(), workload.suffixes.shape[1]
        positions = torch.arange(start, start + count).expand(len(rows), -1)
        self.forward(workload.suffixes[rows], position_ids=positions, **{CACHE_ARGUMENT: cache})
        return cache


class PaddedStatic(PaddedDynamic):
    """`StaticCache` of exactly the length needed, over left-padded rows."""

    name = "StaticCache"

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        prompt_len = max(ids.shape[1] for ids in workload.prefixes) + workload.suffixes.shape[1]
        self.pads, self.cache = (
            workload.pads,
            StaticCache(config=self.model.config, max_cache_len=prompt_len + num_steps),
        )
        self.fill(workload)


class Continuous(GroupPeer):
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

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
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
        return self.cache.bytes_held


class NoContext(GroupPeer):
    """The model on the new tokens alone: what no cache can save. Its logits are other ones."""

    name = "no-context"
    is_compared = False

    def prepare(self, workload: GroupWorkload, num_steps: int) -> None:
        self.positions = torch.tensor(
            [[workload.prefixes[read].shape[1] + num_steps] for read in workload.reads]
        )

    def step(self, ids: Tensor) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        return self.forward(ids, position_ids=self.positions)

    def bytes_held(self) -> int:
        return 0


GROUP_PEERS: dict[str, Callable[[PreTrainedModel], GroupPeer]] = {
    GroupGranikv.name: GroupGranikv,
    BatchGlobal.name: BatchGlobal,
    BatchPerPrefix.name: BatchPerPrefix,
    PaddedDynamic.name: PaddedDynamic,
    PaddedStatic.name: PaddedStatic,
    NoContext.name: NoContext,
    **{f"continuous-{n}": partial(Continuous, max_rows=n) for n in (1, 2, 4, 8, 16)},
}


@lru_cache
def _prefilled(model: PreTrainedModel, workload: GroupWorkload) -> AsymmetricPagedCache:
    """The prefixes computed once for all of our peers, which are forks; each of them holds them."""
    cache = AsymmetricPagedCache(model.config)
    for ids in workload.prefixes:
        cache.prefill(model, ids)
    return cache


@lru_cache
def _stock_prefix(model: PreTrainedModel, prefix: Tensor) -> DynamicCache:
    """A prefix computed once for all stock caches."""
    peer = PaddedDynamic(model)
    peer.cache = DynamicCache(config=model.config)
    peer.forward(prefix)
    return peer.cache


def _padded(states: Tensor, num_pads: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, num_pads, 0))
