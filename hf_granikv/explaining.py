"""What `granikv explain` does: reckons a decode step of a model on a device, without running it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from hf_granikv.backends import BACKENDS
from hf_granikv.calibrating import usable_device
from hf_granikv.config import check_is_there
from hf_granikv.dispatch import constants_for
from hf_granikv.dispatch.known_devices import ON_PAPER
from hf_granikv.dispatch.prediction import KindPrediction, Load, ModelShape, predict_kinds
from hf_granikv.dispatch.roofline import DeviceConstants
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.views import LayerKind
from hf_granikv.wording import counted

DTYPES = ("float32", "bfloat16", "float16")


def _uniform(
    name: str, num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> ModelShape:
    return ModelShape(name, num_q_heads, num_kv_heads, head_dim, (LayerKind(),) * num_layers)


# of the models' own configs
KNOWN_MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _uniform("smollm2-135m", 30, 9, 3, 64),
        _uniform("llama-3.1-8b", 32, 32, 8, 128),
        _uniform("llama-3.1-70b", 80, 64, 8, 128),
        _uniform("qwen3-8b", 36, 32, 8, 128),
        _uniform("qwen3-14b", 40, 40, 8, 128),
        _uniform("qwen3-32b", 64, 64, 8, 128),
    )
}


def model_shape(name: str, dtype: str | None) -> ModelShape:
    """Gives the shape of a model.

    Args:
        name: One of `KNOWN_MODELS`, the path of a config or of a folder with one, or a hub id.
        dtype: Torch's name of its numbers; None takes the config's.

    Raises:
        ValueError: If there is no such model, or it cannot be predicted.
    """
    known = KNOWN_MODELS.get(name.lower())
    if known is not None:
        return _with_dtype(known, dtype)
    try:
        check_is_there(name)
        config = AutoConfig.from_pretrained(name)
    # the libraries below have errors of many kinds for a name that they do not know
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name} is no model that can be looked up here ({first_line.rstrip('.')}); give the path of its "
            f"config.json, or one of {', '.join(KNOWN_MODELS)}."
        ) from error
    return _with_dtype(_of_config(name, config), dtype)


def known_constants(device: str | None) -> DeviceConstants:
    """Gives what a device can do; None is this one.

    Raises:
        ValueError: If it is neither known nor here.
    """
    on_paper = ON_PAPER.get((device or "").lower())
    if on_paper is not None:
        return on_paper
    try:
        return constants_for(usable_device(device))
    except ValueError as error:
        raise ValueError(
            f"{error} Devices that are known on paper: {', '.join(ON_PAPER)}."
        ) from error


def explained(model: ModelShape, load: Load, constants: DeviceConstants) -> list[str]:
    """Gives the reckoning of one decode step, a fact a line."""
    kinds = predict_kinds(model, load, constants=constants, backends=BACKENDS)
    ours_s = sum(kind.num_layers * kind.ours_s for kind in kinds)
    dynamic_s = sum(kind.num_layers * kind.dynamic_s for kind in kinds)
    shared = sum(kind.num_layers * kind.shared_bytes for kind in kinds)
    private = sum(kind.num_layers * kind.private_bytes for kind in kinds)
    dynamic = sum(kind.num_layers * kind.dynamic_bytes for kind in kinds)
    return [
        f"{model.name}: {len(model.layers)} layers with {model.num_q_heads} query and "
        f"{model.num_kv_heads} key/value heads of {model.head_dim}, {model.dtype}",
        f"{counted(load.num_rows, 'row')} over {load.prefix_len} shared tokens, {load.suffix_len} private "
        "tokens each: one decode step, attention only",
        f"{constants.name}: {constants.origin}",
        *(line for kind in kinds for line in _of_kind(kind)),
        "",
        f"{'a step':<20}{_time(ours_s)}",
        f"{'  DynamicCache':<20}{_time(dynamic_s)}   {_ratio(dynamic_s, ours_s)}",
        f"cache               {shared + private:,} bytes (prefix {shared:,}, rows {private:,})",
        f"  DynamicCache      {dynamic:,} bytes   {_ratio(dynamic, shared + private)}",
    ]


def _of_kind(kind: KindPrediction) -> Iterator[str]:
    window = kind.layer.window
    seen = "" if window is None else f" that see {window.size} tokens"
    yield f"\n{kind.num_layers} layers{seen}, each:"
    for name, seconds in kind.prefix_s.items():
        is_chosen = name == kind.fastest
        note = f"   chosen, {kind.regime}-bound" if is_chosen else ""
        yield f"{'* ' if is_chosen else '  '}{name:<18}{_time(seconds)}{note}"
    for name, reasons in kind.refused.items():
        yield f"  {name:<18}refused: {', '.join(reasons)}"
    if not kind.prefix_s:
        yield "  no token of the prefix is seen any more"
    yield f"  {'suffix and merge':<18}{_time(kind.suffix_s)}"
    yield f"  {'DynamicCache':<18}{_time(kind.dynamic_s)}"


def _of_config(name: str, config: Any) -> ModelShape:
    layers = ServedModel.from_config(config).layers
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{name} caches latents, which are expanded before attention; that is not predicted. "
            "Run it, and read cache.explain()."
        )
    num_q_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_q_heads
    sizes = (num_q_heads, num_kv_heads, head_dim)
    is_even = getattr(config, "global_head_dim", None) in (None, head_dim)
    if not is_even or not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"the layers of {name} differ in their heads; that is not predicted. Run it, and read "
            "cache.explain()."
        )
    attending = tuple(layer for layer in layers if layer.stores or not layer.num_states)
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    dtype = dtype if dtype in DTYPES else "bfloat16"
    return ModelShape(name, num_q_heads, num_kv_heads, head_dim, attending, dtype)


def _with_dtype(shape: ModelShape, dtype: str | None) -> ModelShape:
    return shape if dtype is None else replace(shape, dtype=dtype)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:>9.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:>9.2f} ms"


def _ratio(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.1f}x ours" if ours else ""
