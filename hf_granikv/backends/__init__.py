"""Algorithms for the prefix part of an attention step, by name."""

from hf_granikv.backends.base import PrefixBackend
from hf_granikv.backends.batched_gemm import BatchedGemmBackend
from hf_granikv.backends.cascade import CascadeBackend
from hf_granikv.backends.per_row import PerRowBackend

BACKENDS: dict[str, PrefixBackend] = {
    backend.name: backend for backend in (CascadeBackend(), BatchedGemmBackend(), PerRowBackend())
}

__all__ = ["BACKENDS", "PrefixBackend"]
