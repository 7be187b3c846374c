"""The last act of a decode step: each row's own keys, and what its prefixes gave, in one pass."""

import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention.attention import DTYPES, MODULE, DecodeAttention, Place
from hf_granikv.kernels.decode_attention.states import GroupStates, Prefix, Segment
from hf_granikv.kernels.decode_attention.trial import largest_error
from hf_granikv.views import PrivateTokens

__all__ = ["DecodeAttention", "GroupStates", "Place", "Prefix", "Segment", "unsupported_reasons"]


def unsupported_reasons(query: Tensor, private: PrivateTokens) -> list[str]:
    """Gives every reason why `DecodeAttention` cannot serve; none = it can."""
    reasons = []
    for module in (MODULE, compiled.CHAIN):
        if isinstance(why := compiled.load(module), str) and why not in reasons:
            reasons.append(why)
    kinds = [query, *(private.storages or ())]
    if any(type(t) is not Tensor or not t.is_cpu or t.dtype != query.dtype for t in kinds):
        reasons.append("tensors are not of one dtype on a CPU")
    if query.dtype not in DTYPES:
        reasons.append(f"it takes bfloat16 and float32, not {query.dtype}")
    if query.shape[2] != 1 or not len(query):
        reasons.append("it takes one query per row, and some rows")
    if private.storages is None:
        reasons.append("the model has changed keys or values")
    if torch.is_grad_enabled():
        reasons.append("it gives no gradients")
    if not reasons and (fault := compiled.fault(MODULE, largest_error)):
        reasons.append(fault)
    return reasons
