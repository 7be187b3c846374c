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
    larger,
    pointer_like,
    uint16_at,
)
from hf_granikv.kernels.compiled import THREAD_NUM, register_symbols

register_symbols()
_thread_num = ExternalFunction(THREAD_NUM, types.int32())
_F = np.float32
_OPTIONS: dict[str, Any] = {"fastmath": FAST_MATH, "error_model": "numpy", "cache": True}

# positions in the arguments, all int64; strides count elements
ROWS, HEADS, RATIO, KEY_DIM, VALUE_DIM, THREADS, SLOTS, SLOTS_ROW = range(8)
SPANS, LONGEST, SCALE, QUERY, QUERY_ROW, QUERY_HEAD = range(8, 14)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(14, 20)
OUT, SINKS, NUM_STATES = range(20, 23)
NUM_ARGUMENTS = 23
# of each state, after those
NUM_PIECES, STATE_OUT, STATE_PIECE, STATE_ROW, STATE_HEAD, STATE_QUERY = range(6)
STATE_LSE, LSE_PIECE, LSE_ROW, LSE_HEAD, LSE_QUERY, STATE_IS_FLOAT, STATE_ROWS = range(6, 13)
NUM_STATE_ARGUMENTS = 13
# a bound for the compiler alone
MAX_ARGUMENTS = 1 << 20


@njit(**_OPTIONS)
def _weigh(scores, num_tokens, peak):  # type: ignore[no-untyped-def]
    """Turns scores into weights; gives their sum."""
    total = _F(0)
    for j in range(num_tokens):
        scores[j] = exp_of_negative(scores[j] - peak)
    for j in range(num_tokens):
        total += scores[j]
    return total


@njit(**_OPTIONS)
def _score(query, key, wide, scores, j):  # type: ignore[no-untyped-def]
    for e in range(key.shape[0]):
        wide[e] = as_float(key[e])
    for i in range(query.shape[0]):
        dot = _F(0)
        for e in range(key.shape[0]):
            dot += query[i, e] * wide[e]
        scores[i, j] = dot


@njit(**_OPTIONS)
def _add(out, value, wide, weights, j):  # type: ignore[no-untyped-def]
    for e in range(value.shape[0]):
        wide[e] = as_float(value[e])
    for i in range(out.shape[0]):
        weight = weights[i, j]
        for e in range(value.shape[0]):
            out[i, e] += weight * wide[e]


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
def _peak(args, row, head, i, scores, num_tokens):  # type: ignore[no-untyped-def]
    """The largest score or log-sum-exp that one query meets."""
    peak = _F(-np.inf)
    for j in range(num_tokens):
        peak = larger(peak, scores[j])
    for number in range(args[NUM_STATES]):
        state = args[NUM_ARGUMENTS + number * NUM_STATE_ARGUMENTS :]
        at = _row_of_state(args, state, row)
        if at >= 0:
            for piece in range(state[NUM_PIECES]):
                peak = larger(peak, _lse(state, piece, at, head, i))
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
def _finish(args, row, head, scores, sums, num_tokens, totals):  # type: ignore[no-untyped-def]
    """Weighs the scores of one row and head, and adds what the prefixes gave."""
    ratio = args[RATIO]
    for i in range(ratio):
        peak = _peak(args, row, head, i, scores[i], num_tokens)
        if args[SINKS] != 0:
            sink = carray(float32_at(args[SINKS]), (args[HEADS] * ratio,))[head * ratio + i]
            peak = larger(peak, sink)
        sums[i] = _F(0)
        totals[i] = _F(0)
        if peak > _F(-np.inf):
            totals[i] = _weigh(scores[i], num_tokens, peak)
            totals[i] = _merge(args, row, head, i, sums[i], peak, totals[i])
            if args[SINKS] != 0:
                totals[i] += exp_of_negative(sink - peak)
        else:
            scores[i, :num_tokens] = _F(0)


@njit(**_OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread; `like` is an array of the kind of elements that are read."""
    heads, ratio, key_dim, value_dim = args[HEADS], args[RATIO], args[KEY_DIM], args[VALUE_DIM]
    num_units, threads, size = args[ROWS] * heads, args[THREADS], like.itemsize
    thread = np.int64(_thread_num())
    spans = carray(int64_at(args[SPANS]), (args[ROWS], 2))
    slots = carray(int64_at(args[SLOTS]), (args[ROWS], args[SLOTS_ROW]))
    scale = carray(float32_at(args[SCALE]), (1,))[0]
    queries = np.empty((ratio, key_dim), np.float32)
    wide = np.empty(max(key_dim, value_dim), np.float32)
    scores = np.empty((ratio, args[LONGEST]), np.float32)
    sums = np.empty((ratio, value_dim), np.float32)
    totals = np.empty(ratio, np.float32)
    for unit in range(num_units * thread // threads, num_units * (thread + 1) // threads):
        row, head = unit // heads, unit % heads
        start, num_tokens = spans[row, 0], spans[row, 1] - spans[row, 0]
        for i in range(ratio):
            at = row * args[QUERY_ROW] + (head * ratio + i) * args[QUERY_HEAD]
            query = carray(pointer_like(args[QUERY] + size * at, like), (key_dim,))
            for e in range(key_dim):
                queries[i, e] = as_float(query[e]) * scale
        for j in range(num_tokens):
            at = head * args[KEYS_HEAD] + slots[row, start + j] * args[KEYS_SLOT]
            address = args[KEYS] + size * at
            _score(queries, carray(pointer_like(address, like), (key_dim,)), wide, scores, j)
        _finish(args, row, head, scores, sums, num_tokens, totals)
        for j in range(num_tokens):
            at = head * args[VALUES_HEAD] + slots[row, start + j] * args[VALUES_SLOT]
            address = args[VALUES] + size * at
            _add(sums, carray(pointer_like(address, like), (value_dim,)), wide, scores, j)
        address = args[OUT] + size * unit * ratio * value_dim
        out = carray(pointer_like(address, like), (ratio, value_dim))
        for i in range(ratio):
            share = _F(1) / larger(totals[i], _F(1e-38))
            for e in range(value_dim):
                out[i, e] = as_element(sums[i, e] * share, out)


@cfunc(types.void(types.CPointer(types.int64)), **_OPTIONS)
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.uint16))


@cfunc(types.void(types.CPointer(types.int64)), **_OPTIONS)
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.float32))
