"""The mask function that goes with the attention function."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hf_granikv.views import Window


def granikv_mask(*, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """See `mask_of_columns`; None for a forward without any column, as graphs have it of a cache."""
    if torch.compiler.is_dynamo_compiling() and kwargs["kv_length"] == 0:
        return None
    return mask_of_columns(config=config, **kwargs)


# the mark on the mask does not come out of a graph
@torch.compiler.disable
def mask_of_columns(*, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """The mask that SDPA would get, marked if position, window and padding say it all.

    Models without an attention interface add their mask to the scores, whatever the name of their
    attention is; they get the additive one.

    Args:
        config: The model's config.
        kwargs: What transformers hands to mask functions.

    Returns:
        `[rows, 1, q_len, kv_len]`, or None if causality alone says it all.
    """
    config_type: Any = type(config)
    if not _has_interface(config_type):
        return eager_mask(config=config, **kwargs)
    if not _supports_sdpa(config_type):
        # the layers of such models need not say that they are causal; then no mask means none
        kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(config=config, **kwargs)
    if mask is not None and (
        marks := _window_of(kwargs["mask_function"], kwargs.get("local_size"))
    ):
        mask._granikv_window = marks[0]  # type: ignore[attr-defined]
    return mask


def says_no_more_than(mask: Tensor | None, window: Window | None) -> bool:
    """Whether a mask that reached an attention layer hides what a window and padding hide.

    That is so for `granikv_mask`'s own. It is None where the window covers every column.

    Args:
        mask: `[rows, 1, q_len, kv_len]`, or None.
        window: Of the layer.
    """
    return mask is None or getattr(mask, "_granikv_window", _UNMARKED) == window


def _window_of(mask_function: Any, size: int | None) -> tuple[Window | None] | None:
    """The window of one of transformers' own causal mask functions; None for any other function."""
    if mask_function is causal_mask_function:
        return (None,)
    parts = _parts(mask_function)
    is_local = len(parts) == 2 and parts[1] is causal_mask_function
    if not is_local or size is None or (code := parts[0].__code__) not in _IS_CHUNKED:
        return None
    return (Window(size, _IS_CHUNKED[code]),)


def _parts(mask_function: Any) -> tuple[Any, ...]:
    if getattr(mask_function, "__code__", None) is not _AND:
        return ()
    parts: tuple[Any, ...] = mask_function.__closure__[0].cell_contents
    return parts


# local masks are intersections made anew for every forward: only their code can be recognised
_AND = and_masks().__code__
_sliding: Any = sliding_window_causal_mask_function(1)
_chunked: Any = chunked_causal_mask_function(1, torch.zeros(1))
_IS_CHUNKED = {_parts(_sliding)[0].__code__: False, _parts(_chunked)[0].__code__: True}
_UNMARKED = object()


@cache
def _has_interface(config_type: type) -> bool:
    model_type = _model_type(config_type)
    return model_type is None or bool(model_type._can_set_attn_implementation())


@cache
def _supports_sdpa(config_type: type) -> bool:
    model_type = _model_type(config_type)
    return model_type is None or bool(model_type._supports_sdpa)


def _model_type(config_type: type) -> Any:
    is_mapped = config_type in MODEL_FOR_CAUSAL_LM_MAPPING
    return MODEL_FOR_CAUSAL_LM_MAPPING[config_type] if is_mapped else None
