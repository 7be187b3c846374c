"""The compiled `decode_attention`: a row and kv head is a unit of work, or in pieces for several threads.

A piece leaves sums of weighted values, the highest score and the total of the weights. Whoever began
a unit merges its pieces, and what the row's prefixes gave.

Source: Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html), with shares cut where
they are equal, as in Stream-K, arXiv:2301.03598.
"""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_threads import barrier, team
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
from hf_granikv.kernels._numba_vectors import add, full, load, mul, store
from hf_granikv.kernels.decode_attention import _arguments as field
from hf_granikv.kernels.decode_attention._numba_blocks import (
    AHEAD,
    LANES,
    add_weighted,
    find,
    prefetch_ahead,
    prefetch_tokens,
    score,
    weigh,
)
from hf_granikv.kernels.decode_attention._numba_shares import share, share_out
from hf_granikv.kernels.decode_attention._numba_states import add_states, peak_of_states
from hf_granikv.kernels.decode_attention._numba_tokens import (
    num_tokens,
    own_tokens,
    segment_tokens,
    some,
)

_F = np.float32

# a bound for the compiler alone
MAX_ARGUMENTS = 1 << 20


@njit(**OPTIONS)
def _take_queries(args, row, head, to, width, like):  # type: ignore[no-untyped-def]
    """Puts the queries of one row and head, times the scale, to rows of `width` numbers."""
    scale, ratio = carray(float32_at(args[field.SCALE]), (1,))[0], args[field.RATIO]
    queries = carray(float32_at(to), (ratio, width))
    for i in range(ratio):
        at = row * args[field.QUERY_ROW] + (head * ratio + i) * args[field.QUERY_HEAD]
        address = args[field.QUERY] + like.itemsize * at
        query = carray(pointer_like(address, like), (args[field.KEY_DIM],))
        for e in range(args[field.KEY_DIM]):
            queries[i, e] = as_float(query[e]) * scale


@njit(**OPTIONS)
def _store_new(args, row, head, like):  # type: ignore[no-untyped-def]
    """Puts what a row brings to one head where it belongs in the pool.

    Threads that have a piece each of one unit all do, with the same bytes.
    """
    slot = carray(int64_at(args[field.NEW_SLOTS]), (row + 1,))[row]
    for new, new_row, new_head, to, to_head, to_slot, size in (
        (
            *(args[field.NEW_KEYS], args[field.NEW_KEYS_ROW], args[field.NEW_KEYS_HEAD]),
            *(args[field.KEYS], args[field.KEYS_HEAD], args[field.KEYS_SLOT]),
            args[field.KEY_DIM],
        ),
        (
            *(args[field.NEW_VALUES], args[field.NEW_VALUES_ROW], args[field.NEW_VALUES_HEAD]),
            *(args[field.VALUES], args[field.VALUES_HEAD], args[field.VALUES_SLOT]),
            args[field.VALUE_DIM],
        ),
    ):
        source = new + like.itemsize * (row * new_row + head * new_head)
        target = to + like.itemsize * (head * to_head + slot * to_slot)
        stored = carray(pointer_like(target, like), (size,))
        brought = carray(pointer_like(source, like), (size,))
        for e in range(size):
            stored[e] = brought[e]


@njit(**OPTIONS)
def _score_all(args, keys, slots, following, scores, area, like):  # type: ignore[no-untyped-def]
    """Scores of the tokens in some slots; gives where those of others go."""
    (rows, stride), dim, width = keys, args[field.KEY_DIM], args[field.KEY_WIDTH]
    wide, products = area + args[field.AT_KEYS], area + args[field.AT_PRODUCTS]
    places = carray(int64_at(area + args[field.AT_PLACES]), (LANES,))
    for j in range(0, len(slots), LANES):
        its = slots[j : j + LANES]
        prefetch_ahead(j, rows, stride, slots, like.itemsize * dim, following)
        find(rows, stride, its, dim, wide, width, places, like)
        its_places = places[: len(its)]
        of_row = args[field.SCORES_ROW]
        score(area, args[field.RATIO], its_places, width, products, scores, of_row)
        scores += 4 * LANES
    return scores


@njit(**OPTIONS)
def _add_all(args, values, slots, following, weights, sums, area, like):  # type: ignore[no-untyped-def]
    """Adds the weighted values in some slots; gives where the weights of others are."""
    (rows, stride), dim, width = values, args[field.VALUE_DIM], args[field.VALUE_WIDTH]
    wide, ratio = area + args[field.AT_VALUES], args[field.RATIO]
    places = carray(int64_at(area + args[field.AT_PLACES]), (LANES,))
    for j in range(0, len(slots), LANES):
        its = slots[j : j + LANES]
        prefetch_ahead(j, rows, stride, slots, like.itemsize * dim, following)
        find(rows, stride, its, dim, wide, width, places, like)
        add_weighted(sums, ratio, places[: len(its)], width, weights, args[field.SCORES_ROW])
        weights += 4 * LANES
    return weights


@njit(**OPTIONS)
def _piece(args, thread, number):  # type: ignore[no-untyped-def]
    """Where a thread has the sums, highest scores and totals of its first (0) or another piece."""
    ratio, width = args[field.RATIO], args[field.VALUE_WIDTH]
    lanes = (ratio + LANES - 1) // LANES * LANES
    at = args[field.SCRATCH] + thread * args[field.SCRATCH_SIZE] + args[field.AT_PIECES]
    at += 4 * number * (ratio * width + 2 * lanes)
    peaks = carray(float32_at(at + 4 * ratio * width), (ratio,))
    totals = carray(float32_at(at + 4 * (ratio * width + lanes)), (ratio,))
    return at, peaks, totals


@njit(**OPTIONS)
def _attend_piece(args, unit, first, last, next_unit, piece, area, like):  # type: ignore[no-untyped-def]
    """Attends to some tokens of a unit, while the keys of the next one are fetched."""
    heads, size, scores = args[field.HEADS], like.itemsize, area + args[field.AT_SCORES]
    row, head = unit // heads, unit % heads
    sums, peaks, totals = piece
    if args[field.NEW_KEYS] != 0:
        _store_new(args, row, head, like)
    keys, values, slots = own_tokens(args, row, head, size)
    next_keys, _, next_slots = own_tokens(args, next_unit // heads, next_unit % heads, size)
    own = some(slots, first, last)
    then_values = *values, own, size * args[field.VALUE_DIM]
    then_keys = *next_keys, next_slots, size * args[field.KEY_DIM]
    _take_queries(args, row, head, area, args[field.KEY_WIDTH], like)
    end, before = _score_all(args, keys, own, then_values, scores, area, like), len(slots)
    for number in range(args[field.NUM_SEGMENTS]):
        keys, _, tokens = segment_tokens(args, number, row, head, size)
        its = some(tokens, first - before, last - before)
        end = _score_all(args, keys, its, then_values, end, area, like)
        before += len(tokens)
    ratio, width = args[field.RATIO], args[field.VALUE_WIDTH]
    for i in range(ratio):
        peaks[i], totals[i] = weigh(scores + args[field.SCORES_ROW] * i, end - scores)
    for at in range(sums, sums + 4 * ratio * width, 64):
        store(at, full(_F(0)))
    end, before = _add_all(args, values, own, then_keys, scores, sums, area, like), len(slots)
    for number in range(args[field.NUM_SEGMENTS]):
        _, values, tokens = segment_tokens(args, number, row, head, size)
        its = some(tokens, first - before, last - before)
        prefetch_tokens(*values, its[:AHEAD], size * args[field.VALUE_DIM])
        end = _add_all(args, values, its, then_keys, end, sums, area, like)
        before += len(tokens)


@njit(**OPTIONS)
def _peak(args, row, head, i, thread, num_pieces):  # type: ignore[no-untyped-def]
    """The largest score, log-sum-exp or sink that one query meets, and the sink."""
    peak, sink = _F(-np.inf), _F(-np.inf)
    for k in range(num_pieces):
        _, peaks, _ = _piece(args, thread + k, k == 0)
        peak = larger_of(peak, peaks[i])
    states = args[field.NUM_ARGUMENTS :]
    peak = peak_of_states(states, args[field.NUM_STATES], row, head, i, peak)
    if args[field.SINKS] != 0:
        query_head = head * args[field.RATIO] + i
        sink = carray(float32_at(args[field.SINKS]), (query_head + 1,))[query_head]
    return larger_of(peak, sink), sink


@njit(**OPTIONS)
def _merge(args, row, head, i, thread, num_pieces):  # type: ignore[no-untyped-def]
    """Merges the pieces of one query, the first in place, and what its prefixes gave; gives the total."""
    peak, sink = _peak(args, row, head, i, thread, num_pieces)
    # nothing is above the lowest where there is nothing to see, or no number
    sees, width = peak > _F(-np.inf), args[field.VALUE_WIDTH]
    base = peak if sees else _F(0)
    to, total = _piece(args, thread, 1)[0] + 4 * width * i, _F(0)
    for k in range(num_pieces):
        sums, peaks, totals = _piece(args, thread + k, k == 0)
        weight, sums = exp_of_negative(peaks[i] - base), sums + 4 * width * i
        total += weight * totals[i]
        for e in range(0, 4 * width, 64):
            weighted = mul(load(sums + e), full(weight))
            store(to + e, weighted if k == 0 else add(load(to + e), weighted))
    out, states = carray(float32_at(to), (args[field.VALUE_DIM],)), args[field.NUM_ARGUMENTS :]
    total = add_states(states, args[field.NUM_STATES], row, head, i, out, base, total)
    if args[field.SINKS] != 0:
        total += exp_of_negative(sink - base)
    return total if sees else _F(0)


@njit(**OPTIONS)
def _close(args, unit, thread, num_pieces, like):  # type: ignore[no-untyped-def]
    """Writes the result of a unit whose pieces are those of a thread and of others after it."""
    row, head = unit // args[field.HEADS], unit % args[field.HEADS]
    ratio, dim, width = args[field.RATIO], args[field.VALUE_DIM], args[field.VALUE_WIDTH]
    out = carray(
        pointer_like(args[field.OUT] + like.itemsize * unit * ratio * dim, like), (ratio, dim)
    )
    for i in range(ratio):
        total = _merge(args, row, head, i, thread, num_pieces)
        share = _F(1) / larger_of(total, _F(1e-38))
        merged = carray(float32_at(_piece(args, thread, 1)[0] + 4 * width * i), (dim,))
        for e in range(dim):
            out[i, e] = as_element(merged[e] * share, out)


@njit(**OPTIONS)
def _attend_share(args, thread, shares, area, like):  # type: ignore[no-untyped-def]
    """Attends to all tokens of a share, and closes the units that are whole."""
    (unit, first), (end, end_token) = share(shares, thread)
    highest = end if end_token > 0 else end - 1
    while unit <= highest:
        last = end_token if unit == end else num_tokens(args, unit // args[field.HEADS])
        piece, next_unit = _piece(args, thread, first == 0), min(unit + 1, highest)
        _attend_piece(args, unit, first, last, next_unit, piece, area, like)
        if first == 0 and unit < end:
            _close(args, unit, thread, 1, like)
        unit, first = unit + 1, 0


@njit(**OPTIONS)
def _close_cut(args, thread, threads, shares, like):  # type: ignore[no-untyped-def]
    """Closes the unit that a share ends in the middle of, unless it began there."""
    (first_unit, first), (unit, token) = share(shares, thread)
    if token == 0 or (first_unit == unit and first > 0):
        return
    num_pieces = 1
    while thread + num_pieces < threads:
        (its_unit, its_first), _ = share(shares, thread + num_pieces)
        if its_unit != unit or its_first == 0:
            break
        num_pieces += 1
    _close(args, unit, thread, num_pieces, like)


@njit(**OPTIONS)
def _attend(args, like):  # type: ignore[no-untyped-def]
    """Does the share of one thread; `like` is an array of the kind of elements that are read."""
    thread, threads = team()
    area = args[field.SCRATCH] + thread * args[field.SCRATCH_SIZE]
    # it is read beyond the last element of a row
    for at in range(area, area + args[field.AT_SCORES], 64):
        store(at, full(_F(0)))
    shares = area + args[field.AT_SHARES]
    threads, is_cut = share_out(args, threads, shares)
    if thread < threads:
        _attend_share(args, thread, shares, area, like)
    if is_cut:
        barrier()
        if thread < threads:
            _close_cut(args, thread, threads, shares, like)


@c_function
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for bfloat16."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.uint16))


@c_function
def attend_float32(pointer):  # type: ignore[no-untyped-def]
    """`_attend` for float32."""
    _attend(carray(pointer, (MAX_ARGUMENTS,)), np.empty(0, np.float32))
