"""Which layers keep states, instead of keys and values or beside them."""

from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_granikv.views import LayerKind

# tests show of these that they go on from a state as if they had read everything at once; jamba
# and bamba, for two, drop it where several tokens follow
EXACT_HYBRIDS = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"),
)


def stateful_kind(model_type: str, name: str, layer: object) -> LayerKind | None:
    """What a layer with states asks of a cache.

    Args:
        model_type: The config's.
        name: The config's word for the layer.
        layer: The layer that `DynamicCache` has for it.

    Returns:
        None if it keeps no states, or none that the model is known to go on from.
    """
    served = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
    if model_type not in EXACT_HYBRIDS or type(layer) not in served:
        return None
    assert isinstance(layer, LinearAttentionLayer)
    stores = isinstance(layer, DynamicLayer)
    return LayerKind(stores=stores, num_states=layer.number_of_states, name=name)
