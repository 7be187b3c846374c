"""Stored keys and values as float32, for numba."""

from numba import carray, njit

from hf_granikv.kernels._numba_types import OPTIONS, as_float, float32_at, pointer_like
from hf_granikv.kernels._numba_vectors import load, load_bfloat16, store

_LANES = 16


@njit(**OPTIONS)
def widen(row, dim, to, like):  # type: ignore[no-untyped-def]
    """Puts the elements at an address, of the kind that the array `like` has, as float32."""
    whole = dim // _LANES * _LANES
    for e in range(0, whole, _LANES):
        store(to + 4 * e, _vector(row + like.itemsize * e, like))
    rest, wide = carray(pointer_like(row, like), (dim,)), carray(float32_at(to), (dim,))
    for e in range(whole, dim):
        wide[e] = as_float(rest[e])


@njit(**OPTIONS)
def _vector(address, like):  # type: ignore[no-untyped-def]
    """16 elements at an address."""
    if like.itemsize == 2:
        return load_bfloat16(address)
    return load(address)
