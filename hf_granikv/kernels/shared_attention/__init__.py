"""Attention of many packed queries to one shared set of keys."""

import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.reference import (
    PackedStates,
    flash_shared_attention,
    gemm_shared_attention,
)
from hf_granikv.kernels.shared_attention.tiles import MODULE, TiledAttention, missing
from hf_granikv.kernels.shared_attention.trial import largest_error

__all__ = [
    "PackedStates",
    "TiledAttention",
    "flash_shared_attention",
    "gemm_shared_attention",
    "unsupported_reasons",
]


def unsupported_reasons(query: Tensor, keys: Tensor, values: Tensor) -> list[str]:
    """Gives every reason why `TiledAttention` cannot serve; none = it can."""
    reasons = list(missing())
    tensors = (query, keys, values)
    if any(type(t) is not Tensor or not t.is_cpu or t.dtype != torch.bfloat16 for t in tensors):
        reasons.append("it takes bfloat16 on a CPU")
    if keys.stride(2) != 1 or values.stride(2) != 1:
        reasons.append("the numbers of a stored head do not lie side by side")
    if keys.shape[2] % 32 or values.shape[2] % 64 or not keys.shape[1]:
        reasons.append("it takes keys of 32, 64, ... numbers, values of 64, 128, ..., and some")
    if not query.numel():
        reasons.append("there is no query")
    if not reasons and (fault := compiled.fault(MODULE, largest_error)):
        reasons.append(fault)
    return reasons
