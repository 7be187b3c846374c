"""The mask function that goes with the attention function."""

from functools import cache
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask


def granikv_mask(*, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """The mask that SDPA would get, marked if it says no more than causality and padding.

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
    mask: Tensor | None = sdpa_mask(config=config, **kwargs)
    if mask is not None and kwargs.get("mask_function") is causal_mask_function:
        mask._is_plain_causal = True  # type: ignore[attr-defined]
    return mask


def is_plain_causal(mask: Tensor | None) -> bool:
    """Whether a mask that reached an attention layer is `granikv_mask`'s own and holds no more."""
    return mask is None or getattr(mask, "_is_plain_causal", False)


@cache
def _has_interface(config_type: type) -> bool:
    if config_type not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    model_type: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_type]
    return bool(model_type._can_set_attn_implementation())
