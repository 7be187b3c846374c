"""The compiled `decode_attention`: a row and key/value head is one unit of work for a thread."""

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core.types import ExternalFunction

from hf_granikv.kernels._numba_types import (
    FAST_MATH,
    as_element,
    as_float,
    exp_of_negative,
    float32_at,
    int64_at,
    pointer_like,
    uint16_at,
)
from hf_granikv.kernels._numba_types import larger as larger_of
from hf_granikv.kernels._numba_vectors import (
    add,
    exp2_of_negative,
    fma,
    full,
    larger,
    largest_of,
    load,
    load_bfloat16,
    prefetch,
    store,
    sum_of,
    sums_of_rows,
)
from hf_granikv.kernels.compiled import THREAD_NUM, register_symbols

register_symbols()
_thread_num = ExternalFunction(THREAD_NUM, types.int32())
_F = np.float32
_OPTIONS: dict[str, Any] = {"fastmath": FAST_MATH, "error_model": "numpy", "cache": True}

# numbers of a vector; rows of scratch memory are whole vectors wide
LANES = 16
# as far ahead keys and values are fetched into the cache, in tokens
AHEAD = 32
LOG2_E = 1.4426950408889634

# positions in the arguments, all int64; strides count elements, but those of scratch memory bytes
ROWS, HEADS, RATIO, KEY_DIM, VALUE_DIM, THREADS, SLOTS, SLOTS_ROW = range(8)
SPANS, SCALE, KEY_WIDTH, VALUE_WIDTH, SCORES_ROW, SCRATCH, SCRATCH_SIZE = range(8, 15)
# where the parts of a thread's scratch memory begin, behind the queries
AT_KEYS, AT_VALUES, AT_PRODUCTS, AT_SCORES, AT_SUMS, AT_TOTALS = range(15, 21)
QUERY, QUERY_ROW, QUERY_HEAD = range(21, 24)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(24, 30)
OUT, SINKS, NUM_STATES = range(30, 33)
NUM_ARGUMENTS = 33
# of each state, after those
NUM_PIECES, STATE_OUT, STATE_PIECE, STATE_ROW, STATE_HEAD, STATE_QUERY = range(6)
STATE_LSE, LSE_PIECE, LSE_ROW, LSE_HEAD, LSE_QUERY, STATE_IS_FLOAT, STATE_ROWS = range(6, 13)
NUM_STATE_ARGUMENTS = 13
# a bound for the compiler alone
MAX_ARGUMENTS = 1 << 20


@njit(**_OPTIONS)
def _vector(address, like):  # type: ignore[no-untyped-def]
    """16 elements at an address."""
    if like.itemsize == 2:
        return load_bfloat16(address)
    return load(address)


@njit(**_OPTIONS)
def _widen(rows, stride, slots, dim, to, width, like):  # type: ignore[no-untyped-def]
    """Puts the elements in some slots, as float32, to rows of `width` numbers."""
    whole = dim // LANES * LANES
    for j in range(len(slots)):
        row, at = rows + slots[j] * stride, to + 4 * width * j
        for e in range(0, whole, LANES):
            store(at + 4 * e, _vector(row + like.itemsize * e, like))
        rest = carray(pointer_like(row, like), (dim,))
        wide = carray(float32_at(at), (dim,))
        for e in range(whole, dim):
            wide[e] = as_float(rest[e])


@njit(**_OPTIONS)
def _prefetch(rows, stride, slots, num_bytes):  # type: ignore[no-untyped-def]
    for j in range(len(slots)):
        for offset in range(0, num_bytes, 64):
            prefetch(rows + slots[j] * stride + offset)


@njit(**_OPTIONS)
def _score(queries, ratio, keys, num_tokens, width, products, scores, scores_row):  # type: ignore[no-untyped-def]
    """Scores of up to 16 tokens; those that are none get the lowest of all."""
    for i in range(ratio):
        query = queries + 4 * width * i
        for j in range(num_tokens):
            key = keys + 4 * width * j
            total = full(_F(0))
            for e in range(0, 4 * width, 64):
                total = fma(load(query + e), load(key + e), total)
            store(products + 64 * j, total)
        for j in range(num_tokens, LANES):
            store(products + 64 * j, full(_F(-np.inf)))
        store(scores + i * scores_row, sums_of_rows(products))


@njit(**_OPTIONS)
def _add(sums, ratio, values, num_tokens, width, weights, weights_row):  # type: ignore[no-untyped-def]
    """Adds up to 16 weighted values to the sum of each query."""
    for i in range(ratio):
        weight = carray(float32_at(weights + i * weights_row), (LANES,))
        for e in range(0, 4 * width, 64):
            at = sums + 4 * width * i + e
            value, even, odd = values + e, load(at), full(_F(0))
            for j in range(0, num_tokens - 1, 2):
                even = fma(full(weight[j]), load(value), even)
                odd = fma(full(weight[j + 1]), load(value + 4 * width), odd)
                value += 8 * width
            if num_tokens % 2:
                even = fma(full(weight[num_tokens - 1]), load(value), even)
            store(at, add(even, odd))


@njit(**_OPTIONS)
def _weigh(scores, num_bytes, peak):  # type: ignore[no-untyped-def]
    """Turns scores into weights; gives their sum."""
    factor, below, total = full(_F(LOG2_E)), full(-peak * _F(LOG2_E)), full(_F(0))
    for at in range(scores, scores + num_bytes, 64):
        weights = exp2_of_negative(fma(load(at), factor, below))
        store(at, weights)
        total = add(total, weights)
    return sum_of(total)


@njit(**_OPTIONS)
def _add_one(out, value, weight):  # type: ignore[no-untyped-def]
    for e in range(out.shape[0]):
        out[e] += weight * as_float(value[e])


@njit(**_OPTIONS)
def _row_of_state(args, state, row):  # type: ignore[no-untyped-def]
    if state[STATE_ROWS] == 0:
        return row
    return carray(int64_at(state[STATE_ROWS]), (args[ROWS],))[row]


@njit(**_OPTIONS)
def _lse(state, piece, row, head, i):  # type: ignore[no-untyped-def]
    at = piece * state[LSE_PIECE] + row * state[LSE_ROW]
    at += head * state[LSE_HEAD] + i * state[LSE_QUERY]
    return carray(float32_at(state[STATE_LSE] + 4 * at), (1,))[0]


@njit(**_OPTIONS)
def _peak(args, row, head, i, scores, num_bytes):  # type: ignore[no-untyped-def]
    """The largest score or log-sum-exp that one query meets."""
    highest = full(_F(-np.inf))
    for at in range(scores, scores + num_bytes, 64):
        highest = larger(highest, load(at))
    peak = largest_of(highest)
    for number in range(args[NUM_STATES]):
        state = args[NUM_ARGUMENTS + number * NUM_STATE_ARGUMENTS :]
        at = _row_of_state(args, state, row)
        if at >= 0:
            for piece in range(state[NUM_PIECES]):
                peak = larger_of(peak, _lse(state, piece, at, head, i))
    return peak


@njit(**_OPTIONS)
def _merge(args, row, head, i, out, peak, total):  # type: ignore[no-untyped-def]
    """Adds the states of the prefixes to one query's sum; gives the new total."""
    value_dim = args[VALUE_DIM]
    for number in range(args[NUM_STATES]):
        state = args[NUM_ARGUMENTS + number * NUM_STATE_ARGUMENTS :]
        at = _row_of_state(args, state, row)
        for piece in range(state[NUM_PIECES] if at >= 0 else 0):
            weight = exp_of_negative(_lse(state, piece, at, head, i) - peak)
            out_at = piece * state[STATE_PIECE] + at * state[STATE_ROW]
            out_at += head * state[STATE_HEAD] + i * state[STATE_QUERY]
            if state[STATE_IS_FLOAT] != 0:
                wide = carray(float32_at(state[STATE_OUT] + 4 * out_at), (value_dim,))
                _add_one(out, wide, weight)
            else:
                narrow = carray(uint16_at(state[STATE_OUT] + 2 * out_at), (value_dim,))
                _add_one(out, narrow, weight)
            total += weight
    return total


@njit(**_OPTIONS)
def _finish(args, row, head, i, scores, num_bytes, out):  # type: ignore[no-untyped-def]
    """Weighs the scores of one query, and starts its sum with what the prefixes gave.

    Returns:
        The sum of all weights; 0 if the query sees nothing.
    """
    peak, sink = _peak(args, row, head, i, scores, num_bytes), _F(-np.inf)
    if args[SINKS] != 0:
        num_q_heads = args[HEADS] * args[RATIO]
        sink = carray(float32_at(args[SINKS]), (num_q_heads,))[head * args[RATIO] + i]
        peak = larger_of(peak, sink)
    out[:] = _F(0)
    if not peak > _F(-np.inf):
        for at in range(scores, scores + num_bytes, 64):
            store(at, full(_F(0)))
        return _F(0)
    total = _weigh(scores, num_bytes, peak)
    total = _merge(args, row, head, i, out, peak, total)
    if args[SINKS] != 0:
        total += exp_of_negative(sink - peak)
    return total


@njit(**_OPTIONS)
def _take_queries(args, row, head, to, width, like):  # type: ignore[no-untyped-def]
    """Puts the queries of one row and head, times the scale, to rows of `width` numbers."""
    scale = carray(float32_at(args[SCALE]), (1,))[0]
    queries = carray(float32_at(to), (args[RATIO], width))
    for i in range(args[RATIO]):
        at = row * args[QUERY_ROW] + (head * args[RATIO] + i) * args[QUERY_HEAD]
        address = args[QUERY] + like.itemsize * at
        query = carray(pointer_like(address, like), (args[KEY_DIM],))
        for e in range(args[KEY_DIM]):
            queries[i, e] = as_float(query[e]) * scale


@njit(**_OPTIONS)
def _attend_unit(args, row, head, area, like):  # type: ignore[no-untyped-def]
    """Attends from the queries of one row and head."""
    ratio, size, dim = args[RATIO], like.itemsize, args[VALUE_DIM]
    scores, products = area + args[AT_SCORES], area + args[AT_PRODUCTS]
    wide_keys, wide_values = area + args[AT_KEYS], area + args[AT_VALUES]
    sums = area + args[AT_SUMS]
    key_width, value_width = args[KEY_WIDTH], args[VALUE_WIDTH]
    key_slot, value_slot = size * args[KEYS_SLOT], size * args[VALUES_SLOT]
    keys = args[KEYS] + size * head * args[KEYS_HEAD]
    values = args[VALUES] + size * head * args[VALUES_HEAD]
    table = carray(int64_at(args[SLOTS] + 8 * row * args[SLOTS_ROW]), (args[SLOTS_ROW],))
    span = carray(int64_at(args[SPANS] + 16 * row), (2,))
    slots, row_bytes = table[span[0] : span[1]], args[SCORES_ROW]
    num_bytes = (len(slots) + LANES - 1) // LANES * 64
    _take_queries(args, row, head, area, key_width, like)
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch(keys, key_slot, slots[j + AHEAD : j + AHEAD + LANES], size * args[KEY_DIM])
        _widen(keys, key_slot, some, args[KEY_DIM], wide_keys, key_width, like)
        _score(area, ratio, wide_keys, len(some), key_width, products, scores + 4 * j, row_bytes)
    _prefetch(values, value_slot, slots[:AHEAD], size * dim)
    totals = carray(float32_at(area + args[AT_TOTALS]), (ratio,))
    for i in range(ratio):
        out = carray(float32_at(sums + 4 * value_width * i), (value_width,))
        totals[i] = _finish(args, row, head, i, scores + row_bytes * i, num_bytes, out)
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch(values, value_slot, slots[j + AHEAD : j + AHEAD + LANES], size * dim)
        _widen(values, value_slot, some, dim, wide_values, value_width, like)
        _add(sums, ratio, wide_values, len(some), value_width, scores + 4 * j, row_bytes)
    address = args[OUT] + size * (row * args[HEADS] + head) * ratio * dim
    out = carray(pointer_like(address, like), (ratio, dim))
    for i in range(ratio):
        share = _F(1) / larger_of(totals[i], _F(1e-38))
        total = carray(float32_at(sums + 4 * value_width * i), (dim,))
        for e in range(dim):
            out[i, e] = as_element(total[e] * share, out)


@njit(**_OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread; `like` is an array of the kind of elements that are read."""
    heads, threads, thread = args[HEADS], args[THREADS], np.int64(_thread_num())
    num_units, area = args[ROWS] * heads, args[SCRATCH] + thread * args[SCRATCH_SIZE]
    # it is read beyond the last element of a row
    for at in range(area, area + args[SCRATCH_SIZE], 64):
        store(at, full(_F(0)))
    for unit in range(num_units * thread // threads, num_units * (thread + 1) // threads):
        _attend_unit(args, unit // heads, unit % heads, area, like)


@cfunc(types.void(types.CPointer(types.int64)), **_OPTIONS)
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.uint16))


@cfunc(types.void(types.CPointer(types.int64)), **_OPTIONS)
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.float32))
