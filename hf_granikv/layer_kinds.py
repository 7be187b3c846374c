"""Which models a cache can serve, and which forwards of them, told from their config."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_granikv.config_layers import check_generates, in_words, layers_of, length_dependent_rope
from hf_granikv.pools import Prefix
from hf_granikv.row_prefixes import RowPrefixes
from hf_granikv.views import LayerKind

# their generate drops the cache where the long RoPE sets in
_CACHE_DROPPING_MODELS = ("phi3", "phimoe", "phi4_multimodal")
# past so many keys, two forwards give other results than one, with any cache: doge chooses among
# them, and moshi has no window, while its caches keep one
_CHOOSE_KEYS = {"doge": "keep_window_size", "moshi": "sliding_window"}
# what they do that no cache can make up for
_CODEBOOKS = "reads ids of several codebooks at each position, which is no text"
_POSITIONS = "counts positions on from its pad id, and generate hands it none of ours"
_OWN_WAYS = {
    **dict.fromkeys(("csm", "kyutai_speech_to_text"), _CODEBOOKS),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), _CODEBOOKS),
    **dict.fromkeys(("kosmos_2_text_model", "kosmos_2_5_text_model"), _POSITIONS),
    "dory": "loops over its layers and keeps their caches by itself, which takes layers that hold their "
    "own keys",
    "idefics": "takes no forward pass without an image, and a prefix is text",
    "prophetnet": "takes one token at a time once its cache holds any, so no row could go on from a prefix",
}
# these call view on keys and values, which DynamicCache returns contiguous
_VIEWS_KEYS = ("gpt_neox_japanese",)
# without position_ids, these count positions from the mask, as they should
_POSITIONS_FROM_MASK = ("bloom",)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a cache has to know of the model it was built for.

    Attributes:
        layers: What each layer stores and sees.
        model_type: The config's.
        num_q_heads: Query heads of a layer; the most where they differ.
        column_window: Mask columns that local layers see; None without such layers.
        temperature_from: Mask columns from which on queries are scaled by their column; None where
            they are not.
        continuable_to: Tokens up to which forwards may follow each other; None = any number.
        rope_type: `"dynamic"` or `"longrope"` if the angles depend on the length, else None.
        rope_limit: The length up to which they do not.
    """

    layers: tuple[LayerKind, ...]
    model_type: str
    num_q_heads: int
    column_window: int | None
    temperature_from: int | None
    continuable_to: int | None
    rope_type: str | None
    rope_limit: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ServedModel":
        """Reads a config.

        Raises:
            ValueError: If it is no config of a model that generates text with a cache, or the model
                has layers that cannot be served, naming their kind.
        """
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config is a {type(config).__name__}; pass model.config.")
        if config.is_encoder_decoder:
            raise ValueError("encoder-decoder models are not served; use EncoderDecoderCache.")
        whole, config = config, config.get_text_config(decoder=True)
        model_type = config.model_type
        try:
            layers = layers_of(config)
        except AttributeError:
            # what generates no text may have no layers to ask for
            check_generates(whole)
            raise
        check_generates(whole)
        has_states = any(layer.num_states for layer in layers)
        if has_states and not any(layer.stores and layer.window is None for layer in layers):
            raise ValueError(
                f"layer 0 of {model_type} is of kind {layers[0].name}, and no layer has full "
                "attention: there is nothing to share. Use DynamicCache for this model."
            )
        if has_states and any(layer.window is not None for layer in layers):
            raise ValueError(
                f"{model_type} has local layers beside layers that keep states; use DynamicCache "
                "for this model."
            )
        if model_type in _OWN_WAYS:
            raise ValueError(f"{model_type} {_OWN_WAYS[model_type]}; generate without this cache.")
        rope_type, rope_limit = length_dependent_rope(config)
        if rope_type is not None and model_type in _CACHE_DROPPING_MODELS:
            raise ValueError(
                f"{model_type} drops its cache where its RoPE ({rope_type}) changes, past "
                f"{rope_limit} tokens; use DynamicCache for this model."
            )
        # GPT-Neo's local layers mask by column, inside the model
        has_local = "local" in (getattr(config, "attention_layers", None) or [])
        window = config.window_size if has_local else None
        is_tuned = getattr(config, "attn_temperature_tuning", False)
        temperature_from = int(config.floor_scale) if is_tuned else None
        limit = _CHOOSE_KEYS.get(model_type)
        continuable_to = None if limit is None else int(getattr(config, limit))
        heads = getattr(config, "num_attention_heads", 1)
        return cls(
            layers,
            model_type,
            max(heads) if isinstance(heads, (list, tuple)) else int(heads),
            window,
            temperature_from,
            continuable_to,
            rope_type,
            rope_limit,
        )

    def check_same(self, other: "ServedModel", name: str) -> None:
        """Checks that a model asks of the cache what it was built for.

        Args:
            other: The model's.
            name: What to call it.

        Raises:
            ValueError: If it has other layers.
        """
        if len(other.layers) != len(self.layers):
            raise ValueError(
                f"{name} has {len(other.layers)} layers, the cache was built for "
                f"{len(self.layers)}; build the cache from model.config."
            )
        for layer_idx, (its, ours) in enumerate(zip(other.layers, self.layers, strict=True)):
            if its != ours:
                raise ValueError(
                    f"layer {layer_idx} of {name} is {in_words(its)}, the cache was built for "
                    f"{in_words(ours)}; build the cache from model.config."
                )

    @property
    def views_keys(self) -> bool:
        """Whether the model needs contiguous keys and values."""
        return self.model_type in _VIEWS_KEYS

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps states."""
        return any(layer.num_states for layer in self.layers)

    def check_can_take_back(self, asked: str) -> None:
        """Checks that tokens can be taken away again.

        Args:
            asked: What needs that.

        Raises:
            ValueError: If some layer keeps a state that has read them.
        """
        if self.has_states:
            raise ValueError(
                f"{asked} is not possible: {self._first_stateful} keeps a state that cannot give "
                "tokens back. Decode without candidates (no assistant_model, no prompt lookup), "
                "and start rows again with cache.reset()."
            )

    def check_reach(self, reads: RowPrefixes) -> None:
        """Checks that every layer has stored what queries after the tokens of the prefixes see.

        Raises:
            ValueError: If a local layer has stored too little of a prefix for that.
        """
        windows = [
            (i, kind.window) for i, kind in enumerate(self.layers) if kind.window is not None
        ]
        seen = zip(reads.leaves, reads.lengths.tolist(), strict=True) if windows else ()
        for leaf, length in set(seen):
            if leaf is None:
                continue
            for level in leaf.levels:
                for layer_idx, window in windows:
                    first = max(window.first_reached(length), level.reads_from)
                    if first < min(length, level.stop, level.starts[layer_idx]):
                        raise ValueError(
                            f"rows would go on after {length} of the {leaf.stop} tokens of the "
                            f"prefix; layer {layer_idx}, with a window of {window.size}, holds it "
                            f"from token {level.starts[layer_idx]} on. Give rows tokens of their "
                            "own, and do not crop into the prefix."
                        )

    def check_together(self, leaves: Sequence[Prefix | None]) -> None:
        """Checks that rows which read these prefixes can be one batch.

        Raises:
            ValueError: If layers keep states and the rows do not all read the same.
        """
        if self.has_states and len(set(leaves)) > 1:
            raise ValueError(
                f"{self._first_stateful} keeps a state, so all rows of a batch must read the same "
                f"prefix; these read {len(set(leaves))}. Run one batch for each."
            )

    @property
    def has_length_limit(self) -> bool:
        """Whether `check_length` may refuse."""
        return self.rope_type is not None or self.continuable_to is not None

    def check_length(self, prefix_len: int, length: int) -> None:
        """Checks that keys of the prefix are still those that a forward of this length has.

        Raises:
            ValueError: If RoPE has changed its angles in between, or the model chooses among keys.
        """
        if self.continuable_to is not None and length > self.continuable_to:
            raise ValueError(
                f"{self.model_type} attends to other keys in two forwards than in one past "
                f"{self.continuable_to} tokens, with any cache, so {length} tokens cannot be right. "
                "Stay below, or use no cache."
            )
        is_changed = length > self.rope_limit and (
            self.rope_type == "dynamic" or prefix_len <= self.rope_limit
        )
        if self.rope_type is not None and is_changed:
            raise ValueError(
                f"the RoPE of this model ({self.rope_type}) changes past {self.rope_limit} tokens: "
                f"the {prefix_len} tokens of the prefix cannot be used at {length}. Stay below, or "
                "use DynamicCache."
            )

    def why_no_pads(self, *, takes_positions: bool, reads_pads: bool = True) -> str | None:
        """Why no padded rows can be right, however long they are; None if some can.

        Args:
            takes_positions: Whether the model's forward takes `position_ids`.
            reads_pads: Whether layers with states have read some of the pads, or are about to.
        """
        if self.has_states and reads_pads:
            return f"{self._first_stateful} keeps a state that would read pads as tokens"
        if not takes_positions and self.model_type not in _POSITIONS_FROM_MASK:
            return f"{self.model_type} takes no position_ids and counts pads as positions"
        return None

    def why_masked(self, attention: str, *, takes_positions: bool) -> str | None:
        """Why rows of different length need masks; None if nothing is known of that.

        Args:
            attention: The model's attention implementation.
            takes_positions: Whether its forward takes `position_ids`.
        """
        if attention != "granikv":
            return f"its attention is {attention!r}, not 'granikv'"
        if self.column_window is not None or self.temperature_from is not None:
            return "its attention counts columns"
        if self.rope_type is not None:
            return f"its RoPE ({self.rope_type}) depends on the length of a forward"
        return None if takes_positions else "its forward takes no position_ids"

    def check_padding(
        self, num_columns: int, *, takes_positions: bool, reads_pads: bool = True
    ) -> None:
        """Checks that the model can tell pads from tokens.

        Args:
            num_columns: Columns of a mask that has pads.
            takes_positions: Whether its forward takes `position_ids`.
            reads_pads: See `why_no_pads`.

        Raises:
            ValueError: If padded rows cannot be right.
        """
        if reason := self.why_no_pads(takes_positions=takes_positions, reads_pads=reads_pads):
            raise ValueError(
                f"{reason}, so padded rows cannot be right. Run rows of equal length, or one at a time."
            )
        if self.temperature_from is not None and num_columns >= self.temperature_from:
            raise ValueError(
                f"{self.model_type} tunes the temperature of its attention by columns from "
                f"{self.temperature_from} on, pads among them; {num_columns} padded columns cannot "
                "be right. Run rows of equal length, or one at a time."
            )
        if self.column_window is not None and num_columns > self.column_window:
            raise ValueError(
                f"the local attention of {self.model_type} sees {self.column_window} mask columns, "
                f"pads among them; {num_columns} padded columns cannot be right. Run rows of "
                "equal length, or one at a time."
            )

    @property
    def _first_stateful(self) -> str:
        layer_idx, layer = next((i, kind) for i, kind in enumerate(self.layers) if kind.num_states)
        return f"layer {layer_idx} of {self.model_type} ({layer.name})"
