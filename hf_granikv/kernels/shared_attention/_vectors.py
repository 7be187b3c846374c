"""The compiled `VectorAttention`: a piece of the prefix, a kv head and some queries are one unit.

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
    number_at,
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
NUM_ARGUMENTS = field.NUM_COMMON + 7
AT_SUMS, AT_PEAKS, AT_TOTALS, AT_SHRINKS, AT_SCORES, AT_KEYS, AT_VALUES = range(
    field.NUM_COMMON, NUM_ARGUMENTS
)

LANES = 16
# queries whose products are in registers at once
PANEL = LANES * NUM_VECTORS
# tokens whose scores are alive at once
BLOCK = 32
# queries of a unit of work at most: their sums stay in a core's cache
CHUNK = 384
# finite, so that it can be taken off
LOWEST = -3.4e38
LOG_2 = 0.6931471805599453

_score_1, _add_1 = product(1), added_product(1)
# where a panel is of one vector these are never called, and need not be compiled
_score_2, _add_2 = (product(2), added_product(2)) if NUM_VECTORS > 1 else (_score_1, _add_1)
_score_3, _add_3 = (product(3), added_product(3)) if NUM_VECTORS > 1 else (_score_1, _add_1)


@njit(**OPTIONS)
def _pack_queries(args, head, first, num_queries, to, like):  # type: ignore[no-untyped-def]
    """Queries of one kv head, with the sign of the scale: `[panels, key_dim, queries of a panel]`."""
    sign = _F(np.copysign(1, carray(float32_at(args[field.SCALE]), (1,))[0]))
    per_row, dim = args[field.RATIO] * args[field.Q_LEN], args[field.KEY_DIM]
    packed = carray(float32_at(to), ((num_queries + PANEL - 1) // PANEL, dim, PANEL))
    packed[-1] = 0
    for i in range(num_queries):
        row, in_row = (first + i) // per_row, (first + i) % per_row
        at = number_at(args[field.ROWS], row) * args[field.QUERY_ROW]
        at += in_row % args[field.Q_LEN] * args[field.QUERY_TOKEN]
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
    dim, scores, shrinks = args[field.VALUE_DIM], area + args[AT_SCORES], area + args[AT_SHRINKS]
    queries = area + number * STEP * args[field.KEY_DIM]
    of_keys = *keys, 4, queries, args[field.KEY_DIM], *ahead[0]
    if vectors == 1:
        _score_1(num_tokens, scores, 0, *of_keys)
    elif vectors == 2:
        _score_2(num_tokens, scores, 0, *of_keys)
    else:
        _score_3(num_tokens, scores, 0, *of_keys)
    scale = abs(carray(float32_at(args[field.SCALE]), (1,))[0])
    for v in range(vectors):
        at = area + number * STEP + 64 * v
        peaks, totals = at + args[AT_PEAKS], at + args[AT_TOTALS]
        _weigh(scores + 64 * v, num_tokens, scale, peaks, totals, shrinks + 64 * v)
    sums = area + args[AT_SUMS] + number * STEP * dim
    of_values = values[0], 4, values[1], scores, num_tokens, *ahead[1]
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
    key_dim, key_stride = args[field.KEY_DIM], args[field.KEYS_TOKEN]
    value_dim, value_stride = args[field.VALUE_DIM], args[field.VALUES_TOKEN]
    # while a block is read the next one is fetched, as if tokens lay side by side: that of the keys
    # while keys are multiplied, some tokens and one of their numbers at a time; that of the values
    # while values are, some of their numbers and one token at a time
    of_keys, of_values = like.itemsize * PRODUCT_ROWS, like.itemsize * ADDED_ROWS
    next_keys, next_values = keys + BLOCK * key_stride, values + BLOCK * value_stride
    wide_keys = _widened(keys, key_stride, num_tokens, key_dim, area + args[AT_KEYS], like)
    at = area + args[AT_VALUES]
    wide_values = _widened(values, value_stride, num_tokens, value_dim, at, like)
    vectors = (num_queries + LANES - 1) // LANES
    for number in range((vectors + NUM_VECTORS - 1) // NUM_VECTORS):
        ahead = (next_keys, of_keys), (next_values, of_values)
        its = min(NUM_VECTORS, vectors - number * NUM_VECTORS)
        _attend_panel(args, number, its, wide_keys, wide_values, num_tokens, area, ahead)
        # the first panel has fetched all
        of_keys = of_values = 0


@njit(**OPTIONS)
def _finish(args, result, first, num_queries, area):  # type: ignore[no-untyped-def]
    """Divides the sums by the totals, and writes them where a piece's and head's results are."""
    dim, panels = args[field.VALUE_DIM], (num_queries + PANEL - 1) // PANEL
    scale = abs(carray(float32_at(args[field.SCALE]), (1,))[0])
    sums = carray(float32_at(area + args[AT_SUMS]), (panels, dim, PANEL))
    peaks = carray(float32_at(area + args[AT_PEAKS]), (num_queries,))
    totals = carray(float32_at(area + args[AT_TOTALS]), (num_queries,))
    at = 4 * (result * args[field.QUERIES] + first)
    out = carray(float32_at(args[field.OUT] + at * dim), (num_queries, dim))
    lse = carray(float32_at(args[field.LSE] + at), (num_queries,))
    for i in range(num_queries):
        share = _F(1) / totals[i]
        for e in range(dim):
            out[i, e] = sums[i // PANEL, e, i % PANEL] * share
        lse[i] = peaks[i] * scale + np.log(totals[i])


@njit(**OPTIONS)
def _attend_unit(args, piece, head, first, area, like):  # type: ignore[no-untyped-def]
    """Attends from up to `CHUNK` queries of a kv head to a piece."""
    num_blocks, pieces = (args[field.LENGTH] + BLOCK - 1) // BLOCK, args[field.PIECES]
    start = num_blocks * piece // pieces * BLOCK
    stop = min(num_blocks * (piece + 1) // pieces * BLOCK, args[field.LENGTH])
    num_queries = min(CHUNK, args[field.QUERIES] - first)
    panels = (num_queries + PANEL - 1) // PANEL
    _pack_queries(args, head, first, num_queries, area, like)
    for at in range(0, panels * STEP * args[field.VALUE_DIM], 64):
        store(area + args[AT_SUMS] + at, full(_F(0)))
    for at in range(0, panels * STEP, 64):
        store(area + args[AT_PEAKS] + at, full(_F(LOWEST)))
        store(area + args[AT_TOTALS] + at, full(_F(0)))
    for token in range(start, stop, BLOCK):
        keys = args[field.KEYS] + head * args[field.KEYS_HEAD] + token * args[field.KEYS_TOKEN]
        values = args[field.VALUES] + head * args[field.VALUES_HEAD]
        values += token * args[field.VALUES_TOKEN]
        _attend_block(args, num_queries, keys, values, min(BLOCK, stop - token), area, like)
    _finish(args, piece * args[field.HEADS] + head, first, num_queries, area)


@njit(**OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread."""
    heads, chunks = args[field.HEADS], (args[field.QUERIES] + CHUNK - 1) // CHUNK
    thread, first, stop = share_of(args[field.PIECES] * heads * chunks)
    area = args[field.SCRATCH] + thread * args[field.SCRATCH_SIZE]
    for unit in range(first, stop):
        # as the results are ordered: by piece, head, query
        piece, head = unit // (heads * chunks), unit // chunks % heads
        _attend_unit(args, piece, head, unit % chunks * CHUNK, area, like)


@c_function
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (NUM_ARGUMENTS,)), np.empty(0, np.uint16))


@c_function
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (NUM_ARGUMENTS,)), np.empty(0, np.float32))
