"""The caches that are compared, behind the same three verbs: prepare, step, bytes_held."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT


class Peer(ABC):
    """A cache filled with one prefix and a suffix per row, decoding a token per row and step."""

    name: ClassVar[str]
    attention: ClassVar[str] = "sdpa"
    is_compared: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: Any = None
        self.num_columns = 0

    @abstractmethod
    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        """Fills the cache: prefix `[1, prefix_len]`, suffixes `[rows, suffix_len]`."""

    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the storages of the cache."""

    def step(self, ids: Tensor) -> Tensor:
        """One forward of new tokens `[rows, q_len]`; the logits `[rows, vocab]` of the last."""
        # the attention implementation is a setting of the model, and peers take turns on one model
        self.model.config._attn_implementation = self.attention
        positions = torch.arange(self.num_columns, self.num_columns + ids.shape[1])
        out = self.model(
            input_ids=ids,
            position_ids=positions.expand(len(ids), -1),
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_ARGUMENT: self.cache},
        )
        self.num_columns += ids.shape[1]
        return out.logits[:, -1]


class Dynamic(Peer):
    """`DynamicCache`, the prefix computed once and repeated for every row."""

    name = "DynamicCache"

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.step(prefix)
        self.cache.batch_repeat_interleave(len(suffixes))
        self.step(suffixes)

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)


class Static(Peer):
    """`StaticCache` of exactly the length needed, filled from a `DynamicCache`."""

    name = "StaticCache"

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        source = Dynamic(self.model)
        source.prepare(prefix, suffixes, num_steps)
        self.num_columns = source.num_columns
        self.cache = StaticCache(
            config=self.model.config, max_cache_len=self.num_columns + num_steps
        )
        for layer_idx, layer in enumerate(source.cache.layers):
            self.cache.update(layer.keys, layer.values, layer_idx)
            layer.reset()

    def bytes_held(self) -> int:
        return storage_bytes(self.cache)


class Granikv(Peer):
    """`AsymmetricPagedCache`."""

    name = "granikv"
    attention = "granikv"
    dispatch = "auto"

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        self.cache = AsymmetricPagedCache(self.model.config, dispatch=self.dispatch)
        self.cache.prefill(self.model, prefix)
        self.num_columns = prefix.shape[1]
        self.step(suffixes)

    def bytes_held(self) -> int:
        stats = self.cache.stats()
        return stats.hot_bytes + stats.cold_bytes


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


class NoContext(Peer):
    """The model on the new token alone: what no cache can save. Its logits are other ones."""

    name = "no-context"
    is_compared = False

    def prepare(self, prefix: Tensor, suffixes: Tensor, num_steps: int) -> None:
        self.num_columns = prefix.shape[1] + suffixes.shape[1]

    def bytes_held(self) -> int:
        return 0

    def step(self, ids: Tensor) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        return super().step(ids)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (Granikv, Static, Dynamic, NoContext, GranikvCascade, GranikvGemm, GranikvPerRow)
}


def storage_bytes(cache: Any) -> int:
    """Bytes of the storages of a cache of transformers."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.untyped_storage().nbytes() for t in tensors)
