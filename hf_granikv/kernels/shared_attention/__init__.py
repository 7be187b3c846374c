"""Attention of many packed queries to one shared set of keys."""

from hf_granikv.kernels.shared_attention.reference import (
    flash_shared_attention,
    gemm_shared_attention,
)

__all__ = ["flash_shared_attention", "gemm_shared_attention"]
