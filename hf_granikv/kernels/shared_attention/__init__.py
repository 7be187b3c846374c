"""Attention of many packed queries to one shared set of keys."""

from hf_granikv.kernels.shared_attention.reference import (
    PackedStates,
    flash_shared_attention,
    gemm_shared_attention,
)

__all__ = ["PackedStates", "flash_shared_attention", "gemm_shared_attention"]
