"""The compiled `decode_attention`: a row and key/value head is one unit of work for a thread."""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_rows import widen
from hf_granikv.kernels._numba_threads import share_of
from hf_granikv.kernels._numba_types import (
    OPTIONS,
    as_element,
    as_float,
    c_function,
    exp_of_negative,
    float32_at,
    int64_at,
    pointer_like,
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
    mul,
    prefetch,
    store,
    sub,
    sum_of,
    sums_of_rows,
)
from hf_granikv.kernels.decode_attention._numba_states import add_states, peak_of_states

_F = np.float32

# numbers of a vector; rows of scratch memory are whole vectors wide
LANES = 16
# as far ahead keys and values are fetched into the cache, in tokens
AHEAD = 32
LOG2_E = 1.4426950408889634

# positions in the arguments, all int64; strides count elements, but those of scratch memory bytes
ROWS, HEADS, RATIO, KEY_DIM, VALUE_DIM, SLOTS, SLOTS_ROW = range(7)
SPANS, SCALE, KEY_WIDTH, VALUE_WIDTH, SCORES_ROW, SCRATCH, SCRATCH_SIZE = range(7, 14)
# where the parts of a thread's scratch memory begin, behind the queries
AT_KEYS, AT_VALUES, AT_PRODUCTS, AT_SCORES, AT_SUMS, AT_TOTALS = range(14, 20)
QUERY, QUERY_ROW, QUERY_HEAD, OUT, SINKS = range(20, 25)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(25, 31)
NUM_SEGMENTS, SEGMENTS, NUM_STATES = range(31, 34)
NUM_ARGUMENTS = 34
# of each segment; the slots are 0, 1, 2, ...
SEGMENT_KEYS, SEGMENT_KEYS_HEAD, SEGMENT_KEYS_TOKEN = range(3)
SEGMENT_VALUES, SEGMENT_VALUES_HEAD, SEGMENT_VALUES_TOKEN = range(3, 6)
SEGMENT_SLOTS, SEGMENT_LENGTH, SEGMENT_ROWS = range(6, 9)
NUM_SEGMENT_ARGUMENTS = 9
# a bound for the compiler alone
MAX_ARGUMENTS = 1 << 20


@njit(**OPTIONS)
def _widen(rows, stride, slots, dim, to, width, like):  # type: ignore[no-untyped-def]
    """Puts the elements in some slots, as float32, to rows of `width` numbers."""
    for j in range(len(slots)):
        widen(rows + slots[j] * stride, dim, to + 4 * width * j, like)


@njit(**OPTIONS)
def _prefetch(rows, stride, slots, num_bytes):  # type: ignore[no-untyped-def]
    for j in range(len(slots)):
        for offset in range(0, num_bytes, 64):
            prefetch(rows + slots[j] * stride + offset)


@njit(**OPTIONS)
def _prefetch_ahead(j, rows, stride, slots, num_bytes, following):  # type: ignore[no-untyped-def]
    """Fetches the tokens that are `AHEAD` of the j-th; behind the last one, the first that follow."""
    start, stop = j + AHEAD, j + AHEAD + LANES
    _prefetch(rows, stride, slots[start:stop], num_bytes)
    if stop > len(slots):
        rows, stride, next_slots, num_bytes = following
        its = next_slots[max(start - len(slots), 0) : stop - len(slots)]
        _prefetch(rows, stride, its, num_bytes)


@njit(**OPTIONS)
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


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def _weigh(scores, num_bytes, peak):  # type: ignore[no-untyped-def]
    """Turns scores into weights; gives their sum."""
    factor, highest, total = full(_F(LOG2_E)), full(peak), full(_F(0))
    for at in range(scores, scores + num_bytes, 64):
        # rounded after the difference, as for states and sinks
        weights = exp2_of_negative(mul(sub(load(at), highest), factor))
        store(at, weights)
        total = add(total, weights)
    return sum_of(total)


@njit(**OPTIONS)
def _peak(args, row, head, i, scores, num_bytes):  # type: ignore[no-untyped-def]
    """The largest score or log-sum-exp that one query meets."""
    highest = full(_F(-np.inf))
    for at in range(scores, scores + num_bytes, 64):
        highest = larger(highest, load(at))
    peak, states = largest_of(highest), args[NUM_ARGUMENTS:]
    return peak_of_states(states, args[NUM_STATES], row, head, i, peak)


@njit(**OPTIONS)
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
    states, num_states = args[NUM_ARGUMENTS:], args[NUM_STATES]
    total = add_states(states, num_states, row, head, i, out[: args[VALUE_DIM]], peak, total)
    if args[SINKS] != 0:
        total += exp_of_negative(sink - peak)
    return total


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def _score_all(args, keys, stride, slots, following, scores, area, like):  # type: ignore[no-untyped-def]
    """Scores of the tokens in some slots; gives where those of others go."""
    wide, products, width = area + args[AT_KEYS], area + args[AT_PRODUCTS], args[KEY_WIDTH]
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch_ahead(j, keys, stride, slots, like.itemsize * args[KEY_DIM], following)
        _widen(keys, stride, some, args[KEY_DIM], wide, width, like)
        _score(area, args[RATIO], wide, len(some), width, products, scores, args[SCORES_ROW])
        scores += 4 * LANES
    return scores


@njit(**OPTIONS)
def _add_all(args, values, stride, slots, following, weights, area, like):  # type: ignore[no-untyped-def]
    """Adds the weighted values in some slots; gives where the weights of others are."""
    wide, sums, width = area + args[AT_VALUES], area + args[AT_SUMS], args[VALUE_WIDTH]
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch_ahead(j, values, stride, slots, like.itemsize * args[VALUE_DIM], following)
        _widen(values, stride, some, args[VALUE_DIM], wide, width, like)
        _add(sums, args[RATIO], wide, len(some), width, weights, args[SCORES_ROW])
        weights += 4 * LANES
    return weights


@njit(**OPTIONS)
def _segment(args, number, row):  # type: ignore[no-untyped-def]
    """A segment, and the slots of its tokens: none where the row does not read it."""
    at = args[SEGMENTS] + 8 * NUM_SEGMENT_ARGUMENTS * number
    segment = carray(int64_at(at), (NUM_SEGMENT_ARGUMENTS,))
    slots = carray(int64_at(segment[SEGMENT_SLOTS]), (segment[SEGMENT_LENGTH],))
    rows = segment[SEGMENT_ROWS]
    if rows != 0 and carray(int64_at(rows), (args[ROWS],))[row] < 0:
        slots = slots[:0]
    return segment, slots


@njit(**OPTIONS)
def _own(args, unit, like):  # type: ignore[no-untyped-def]
    """The row and head of a unit; where the row's own tokens lie: keys, values, slots."""
    row, head = unit // args[HEADS], unit % args[HEADS]
    table = carray(int64_at(args[SLOTS] + 8 * row * args[SLOTS_ROW]), (args[SLOTS_ROW],))
    span = carray(int64_at(args[SPANS] + 16 * row), (2,))
    keys = args[KEYS] + like.itemsize * head * args[KEYS_HEAD]
    values = args[VALUES] + like.itemsize * head * args[VALUES_HEAD]
    return row, head, keys, values, table[span[0] : span[1]]


@njit(**OPTIONS)
def _attend_unit(args, unit, next_unit, area, like):  # type: ignore[no-untyped-def]
    """Attends from the queries of one row and head, while those of the next are fetched."""
    ratio, size, dim = args[RATIO], like.itemsize, args[VALUE_DIM]
    scores, sums, value_width = area + args[AT_SCORES], area + args[AT_SUMS], args[VALUE_WIDTH]
    row, head, keys, values, slots = _own(args, unit, like)
    _, _, next_keys, _, next_slots = _own(args, next_unit, like)
    key_stride, value_stride = size * args[KEYS_SLOT], size * args[VALUES_SLOT]
    first_values = values, value_stride, slots, size * dim
    following = next_keys, key_stride, next_slots, size * args[KEY_DIM]
    _take_queries(args, row, head, area, args[KEY_WIDTH], like)
    end = _score_all(args, keys, key_stride, slots, first_values, scores, area, like)
    for number in range(args[NUM_SEGMENTS]):
        segment, tokens = _segment(args, number, row)
        keys = segment[SEGMENT_KEYS] + size * head * segment[SEGMENT_KEYS_HEAD]
        stride = size * segment[SEGMENT_KEYS_TOKEN]
        end = _score_all(args, keys, stride, tokens, first_values, end, area, like)
    totals = carray(float32_at(area + args[AT_TOTALS]), (ratio,))
    for i in range(ratio):
        out = carray(float32_at(sums + 4 * value_width * i), (value_width,))
        its_scores = scores + args[SCORES_ROW] * i
        totals[i] = _finish(args, row, head, i, its_scores, end - scores, out)
    end = _add_all(args, values, value_stride, slots, following, scores, area, like)
    for number in range(args[NUM_SEGMENTS]):
        segment, tokens = _segment(args, number, row)
        values = segment[SEGMENT_VALUES] + size * head * segment[SEGMENT_VALUES_HEAD]
        stride = size * segment[SEGMENT_VALUES_TOKEN]
        end = _add_all(args, values, stride, tokens, following, end, area, like)
    address = args[OUT] + size * (row * args[HEADS] + head) * ratio * dim
    out = carray(pointer_like(address, like), (ratio, dim))
    for i in range(ratio):
        share = _F(1) / larger_of(totals[i], _F(1e-38))
        total = carray(float32_at(sums + 4 * value_width * i), (dim,))
        for e in range(dim):
            out[i, e] = as_element(total[e] * share, out)


@njit(**OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread; `like` is an array of the kind of elements that are read."""
    heads = args[HEADS]
    thread, first, stop = share_of(args[ROWS] * heads)
    area = args[SCRATCH] + thread * args[SCRATCH_SIZE]
    # it is read beyond the last element of a row
    for at in range(area, area + args[SCRATCH_SIZE], 64):
        store(at, full(_F(0)))
    for unit in range(first, stop):
        _attend_unit(args, unit, min(unit + 1, stop - 1), area, like)


@c_function
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.uint16))


@c_function
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.float32))
