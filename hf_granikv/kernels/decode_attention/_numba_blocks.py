"""What the compiled `decode_attention` does to a block of up to 16 tokens."""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_rows import widen
from hf_granikv.kernels._numba_types import OPTIONS, float32_at
from hf_granikv.kernels._numba_vectors import (
    add,
    exp2_of_negative,
    fma,
    full,
    larger,
    largest_of,
    load,
    mul,
    prefetch,
    store,
    sub,
    sum_of,
    sums_of_rows,
)

_F = np.float32

# numbers of a vector; rows of scratch memory are whole vectors wide
LANES = 16
# as far ahead keys and values are fetched into the cache, in tokens
AHEAD = 32
_LOG2_E = 1.4426950408889634


@njit(**OPTIONS)
def find(rows, stride, slots, dim, to, width, places, like):  # type: ignore[no-untyped-def]
    """Where the elements of some slots are in float32: as they lie, or put to rows of `width`."""
    for j in range(len(slots)):
        row = rows + slots[j] * stride
        if like.itemsize == 4 and dim == width:
            places[j] = row
        else:
            places[j] = to + 4 * width * j
            widen(row, dim, places[j], like)


@njit(**OPTIONS)
def prefetch_tokens(rows, stride, slots, num_bytes):  # type: ignore[no-untyped-def]
    """Fetches so many bytes of each token in some slots."""
    for j in range(len(slots)):
        for offset in range(0, num_bytes, 64):
            prefetch(rows + slots[j] * stride + offset)


@njit(**OPTIONS)
def prefetch_ahead(j, rows, stride, slots, num_bytes, following):  # type: ignore[no-untyped-def]
    """Fetches the tokens that are `AHEAD` of the j-th; behind the last one, the first that follow."""
    start, stop = j + AHEAD, j + AHEAD + LANES
    prefetch_tokens(rows, stride, slots[start:stop], num_bytes)
    if stop > len(slots):
        rows, stride, next_slots, num_bytes = following
        first = max(start - len(slots), 0) if j > 0 else 0
        prefetch_tokens(rows, stride, next_slots[first : stop - len(slots)], num_bytes)


@njit(**OPTIONS)
def score(queries, ratio, keys, width, products, scores, scores_row):  # type: ignore[no-untyped-def]
    """Scores of up to 16 tokens; those that are none get the lowest of all."""
    for i in range(ratio):
        query = queries + 4 * width * i
        for j in range(len(keys)):
            total = full(_F(0))
            for e in range(0, 4 * width, 64):
                total = fma(load(query + e), load(keys[j] + e), total)
            store(products + 64 * j, total)
        for j in range(len(keys), LANES):
            store(products + 64 * j, full(_F(-np.inf)))
        store(scores + i * scores_row, sums_of_rows(products))


@njit(**OPTIONS)
def add_weighted(sums, ratio, values, width, weights, weights_row):  # type: ignore[no-untyped-def]
    """Adds up to 16 weighted values to the sum of each query."""
    for i in range(ratio):
        weight = carray(float32_at(weights + i * weights_row), (LANES,))
        for e in range(0, 4 * width, 64):
            at = sums + 4 * width * i + e
            even, odd = load(at), full(_F(0))
            for j in range(0, len(values) - 1, 2):
                even = fma(full(weight[j]), load(values[j] + e), even)
                odd = fma(full(weight[j + 1]), load(values[j + 1] + e), odd)
            if len(values) % 2:
                last = len(values) - 1
                even = fma(full(weight[last]), load(values[last] + e), even)
            store(at, add(even, odd))


@njit(**OPTIONS)
def weigh(scores, num_bytes):  # type: ignore[no-untyped-def]
    """Turns scores into weights; gives the highest score and their sum."""
    highest, factor, total = full(_F(-np.inf)), full(_F(_LOG2_E)), full(_F(0))
    for at in range(scores, scores + num_bytes, 64):
        highest = larger(highest, load(at))
    peak = largest_of(highest)
    if not peak > _F(-np.inf):
        # what is no number goes on being none
        for at in range(scores, scores + num_bytes, 64):
            store(at, mul(exp2_of_negative(load(at)), full(_F(0))))
        return _F(-np.inf), _F(0)
    for at in range(scores, scores + num_bytes, 64):
        # rounded after the difference, as for states and sinks
        weights = exp2_of_negative(mul(sub(load(at), full(peak)), factor))
        store(at, weights)
        total = add(total, weights)
    return peak, sum_of(total)
