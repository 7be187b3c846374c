"""Attention of each row to its own keys."""

from hf_granikv.kernels.suffix_attention.reference import (
    SuffixMask,
    prepare_mask,
    suffix_attention,
)

__all__ = ["SuffixMask", "prepare_mask", "suffix_attention"]
