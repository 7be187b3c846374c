"""Which layers of a hybrid model keep states instead of, or beside, keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

# tests show of these that they go on from a state as if they had read everything at once; jamba
# and bamba, for two, drop it where several tokens follow
EXACT_HYBRIDS = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"),
)
# no transformers before 5.23 has it
_DUMMY = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)


class StateSpec(NamedTuple):
    """What a layer keeps that is not a layer of full attention and no more.

    Attributes:
        kind: The config's word for the layer.
        num_states: States of each sort that it keeps; 0 if it keeps nothing.
        has_attention: Whether it keeps keys and values as well.
    """

    kind: str
    num_states: int
    has_attention: bool


def read_states(
    model_type: str, kinds: Sequence[str], layers: Sequence[object]
) -> dict[int, StateSpec]:
    """Reads which layers keep states.

    Args:
        model_type: The config's.
        kinds: The kind of each layer.
        layers: The layers that `DynamicCache` has for the model.

    Returns:
        Layer index -> what it keeps, for all layers of a hybrid that can be served except those of
        full attention; empty for any other model.
    """
    served = {DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, _DUMMY}
    if model_type not in EXACT_HYBRIDS or not {type(layer) for layer in layers} <= served:
        return {}
    specs = {
        layer_idx: StateSpec(
            kind, getattr(layer, "number_of_states", 0), isinstance(layer, DynamicLayer)
        )
        for layer_idx, (kind, layer) in enumerate(zip(kinds, layers, strict=True))
        if type(layer) is not DynamicLayer
    }
    num_attending = len(layers) - sum(not spec.has_attention for spec in specs.values())
    return specs if num_attending else {}
