"""Ways to decode rows of several prefixes together."""

from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.bench.compiled import FrozenSteps, GranikvSteps, StaticSteps
from hf_granikv.bench.llama_cpp import LLAMA_CPP
from hf_granikv.bench.peers import (
    CONTINUOUS,
    NoContext,
    Peer,
    PeerFactory,
    backend_steps,
    dense_bytes,
    storage_bytes,
)
from hf_granikv.bench.workload import Workload
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.config import CacheOptions


class GroupGranikv(Peer):
    """`AsymmetricPagedCache`: each prefix stored once, and read once for the rows bound to it."""

    name = "granikv"
    attention = "granikv"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.cache = _prefilled(self.model, workload).fork()
        self.cache.rows.options = CacheOptions(dispatch=self.dispatch(workload))
        self.cache.bind(**workload.padded_prompts())
        self.step(workload.suffixes)

    def dispatch(self, workload: Workload) -> str:
        """The option of the cache."""
        return "auto"

    def step(self, ids: Tensor) -> Tensor:
        return self.forward(ids)

    def bytes_held(self) -> int:
        stats = self.cache.stats()
        return stats.hot_bytes + stats.cold_bytes

    def backends(self) -> str:
        return backend_steps(self.cache)


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

    def dispatch(self, workload: Workload) -> str:
        return "auto" if len(set(workload.reads)) == 1 else "per_row"


class BatchPerPrefix(Peer):
    """Ours, a cache and a forward for each prefix: what several prefixes cost without `bind`."""

    name = "granikv-apart"
    attention = "granikv"

    def prepare(self, workload: Workload, num_steps: int) -> None:
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


class PaddedDynamic(Peer):
    """`DynamicCache` over left-padded rows, each with its own copy of its prefix."""

    name = "DynamicCache"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        self.pads, self.cache = workload.pads, DynamicCache(config=self.model.config)
        self.fill(workload)

    def fill(self, workload: Workload) -> None:
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
        mask = torch.arange(self.num_masked) >= self.pads[:, None]
        positions = self.num_columns - self.pads[:, None]
        self.num_columns += 1
        return self.forward(ids, attention_mask=mask.long(), position_ids=positions)

    @property
    def num_masked(self) -> int:
        """Columns of the mask of a step."""
        return self.num_columns + 1

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)

    def bytes_needed(self, workload: Workload, num_steps: int) -> int:
        return dense_bytes(self.model, workload, num_steps)

    def _group(self, workload: Workload, prefix_idx: int) -> DynamicCache:
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

    def prepare(self, workload: Workload, num_steps: int) -> None:
        prompt_len = max(ids.shape[1] for ids in workload.prefixes) + workload.suffixes.shape[1]
        self.pads, self.max_len = workload.pads, prompt_len + num_steps
        self.cache = StaticCache(config=self.model.config, max_cache_len=self.max_len)
        self.fill(workload)

    @property
    def num_masked(self) -> int:
        # always as many, as graphs need it; the cache itself hides columns to come
        return self.max_len


class GroupGranikvCompiled(GranikvSteps, GroupGranikv):
    """Ours, its decode steps compiled."""

    name = "granikv-compiled"


class BatchGlobalCompiled(GranikvSteps, BatchGlobal):
    """The rule of vLLM, its decode steps compiled."""

    name = "batch-global-compiled"


class GroupGranikvFrozen(FrozenSteps, GroupGranikvCompiled):
    """Ours, its decode steps compiled, the weights frozen."""

    name = "granikv-frozen"


class BatchGlobalFrozen(FrozenSteps, BatchGlobalCompiled):
    """The rule of vLLM, its decode steps compiled, the weights frozen."""

    name = "batch-global-frozen"


class PaddedStaticCompiled(StaticSteps, PaddedStatic):
    """`StaticCache` over left-padded rows, its decode steps compiled."""

    name = "StaticCache-compiled"


GROUP_PEERS: dict[str, PeerFactory] = {
    GroupGranikv.name: GroupGranikv,
    GroupGranikvCompiled.name: GroupGranikvCompiled,
    GroupGranikvFrozen.name: GroupGranikvFrozen,
    BatchGlobal.name: BatchGlobal,
    BatchGlobalCompiled.name: BatchGlobalCompiled,
    BatchGlobalFrozen.name: BatchGlobalFrozen,
    BatchPerPrefix.name: BatchPerPrefix,
    PaddedDynamic.name: PaddedDynamic,
    PaddedStatic.name: PaddedStatic,
    PaddedStaticCompiled.name: PaddedStaticCompiled,
    NoContext.name: NoContext,
    **CONTINUOUS,
    **LLAMA_CPP,
}


@lru_cache
def _prefilled(model: PreTrainedModel, workload: Workload) -> AsymmetricPagedCache:
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
