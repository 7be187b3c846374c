"""One forward pass over the rows of several caches: no row pays for another's padding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.errors import NotPackableError
from hf_granikv.packed_tensors import PackedKeyValue, segments_of


class Segment(NamedTuple):
    """A batch that takes part in a packed forward pass.

    Attributes:
        cache: Of the batch.
        input_ids: `[num_rows, q_len]` its new tokens; no pads.
    """

    cache: AsymmetricPagedCache
    input_ids: Tensor


class PackedCache(Cache):
    """The caches of several batches, for a forward over `[1, num_tokens]` of them all.

    Every layer of a model but attention treats tokens one by one; attention goes batch by batch.

    Args:
        segments: The batches, in the order of their tokens.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        num_layers = len(self.segments[0].cache.layers)
        super().__init__(layers=[_PackedLayer(i, self.segments) for i in range(num_layers)])

    def announce(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Lets each cache read its own part; gives the arguments for all tokens."""
        positions = []
        try:
            for cache, ids in self.segments:
                # a batch of its own, as a plain forward of it would be
                own = cache.announce(module, {"input_ids": ids, "past_key_values": cache})
                if own is None or "position_ids" not in own:
                    raise NotPackableError("positions of the tokens cannot be told to the model")
                positions.append(own["position_ids"].reshape(1, -1))
        except BaseException:
            self.settle()
            raise
        return {**kwargs, "position_ids": torch.cat(positions, dim=1)}

    @property
    def packed_ids(self) -> Tensor:
        """`[1, num_tokens]` the new tokens of all batches."""
        return torch.cat([ids.reshape(1, -1) for _, ids in self.segments], dim=1)

    def settle(self, *, is_complete: bool = False) -> None:
        """Ends the forward in every cache."""
        for cache, _ in self.segments:
            cache.settle(is_complete=is_complete)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: masks are not made of columns here."""
        return 0


class _PackedLayer(CacheLayerMixin):
    """One layer of several caches."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, layer_idx: int, segments: Sequence[Segment]) -> None:
        super().__init__()
        self._layers: list[Any] = [cache.layers[layer_idx] for cache, _ in segments]
        self._sizes = [(ids.shape[0], ids.shape[1]) for _, ids in segments]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pools allocate."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of each batch in its cache.

        Args:
            key_states: `[1, num_kv_heads, num_tokens, head_dim]`.
            value_states: Likewise.
            args: Ignored; transformers versions pass different extras.
            kwargs: Ignored likewise.
        """
        given = zip(*(segments_of(t, self._sizes) for t in (key_states, value_states)), strict=True)
        pairs = [
            layer.update(keys, values)
            for layer, (keys, values) in zip(self._layers, given, strict=True)
        ]
        keys, values = ([pair[side] for pair in pairs] for side in (0, 1))
        return PackedKeyValue(keys, self._sizes), PackedKeyValue(values, self._sizes)

    def get_seq_length(self) -> int:
        """0: masks are not made of columns here."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Those of a forward without a past, whose masks nobody reads."""
        return query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1
