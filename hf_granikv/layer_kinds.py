"""Which models a cache can serve, and which forwards of them, told from their config."""

from dataclasses import dataclass, field

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

from hf_granikv.hybrids import EXACT_HYBRIDS, StateSpec, read_states

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
        num_layers: Layers; of full attention, if `state_specs` does not say otherwise.
        model_type: The config's.
        column_window: Mask columns that local layers see; None without such layers.
        rope_type: `"dynamic"` or `"longrope"` if the angles depend on the length, else None.
        rope_limit: The length up to which they do not.
        state_specs: Layer index -> what it keeps, for layers that are not just full attention.
    """

    num_layers: int
    model_type: str
    column_window: int | None
    rope_type: str | None
    rope_limit: int
    state_specs: dict[int, StateSpec] = field(default_factory=dict)

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
        kinds = [_layer_kind(config, layer_idx, layer) for layer_idx, layer in enumerate(layers)]
        state_specs = read_states(model_type, kinds, layers)
        for layer_idx, layer in enumerate(layers):
            if type(layer) is not DynamicLayer and layer_idx not in state_specs:
                raise ValueError(
                    f"layer {layer_idx} of {model_type} is of kind "
                    f"{kinds[layer_idx]}; this cache serves full_attention layers, and others "
                    f"beside them in {', '.join(EXACT_HYBRIDS)}. Use DynamicCache for this model."
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
        return cls(len(layers), model_type, window, rope_type, rope_limit, state_specs)

    @property
    def num_attending(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - sum(not s.has_attention for s in self.state_specs.values())

    @property
    def stateful(self) -> list[int]:
        """Layers that keep states."""
        return [layer_idx for layer_idx, spec in self.state_specs.items() if spec.num_states]

    def check_can_take_back(self, asked: str) -> None:
        """Checks that tokens can be taken away again.

        Args:
            asked: What needs that.

        Raises:
            ValueError: If some layer keeps a state that has read them.
        """
        if self.stateful:
            raise ValueError(
                f"{asked} is not possible: {self._first_stateful} keeps a state that cannot give "
                "tokens back. Decode without candidates (no assistant_model, no prompt lookup), "
                "and start rows again with cache.reset()."
            )

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

    def check_padding(self, mask: Tensor | None, *, takes_positions: bool) -> None:
        """Checks that the model can tell pads from tokens.

        Args:
            mask: `[num_rows, num_columns]`, or None if there are no pads.
            takes_positions: Whether its forward takes `position_ids`.

        Raises:
            ValueError: If padded rows cannot be right.
        """
        if mask is None:
            return
        if self.stateful:
            raise ValueError(
                f"{self._first_stateful} keeps a state that would read pads as tokens, so rows of "
                "different length cannot be right. Run rows of equal length, or one at a time."
            )
        if not takes_positions and self.model_type not in _POSITIONS_FROM_MASK:
            raise ValueError(
                f"{self.model_type} takes no position_ids and counts pads as positions, so padded "
                "rows cannot be right. Run rows of equal length, or one at a time."
            )
        if self.column_window is not None and mask.shape[-1] > self.column_window:
            raise ValueError(
                f"the local attention of {self.model_type} sees {self.column_window} mask columns, "
                f"pads among them; {mask.shape[-1]} padded columns cannot be right. Run rows of "
                "equal length, or one at a time."
            )

    @property
    def _first_stateful(self) -> str:
        layer_idx = self.stateful[0]
        return f"layer {layer_idx} of {self.model_type} ({self.state_specs[layer_idx].kind})"


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
