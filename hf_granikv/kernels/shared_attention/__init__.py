"""Attention of many packed queries to one shared set of keys."""

from functools import partial

from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.compiled_attention import CompiledAttention
from hf_granikv.kernels.shared_attention.reference import (
    PackedStates,
    flash_shared_attention,
    gemm_shared_attention,
)
from hf_granikv.kernels.shared_attention.tiles import TiledAttention
from hf_granikv.kernels.shared_attention.trial import largest_error
from hf_granikv.kernels.shared_attention.vectors import VectorAttention

__all__ = [
    "COMPILED",
    "CompiledAttention",
    "PackedStates",
    "TiledAttention",
    "VectorAttention",
    "flash_shared_attention",
    "gemm_shared_attention",
    "unsupported_reasons",
]

# the faster first
COMPILED: tuple[type[CompiledAttention], ...] = (TiledAttention, VectorAttention)
_TRIALS = {kernel: partial(largest_error, kernel) for kernel in COMPILED}


def unsupported_reasons(
    kernel: type[CompiledAttention], query: Tensor, keys: Tensor, values: Tensor
) -> list[str]:
    """Gives every reason why a compiled kernel cannot serve, as its `run` takes them; none = it can."""
    tensors = (query, keys, values)
    if any(type(t) is not Tensor or not t.is_cpu or t.dtype not in kernel.dtypes for t in tensors):
        dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return [f"it takes {dtypes} on a CPU"]
    reasons = list(kernel.missing())
    if keys.stride(2) != 1 or values.stride(2) != 1:
        reasons.append("the numbers of a stored head do not lie side by side")
    if keys.is_neg() or values.is_neg():
        reasons.append("memory holds numbers of the other sign")
    if not keys.shape[1]:
        reasons.append("there is no key")
    if not query.numel():
        reasons.append("there is no query")
    reasons += kernel.reasons_against(*tensors)
    if not reasons and (fault := compiled.fault(kernel.module, _TRIALS[kernel])):
        reasons.append(fault)
    return reasons
