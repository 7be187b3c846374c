"""The compiled `VectorAttention`: a piece of the prefix and a kv head is one unit of work.

Everything lies transposed, one query per lane: scores are `[tokens, queries]`, sums `[dims,
queries]`. Keys and values are then read as they lie, a number at a time for all queries, and both
products are the same one: rows of numbers, times vectors, in registers until the end.
"""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_products import (
    ADDED_ROWS,
    NUM_VECTORS,
    PRODUCT_ROWS,
    STEP,
    added_product,
    product,
)
from hf_granikv.kernels._numba_rows import widen
from hf_granikv.kernels._numba_threads import share_of
from hf_granikv.kernels._numba_types import (
    OPTIONS,
    as_float,
    c_function,
    float32_at,
    pointer_like,
)
from hf_granikv.kernels._numba_vectors import (
    add,
    exp2_of_negative,
    fma,
    full,
    larger,
    load,
    mul,
    store,
    sub,
)
from hf_granikv.kernels.shared_attention import _arguments as field

_F = np.float32

# where the parts of a thread's scratch memory begin, behind the queries
AT_SUMS, AT_PEAKS, AT_TOTALS, AT_SHRINKS, AT_SCORES, AT_KEYS, AT_VALUES = range(23, 30)
NUM_ARGUMENTS = 30

LANES = 16
# queries whose products are in registers at once
PANEL = LANES * NUM_VECTORS
# tokens whose scores are alive at once
BLOCK = 32
# as far ahead keys and values are fetched into the cache
AHEAD = BLOCK
# queries by which a block is read at once: their sums stay in a core's cache
CHUNK = 384
LOWEST = -3.4e38
LOG_2 = 0.6931471805599453

_score_1, _score_2, _score_3 = (product(min(n, NUM_VECTORS)) for n in (1, 2, 3))
_add_1, _add_2, _add_3 = (added_product(min(n, NUM_VECTORS)) for n in (1, 2, 3))


@njit(**OPTIONS)
def _pack_queries(args, head, first, num_queries, to, like):  # type: ignore[no-untyped-def]
    """Queries of one kv head, with the sign of the scale: `[panels, key_dim, queries of a panel]`."""
    sign = _F(np.copysign(1, carray(float32_at(args[field.SCALE]), (1,))[0]))
    per_row, dim = args[field.RATIO] * args[field.Q_LEN], args[field.KEY_DIM]
    packed = carray(float32_at(to), ((num_queries + PANEL - 1) // PANEL, dim, PANEL))
    packed[-1] = 0
    for i in range(num_queries):
        row, in_row = (first + i) // per_row, (first + i) % per_row
        at = row * args[field.QUERY_ROW] + in_row % args[field.Q_LEN] * args[field.QUERY_TOKEN]
        at += (head * args[field.RATIO] + in_row // args[field.Q_LEN]) * args[field.QUERY_HEAD]
        query = carray(pointer_like(args[field.QUERY] + at, like), (dim,))
        for e in range(dim):
            packed[i // PANEL, e, i % PANEL] = as_float(query[e]) * sign


@njit(**OPTIONS)
def _weigh(scores, num_tokens, scale, peaks, totals, shrinks):  # type: ignore[no-untyped-def]
    """Turns scores of 16 queries, which are yet to be scaled, into weights, where they are."""
    # to base two; rounded after the difference
    old, factor, total = load(peaks), full(scale * _F(1 / LOG_2)), full(_F(0))
    peak, end = old, scores + STEP * num_tokens
    for at in range(scores, end, STEP):
        peak = larger(load(at), peak)
    for at in range(scores, end, STEP):
        weight = exp2_of_negative(mul(sub(load(at), peak), factor))
        store(at, weight)
        total = add(total, weight)
    shrink = exp2_of_negative(mul(sub(old, peak), factor))
    store(totals, fma(load(totals), shrink, total))
    store(peaks, peak)
    store(shrinks, shrink)


@njit(**OPTIONS)
def _attend_panel(args, number, vectors, keys, values, num_tokens, area, ahead):  # type: ignore[no-untyped-def]
    """Attends from the queries of a panel, so many vectors, to a block."""
    (keys, key_stride), (values, value_stride), (next_keys, next_values) = keys, values, ahead
    dim, scores, shrinks = args[field.VALUE_DIM], area + args[AT_SCORES], area + args[AT_SHRINKS]
    queries = area + number * STEP * args[field.KEY_DIM]
    of_keys = keys, key_stride, 4, queries, args[field.KEY_DIM], *next_keys
    if vectors == 1:
        _score_1(num_tokens, scores, *of_keys)
    elif vectors == 2:
        _score_2(num_tokens, scores, *of_keys)
    else:
        _score_3(num_tokens, scores, *of_keys)
    scale = abs(carray(float32_at(args[field.SCALE]), (1,))[0])
    for v in range(vectors):
        at = area + number * STEP + 64 * v
        peaks, totals = at + args[AT_PEAKS], at + args[AT_TOTALS]
        _weigh(scores + 64 * v, num_tokens, scale, peaks, totals, shrinks + 64 * v)
    sums = area + args[AT_SUMS] + number * STEP * dim
    of_values = values, 4, value_stride, scores, num_tokens, *next_values
    if vectors == 1:
        _add_1(dim, sums, shrinks, *of_values)
    elif vectors == 2:
        _add_2(dim, sums, shrinks, *of_values)
    else:
        _add_3(dim, sums, shrinks, *of_values)


@njit(**OPTIONS)
def _widened(rows, stride, num_tokens, dim, to, like):  # type: ignore[no-untyped-def]
    """Where keys or values of a block are in float32, and the bytes between them."""
    if like.itemsize == 4:
        return rows, stride
    for j in range(num_tokens):
        widen(rows + j * stride, dim, to + 4 * dim * j, like)
    return to, 4 * dim


@njit(**OPTIONS)
def _attend_block(args, num_queries, keys, values, num_tokens, area, like):  # type: ignore[no-untyped-def]
    """Attends from some queries of a kv head to a block of `num_tokens`."""
    (key_dim, key_stride), (value_dim, value_stride) = (
        (args[field.KEY_DIM], args[field.KEYS_TOKEN]),
        (args[field.VALUE_DIM], args[field.VALUES_TOKEN]),
    )
    next_keys, next_values = keys + AHEAD * key_stride, values + AHEAD * value_stride
    # of one block while another is read: a column of scores is a number of some keys, one of sums a
    # token, whose values are read some numbers at a time
    of_keys, of_values = like.itemsize * PRODUCT_ROWS, like.itemsize * ADDED_ROWS
    wide_keys = _widened(keys, key_stride, num_tokens, key_dim, area + args[AT_KEYS], like)
    wide_values = _widened(
        values, value_stride, num_tokens, value_dim, area + args[AT_VALUES], like
    )
    vectors = (num_queries + LANES - 1) // LANES
    for number in range((vectors + NUM_VECTORS - 1) // NUM_VECTORS):
        ahead = (next_keys, of_keys), (next_values, of_values)
        its = min(NUM_VECTORS, vectors - number * NUM_VECTORS)
        _attend_panel(args, number, its, wide_keys, wide_values, num_tokens, area, ahead)
        # the first panel has fetched all
        of_keys = of_values = 0


@njit(**OPTIONS)
def _finish(args, unit, first, num_queries, area):  # type: ignore[no-untyped-def]
    """Divides the sums by the totals, and writes what one unit found."""
    dim, panels = args[field.VALUE_DIM], (num_queries + PANEL - 1) // PANEL
    scale = abs(carray(float32_at(args[field.SCALE]), (1,))[0])
    sums = carray(float32_at(area + args[AT_SUMS]), (panels, dim, PANEL))
    peaks = carray(float32_at(area + args[AT_PEAKS]), (num_queries,))
    totals = carray(float32_at(area + args[AT_TOTALS]), (num_queries,))
    at = 4 * (unit * args[field.QUERIES] + first)
    out = carray(float32_at(args[field.OUT] + at * dim), (num_queries, dim))
    lse = carray(float32_at(args[field.LSE] + at), (num_queries,))
    for i in range(num_queries):
        share = _F(1) / totals[i]
        for e in range(dim):
            out[i, e] = sums[i // PANEL, e, i % PANEL] * share
        lse[i] = peaks[i] * scale + np.log(totals[i])


@njit(**OPTIONS)
def _attend_unit(args, unit, area, like):  # type: ignore[no-untyped-def]
    """Attends from all queries of a kv head to a piece, some queries at a time."""
    head, piece, pieces = unit % args[field.HEADS], unit // args[field.HEADS], args[field.PIECES]
    num_blocks = (args[field.LENGTH] + BLOCK - 1) // BLOCK
    start = num_blocks * piece // pieces * BLOCK
    stop = min(num_blocks * (piece + 1) // pieces * BLOCK, args[field.LENGTH])
    keys, values = (
        args[field.KEYS] + head * args[field.KEYS_HEAD],
        args[field.VALUES] + head * args[field.VALUES_HEAD],
    )
    for first in range(0, args[field.QUERIES], CHUNK):
        num_queries = min(CHUNK, args[field.QUERIES] - first)
        panels = (num_queries + PANEL - 1) // PANEL
        _pack_queries(args, head, first, num_queries, area, like)
        for at in range(0, panels * STEP * args[field.VALUE_DIM], 64):
            store(area + args[AT_SUMS] + at, full(_F(0)))
        for at in range(0, panels * STEP, 64):
            store(area + args[AT_PEAKS] + at, full(_F(LOWEST)))
            store(area + args[AT_TOTALS] + at, full(_F(0)))
        for token in range(start, stop, BLOCK):
            at, num_tokens = keys + token * args[field.KEYS_TOKEN], min(BLOCK, stop - token)
            of_values = values + token * args[field.VALUES_TOKEN]
            _attend_block(args, num_queries, at, of_values, num_tokens, area, like)
        _finish(args, unit, first, num_queries, area)


@njit(**OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread; units are ordered as the results: by piece, then by head."""
    thread, first, stop = share_of(args[field.HEADS] * args[field.PIECES])
    area = args[field.SCRATCH] + thread * args[field.SCRATCH_SIZE]
    for unit in range(first, stop):
        _attend_unit(args, unit, area, like)


@c_function
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (NUM_ARGUMENTS,)), np.empty(0, np.uint16))


@c_function
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (NUM_ARGUMENTS,)), np.empty(0, np.float32))
