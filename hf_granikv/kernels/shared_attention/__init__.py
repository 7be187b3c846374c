"""Attention of many packed queries to one shared set of keys."""

from hf_granikv.kernels.shared_attention.reference import (
    PackedStates,
    flash_shared_attention,
    gemm_shared_attention,
)
from hf_granikv.kernels.shared_attention.tiles import TiledAttention, unsupported_reasons

__all__ = [
    "PackedStates",
    "TiledAttention",
    "flash_shared_attention",
    "gemm_shared_attention",
    "unsupported_reasons",
]
