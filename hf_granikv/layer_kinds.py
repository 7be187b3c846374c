"""Which models a cache can serve, told from their config alone."""

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer


def num_servable_layers(config: PreTrainedConfig) -> int:
    """Number of layers, all of full attention.

    Raises:
        ValueError: If a layer is of another kind, naming it.
    """
    if config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not served; use EncoderDecoderCache.")
    decoder_config = config.get_text_config(decoder=True)
    layers = DynamicCache(config=decoder_config).layers
    for layer_idx, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {layer_idx} of {decoder_config.model_type} is of kind "
                f"{_layer_kind(decoder_config, layer_idx, layer)}; this cache serves full_attention "
                "layers only. Use DynamicCache for this model."
            )
    return len(layers)


def column_window(config: PreTrainedConfig) -> int | None:
    """Mask columns that the model's local layers see, if it has any; else None."""
    # GPT-Neo's local layers mask by column, inside the model
    has_local = "local" in (getattr(config, "attention_layers", None) or [])
    return config.window_size if has_local else None


def _layer_kind(config: PreTrainedConfig, layer_idx: int, layer: object) -> str:
    named = getattr(config, "layer_types", None)
    if named:
        return str(named[layer_idx])
    kinds = [kind for kind, cls in DYNAMIC_LAYER_TYPE_MAPPING.items() if cls is type(layer)]
    return " or ".join(kinds) or type(layer).__name__
