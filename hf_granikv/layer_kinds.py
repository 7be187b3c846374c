"""Which models a cache can serve, and which forwards of them, told from their config."""

from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

# their layers hand sinks to the attention function, whatever kind of layer the cache sees
_SINK_MODELS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
# their generate drops the cache where the long RoPE sets in
_CACHE_DROPPING_MODELS = ("phi3", "phimoe", "phi4_multimodal")
# without position_ids, these count positions from the mask, as they should
_POSITIONS_FROM_MASK = ("bloom",)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a cache has to know of the model it was built for.

    Attributes:
        num_layers: Layers, all of full attention.
        model_type: The config's.
        column_window: Mask columns that local layers see; None without such layers.
        rope_type: `"dynamic"` or `"longrope"` if the angles depend on the length, else None.
        rope_limit: The length up to which they do not.
    """

    num_layers: int
    model_type: str
    column_window: int | None
    rope_type: str | None
    rope_limit: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ServedModel":
        """Reads a config.

        Raises:
            ValueError: If the model has layers that cannot be served, naming their kind.
        """
        if config.is_encoder_decoder:
            raise ValueError("encoder-decoder models are not served; use EncoderDecoderCache.")
        config = config.get_text_config(decoder=True)
        model_type = config.model_type
        layers = DynamicCache(config=config).layers
        for layer_idx, layer in enumerate(layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"layer {layer_idx} of {model_type} is of kind "
                    f"{_layer_kind(config, layer_idx, layer)}; this cache serves full_attention "
                    "layers only. Use DynamicCache for this model."
                )
        if model_type in _SINK_MODELS:
            raise ValueError(
                f"{model_type} has attention sinks, which this cache does not serve yet. Use "
                "DynamicCache for this model."
            )
        rope_type, rope_limit = _length_dependent_rope(config)
        if rope_type is not None and model_type in _CACHE_DROPPING_MODELS:
            raise ValueError(
                f"{model_type} drops its cache where its RoPE ({rope_type}) changes, past "
                f"{rope_limit} tokens; use DynamicCache for this model."
            )
        # GPT-Neo's local layers mask by column, inside the model
        has_local = "local" in (getattr(config, "attention_layers", None) or [])
        window = config.window_size if has_local else None
        return cls(len(layers), model_type, window, rope_type, rope_limit)

    def check_length(self, prefix_len: int, length: int) -> None:
        """Checks that keys of the prefix are still those that a forward of this length has.

        Raises:
            ValueError: If RoPE has changed its angles in between.
        """
        is_changed = length > self.rope_limit and (
            self.rope_type == "dynamic" or prefix_len <= self.rope_limit
        )
        if self.rope_type is not None and is_changed:
            raise ValueError(
                f"the RoPE of this model ({self.rope_type}) changes past {self.rope_limit} tokens: "
                f"the {prefix_len} tokens of the prefix cannot be used at {length}. Stay below, or "
                "use DynamicCache."
            )

    def check_padding(self, num_columns: int, *, takes_positions: bool) -> None:
        """Checks that the model can tell pads from tokens.

        Args:
            num_columns: Columns of a mask that has pads.
            takes_positions: Whether its forward takes `position_ids`.

        Raises:
            ValueError: If padded rows cannot be right.
        """
        if not takes_positions and self.model_type not in _POSITIONS_FROM_MASK:
            raise ValueError(
                f"{self.model_type} takes no position_ids and counts pads as positions, so padded "
                "rows cannot be right. Run rows of equal length, or one at a time."
            )
        if self.column_window is not None and num_columns > self.column_window:
            raise ValueError(
                f"the local attention of {self.model_type} sees {self.column_window} mask columns, "
                f"pads among them; {num_columns} padded columns cannot be right. Run rows of "
                "equal length, or one at a time."
            )


def _layer_kind(config: PreTrainedConfig, layer_idx: int, layer: object) -> str:
    named = getattr(config, "layer_types", None)
    if named:
        return str(named[layer_idx])
    kinds = [kind for kind, cls in DYNAMIC_LAYER_TYPE_MAPPING.items() if cls is type(layer)]
    return " or ".join(kinds) or type(layer).__name__


def _length_dependent_rope(config: PreTrainedConfig) -> tuple[str | None, int]:
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
    if rope_type not in ("dynamic", "longrope"):
        return None, 0
    limit = rope.get("original_max_position_embeddings")
    limit = limit or getattr(config, "original_max_position_embeddings", None)
    return rope_type, int(limit or config.max_position_embeddings)
