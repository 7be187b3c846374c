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
AT_KEYS, AT_VALUES, AT_PRODUCTS, AT_PLACES, AT_SCORES, AT_SUMS, AT_TOTALS = range(14, 21)
QUERY, QUERY_ROW, QUERY_HEAD, OUT, SINKS = range(21, 26)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(26, 32)
NUM_SEGMENTS, SEGMENTS, NUM_STATES = range(32, 35)
NUM_ARGUMENTS = 35
# of each segment; the slots are 0, 1, 2, ...
SEGMENT_KEYS, SEGMENT_KEYS_HEAD, SEGMENT_KEYS_TOKEN = range(3)
SEGMENT_VALUES, SEGMENT_VALUES_HEAD, SEGMENT_VALUES_TOKEN = range(3, 6)
SEGMENT_SLOTS, SEGMENT_LENGTH, SEGMENT_ROWS = range(6, 9)
NUM_SEGMENT_ARGUMENTS = 9
# a bound for the compiler alone
MAX_ARGUMENTS = 1 << 20


@njit(**OPTIONS)
def _find(rows, stride, slots, dim, to, width, places, like):  # type: ignore[no-untyped-def]
    """Where the elements of some slots are in float32: as they lie, or put to rows of `width`."""
    for j in range(len(slots)):
        row = rows + slots[j] * stride
        if like.itemsize == 4 and dim == width:
            places[j] = row
        else:
            places[j] = to + 4 * width * j
            widen(row, dim, places[j], like)


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
        first = max(start - len(slots), 0) if j > 0 else 0
        _prefetch(rows, stride, next_slots[first : stop - len(slots)], num_bytes)


@njit(**OPTIONS)
def _score(queries, ratio, keys, width, products, scores, scores_row):  # type: ignore[no-untyped-def]
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
def _add(sums, ratio, values, width, weights, weights_row):  # type: ignore[no-untyped-def]
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
    states, num_states = args[NUM_ARGUMENTS:], args[NUM_STATES]
    if not peak > _F(-np.inf):
        # what is no number goes on being none
        for at in range(scores, scores + num_bytes, 64):
            store(at, mul(exp2_of_negative(load(at)), full(_F(0))))
        add_states(states, num_states, row, head, i, out[: args[VALUE_DIM]], _F(0), _F(0))
        return _F(0)
    total = _weigh(scores, num_bytes, peak)
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
def _score_all(args, keys, slots, following, scores, area, like):  # type: ignore[no-untyped-def]
    """Scores of the tokens in some slots; gives where those of others go."""
    (rows, stride), dim, width = keys, args[KEY_DIM], args[KEY_WIDTH]
    wide, products = area + args[AT_KEYS], area + args[AT_PRODUCTS]
    places = carray(int64_at(area + args[AT_PLACES]), (LANES,))
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch_ahead(j, rows, stride, slots, like.itemsize * dim, following)
        _find(rows, stride, some, dim, wide, width, places, like)
        its = places[: len(some)]
        _score(area, args[RATIO], its, width, products, scores, args[SCORES_ROW])
        scores += 4 * LANES
    return scores


@njit(**OPTIONS)
def _add_all(args, values, slots, following, weights, area, like):  # type: ignore[no-untyped-def]
    """Adds the weighted values in some slots; gives where the weights of others are."""
    (rows, stride), dim, width = values, args[VALUE_DIM], args[VALUE_WIDTH]
    wide, sums = area + args[AT_VALUES], area + args[AT_SUMS]
    places = carray(int64_at(area + args[AT_PLACES]), (LANES,))
    for j in range(0, len(slots), LANES):
        some = slots[j : j + LANES]
        _prefetch_ahead(j, rows, stride, slots, like.itemsize * dim, following)
        _find(rows, stride, some, dim, wide, width, places, like)
        _add(sums, args[RATIO], places[: len(some)], width, weights, args[SCORES_ROW])
        weights += 4 * LANES
    return weights


@njit(**OPTIONS)
def _segment(args, number, row, head, size):  # type: ignore[no-untyped-def]
    """Keys, values and slots of a segment's tokens: none where the row does not read it."""
    at = args[SEGMENTS] + 8 * NUM_SEGMENT_ARGUMENTS * number
    segment = carray(int64_at(at), (NUM_SEGMENT_ARGUMENTS,))
    slots = carray(int64_at(segment[SEGMENT_SLOTS]), (segment[SEGMENT_LENGTH],))
    rows = segment[SEGMENT_ROWS]
    if rows != 0 and carray(int64_at(rows), (args[ROWS],))[row] < 0:
        slots = slots[:0]
    keys = segment[SEGMENT_KEYS] + size * head * segment[SEGMENT_KEYS_HEAD]
    values = segment[SEGMENT_VALUES] + size * head * segment[SEGMENT_VALUES_HEAD]
    strides = size * segment[SEGMENT_KEYS_TOKEN], size * segment[SEGMENT_VALUES_TOKEN]
    return (keys, strides[0]), (values, strides[1]), slots


@njit(**OPTIONS)
def _own(args, unit, size):  # type: ignore[no-untyped-def]
    """Keys, values and slots of the own tokens of the row that a unit is of."""
    row, head = unit // args[HEADS], unit % args[HEADS]
    table = carray(int64_at(args[SLOTS] + 8 * row * args[SLOTS_ROW]), (args[SLOTS_ROW],))
    span = carray(int64_at(args[SPANS] + 16 * row), (2,))
    keys = args[KEYS] + size * head * args[KEYS_HEAD]
    values = args[VALUES] + size * head * args[VALUES_HEAD]
    strides = size * args[KEYS_SLOT], size * args[VALUES_SLOT]
    return (keys, strides[0]), (values, strides[1]), table[span[0] : span[1]]


@njit(**OPTIONS)
def _attend_unit(args, unit, next_unit, area, like):  # type: ignore[no-untyped-def]
    """Attends from the queries of one row and head, while the next one's keys are fetched."""
    row, head = unit // args[HEADS], unit % args[HEADS]
    ratio, size, dim = args[RATIO], like.itemsize, args[VALUE_DIM]
    scores, sums, value_width = area + args[AT_SCORES], area + args[AT_SUMS], args[VALUE_WIDTH]
    keys, values, slots = _own(args, unit, size)
    next_keys, _, next_slots = _own(args, next_unit, size)
    then_values = *values, slots, size * dim
    then_keys = *next_keys, next_slots, size * args[KEY_DIM]
    _take_queries(args, row, head, area, args[KEY_WIDTH], like)
    end = _score_all(args, keys, slots, then_values, scores, area, like)
    for number in range(args[NUM_SEGMENTS]):
        keys, _, tokens = _segment(args, number, row, head, size)
        end = _score_all(args, keys, tokens, then_values, end, area, like)
    totals = carray(float32_at(area + args[AT_TOTALS]), (ratio,))
    for i in range(ratio):
        out = carray(float32_at(sums + 4 * value_width * i), (value_width,))
        its_scores = scores + args[SCORES_ROW] * i
        totals[i] = _finish(args, row, head, i, its_scores, end - scores, out)
    end = _add_all(args, values, slots, then_keys, scores, area, like)
    for number in range(args[NUM_SEGMENTS]):
        _, values, tokens = _segment(args, number, row, head, size)
        _prefetch(*values, tokens[:AHEAD], size * dim)
        end = _add_all(args, values, tokens, then_keys, end, area, like)
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
