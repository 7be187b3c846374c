"""What a config says of the layers of its model, and of the angles of its positions."""

import inspect
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hf_granikv.compat import DummyLayer
from hf_granikv.hybrids import EXACT_HYBRIDS, stateful_kind
from hf_granikv.views import LayerKind, Window


def layers_of(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """What each layer stores and sees.

    Args:
        config: Of the text model.

    Raises:
        ValueError: If one cannot be served, naming its kind.
    """
    layers = enumerate(_stock_layers(config))
    return tuple(_kind(config, layer_idx, layer) for layer_idx, layer in layers)


def check_generates(config: PreTrainedConfig) -> None:
    """Checks that the model of a config generates text, token after token, with a `Cache`.

    Raises:
        ValueError: If it does not, naming the model.
    """
    model_class = _model_class(type(config))
    if model_class is None:
        return
    name, given = model_class.__name__, inspect.signature(model_class.forward).parameters
    kinds = [str(given[arg].annotation) for arg in ("cache", "past_key_values") if arg in given]
    has_own = getattr(model_class, "_supports_default_dynamic_cache", lambda: True)() is False
    # XLM's is a dict; annotations of others may be outdated
    if has_own or all("dict" in kind for kind in kinds):
        raise ValueError(
            f"{config.model_type} ({name}) has no cache, or a cache of its own kind; this one serves "
            "decoders that generate text with DynamicCache."
        )
    # encoders of the family of BERT see both ways unless they are told to be decoders
    is_of_bert = hasattr(config, "add_cross_attention") and "encoder_hidden_states" in given
    if is_of_bert and getattr(config, "is_decoder", None) is False:
        raise ValueError(
            f"{config.model_type} sees tokens that come later while is_decoder=False; build the model "
            "with is_decoder=True, and the cache from model.config."
        )


def _model_class(config_type: type[PreTrainedConfig]) -> Any:
    """The class of the language model of a config, or of its model; None if that is not known."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        try:
            found = mapping.get(config_type, None)
        except (AttributeError, ImportError):
            found = None
        if found is not None:
            return found[0] if isinstance(found, (list, tuple)) else found
    return None


def in_words(kind: LayerKind) -> str:
    """What a layer is, for somebody who knows the model."""
    if not kind.stores and not kind.num_states:
        return "a layer that reads the keys of another one"
    parts = []
    if kind.stores:
        window = kind.window
        size = (
            None
            if window is None
            else f"{'chunks' if window.is_chunked else 'a window'} of {window.size}"
        )
        parts.append("full attention" if size is None else f"attention in {size} tokens")
    if kind.num_states:
        parts.append(f"{kind.num_states} states of each sort ({kind.name})")
    return " and ".join(parts)


def _kind(config: PreTrainedConfig, layer_idx: int, layer: Any) -> LayerKind:
    if type(layer) is DynamicLayer:
        return LayerKind()
    if DummyLayer is not None and type(layer) is DummyLayer:
        return LayerKind(stores=False)
    name = _name(config, layer_idx, layer)
    if type(layer) is DynamicSlidingWindowLayer and name in (
        "sliding_attention",
        "chunked_attention",
    ):
        return LayerKind(window=Window(layer.sliding_window, name == "chunked_attention"))
    kind = stateful_kind(config.model_type, name, layer)
    if kind is None:
        raise _not_served(config, layer_idx, name)
    return kind


def _stock_layers(config: PreTrainedConfig) -> list[Any]:
    try:
        return DynamicCache(config=config).layers
    except KeyError as error:
        # kinds that a model's own module registers are not known before that is imported
        (name,) = error.args
        kinds = list(getattr(config, "layer_types", None) or [])
        if name not in kinds:
            raise
        raise _not_served(config, kinds.index(name), name) from None


def _not_served(config: PreTrainedConfig, layer_idx: int, name: str) -> ValueError:
    return ValueError(
        f"layer {layer_idx} of {config.model_type} is of kind {name}; this cache serves "
        "full_attention, sliding_attention and chunked_attention layers, and layers with states in "
        f"{', '.join(EXACT_HYBRIDS)}. Use DynamicCache for this model."
    )


def _name(config: PreTrainedConfig, layer_idx: int, layer: object) -> str:
    named = getattr(config, "layer_types", None)
    if named:
        return str(named[layer_idx])
    if isinstance(layer, DynamicSlidingWindowLayer):
        has_window = getattr(config, "sliding_window", None) is not None
        return "sliding_attention" if has_window else "chunked_attention"
    kinds = [kind for kind, cls in DYNAMIC_LAYER_TYPE_MAPPING.items() if cls is type(layer)]
    return " or ".join(kinds) or type(layer).__name__


def length_dependent_rope(config: PreTrainedConfig) -> tuple[str | None, int]:
    """The type of a RoPE whose angles depend on the length, or None, and the length up to which not."""
    given = getattr(config, "rope_parameters", None) or {}
    # one for all layers, or one for each kind of layer
    by_kind = [rope for rope in given.values() if isinstance(rope, dict) and "rope_type" in rope]
    found: tuple[str | None, int] = None, 0
    for rope in by_kind or [given]:
        rope_type = rope.get("rope_type")
        if rope_type not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings")
        limit = limit or getattr(config, "original_max_position_embeddings", None)
        limit = int(limit or config.max_position_embeddings)
        # "dynamic" is the stricter of the two, and the smaller limit
        is_stricter = found[0] is None or rope_type == "dynamic"
        found = rope_type if is_stricter else found[0], min(limit, found[1] or limit)
    return found
