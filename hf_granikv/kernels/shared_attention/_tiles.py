"""The compiled `TiledAttention`: a piece of the prefix and a kv head is one unit of work.

Scores are computed transposed, `[tokens, queries]`, so that keys go into tiles as they lie and the
softmax runs down the vectors, one query per lane. Weights are then transposed in registers.
"""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_threads import share_of
from hf_granikv.kernels._numba_tiles import (
    add_product,
    clear_tile,
    configure_tiles,
    exp2,
    interleave,
    load_tile,
    release_tiles,
    store_pairs,
    store_tile,
    transpose_pairs,
    unsupported_reasons,
)
from hf_granikv.kernels._numba_types import (
    OPTIONS,
    c_function,
    float32_at,
    number_at,
    uint16_at,
)
from hf_granikv.kernels._numba_vectors import (
    add,
    any_below_one,
    fma,
    full,
    larger,
    load,
    mul,
    prefetch,
    store,
    sub,
)
from hf_granikv.kernels.shared_attention import _arguments as field

# LLVM would end the process
if reasons := unsupported_reasons():
    raise ImportError(", ".join(reasons))
_F = np.float32

# where the parts of a thread's scratch memory begin, behind the queries
NUM_ARGUMENTS = field.NUM_COMMON + 7
AT_SUMS, AT_PEAKS, AT_TOTALS, AT_VALUES, AT_SCORES, AT_TAIL, TILE_CONFIG = range(
    field.NUM_COMMON, NUM_ARGUMENTS
)

# a tile has 16 rows of 64 bytes
TILE = 16
TILE_BYTES = 1024
# tokens whose scores are alive at once
BLOCK = 64
# of a block, for 16 queries
WEIGHTS_BYTES = 2 * TILE * BLOCK
# as far ahead keys and values are fetched into the cache
AHEAD = 2 * BLOCK
LOWEST = -1e30
LOG_2 = 0.6931471805599453

_clear0, _clear1, _clear2, _clear3 = (clear_tile(i) for i in range(4))
_load0, _load1, _load2, _load3, _load4, _load5, _load6, _load7 = (load_tile(i) for i in range(8))
_store0, _store1, _store2, _store3 = (store_tile(i) for i in range(4))
_add_46_to_0, _add_56_to_1 = add_product(0, 4, 6), add_product(1, 5, 6)
_add_46_to_2, _add_56_to_3 = add_product(2, 4, 6), add_product(3, 5, 6)
_add_47_to_1, _add_47_to_3 = add_product(1, 4, 7), add_product(3, 4, 7)


@njit(**OPTIONS)
def _pack_queries(args, head, to):  # type: ignore[no-untyped-def]
    """Queries of one kv head as right operands: pairs of elements, 16 queries wide."""
    per_row, pairs = args[field.RATIO] * args[field.Q_LEN], args[field.KEY_DIM] // 2
    packed = carray(uint16_at(to), ((args[field.QUERIES] + TILE - 1) // TILE, pairs, TILE, 2))
    packed[-1] = 0
    for i in range(args[field.QUERIES]):
        row, in_row = number_at(args[field.ROWS], i // per_row), i % per_row
        at = row * args[field.QUERY_ROW] + in_row % args[field.Q_LEN] * args[field.QUERY_TOKEN]
        at += (head * args[field.RATIO] + in_row // args[field.Q_LEN]) * args[field.QUERY_HEAD]
        query = carray(uint16_at(args[field.QUERY] + at), (args[field.KEY_DIM],))
        for e in range(pairs):
            packed[i // TILE, e, i % TILE, 0] = query[2 * e]
            packed[i // TILE, e, i % TILE, 1] = query[2 * e + 1]


@njit(**OPTIONS)
def _pack_values(values, stride, dim, to):  # type: ignore[no-untyped-def]
    """A block of values as right operands: pairs of tokens, 16 elements wide."""
    for _ in range(BLOCK // 32):
        for e in range(dim // 32):
            row, at = values + 64 * e, to + 2 * TILE_BYTES * e
            for _ in range(TILE):
                interleave(row, row + stride, at, at + TILE_BYTES)
                row += 2 * stride
                at += 64
        values += 32 * stride
        to += 64 * dim


@njit(**OPTIONS)
def _score(keys, stride, queries, dim, to):  # type: ignore[no-untyped-def]
    """`[64 tokens, 16 queries]` of scores."""
    _clear0()
    _clear1()
    _clear2()
    _clear3()
    for _ in range(dim // 32):
        _load6(queries, 64)
        _load4(keys, stride)
        _add_46_to_0()
        _load5(keys + 16 * stride, stride)
        _add_56_to_1()
        _load4(keys + 32 * stride, stride)
        _add_46_to_2()
        _load5(keys + 48 * stride, stride)
        _add_56_to_3()
        keys += 64
        queries += TILE_BYTES
    _store0(to, 64)
    _store1(to + TILE_BYTES, 64)
    _store2(to + 2 * TILE_BYTES, 64)
    _store3(to + 3 * TILE_BYTES, 64)


@njit(**OPTIONS)
def _add_values(weights, values, dim, sums):  # type: ignore[no-untyped-def]
    """Adds the block's weighted values to `[16 queries, dim]`, 64 elements at a time."""
    stride = 4 * dim
    for _ in range(dim // 64):
        _load0(sums, stride)
        _load1(sums + 64, stride)
        _load2(sums + 128, stride)
        _load3(sums + 192, stride)
        at = values
        for chunk in range(BLOCK // 32):
            _load4(weights + chunk * TILE_BYTES, 64)
            _load6(at, 64)
            _add_46_to_0()
            _load7(at + TILE_BYTES, 64)
            _add_47_to_1()
            _load6(at + 2 * TILE_BYTES, 64)
            _add_46_to_2()
            _load7(at + 3 * TILE_BYTES, 64)
            _add_47_to_3()
            at += 64 * dim
        _store0(sums, stride)
        _store1(sums + 64, stride)
        _store2(sums + 128, stride)
        _store3(sums + 192, stride)
        sums += 256
        values += 4 * TILE_BYTES


@njit(**OPTIONS)
def _prefetch(address, num_bytes):  # type: ignore[no-untyped-def]
    for offset in range(0, num_bytes, 64):
        prefetch(address + offset)


@njit(**OPTIONS)
def _weigh(scores, peaks, totals, scale, keys, key_bytes, values, value_bytes):  # type: ignore[no-untyped-def]
    """Turns scores into weights in bfloat16, where they are; gives the factor on earlier sums.

    Meanwhile fetches what comes next, so many bytes of keys and values per two tokens.
    """
    factor, old = full(scale), load(peaks)
    even, odd = load(scores), load(scores + 64)
    for at in range(scores + 128, scores + 64 * BLOCK, 128):
        _prefetch(keys, key_bytes)
        keys += key_bytes
        even, odd = larger(even, load(at)), larger(odd, load(at + 64))
    peak = larger(old, mul(larger(even, odd), factor))
    store(peaks, peak)
    below = sub(full(_F(0)), peak)
    even = odd = full(_F(0))
    weights = scores
    for at in range(scores, scores + 64 * BLOCK, 128):
        _prefetch(values, value_bytes)
        values += value_bytes
        first = exp2(fma(load(at), factor, below))
        second = exp2(fma(load(at + 64), factor, below))
        even, odd = add(even, first), add(odd, second)
        store_pairs(weights, first, second)
        weights += 64
    shrink = exp2(sub(old, peak))
    store(totals, fma(load(totals), shrink, add(even, odd)))
    return shrink


@njit(**OPTIONS)
def _shrink(sums, dim, shrink, scratch):  # type: ignore[no-untyped-def]
    """Multiplies each row of `[16 queries, dim]` by its own factor."""
    store(scratch, shrink)
    factors = carray(float32_at(scratch), (TILE,))
    for i in range(TILE):
        factor = full(factors[i])
        for _ in range(dim // 16):
            store(sums, mul(load(sums), factor))
            sums += 64


@njit(**OPTIONS)
def _attend_block(args, keys, key_stride, values, value_stride, num_tokens, area):  # type: ignore[no-untyped-def]
    """Attends from all queries of a kv head to one block, of which `num_tokens` exist."""
    key_dim, value_dim = args[field.KEY_DIM], args[field.VALUE_DIM]
    num_tiles = (args[field.QUERIES] + TILE - 1) // TILE
    # base two: the exponential is
    scale = carray(float32_at(args[field.SCALE]), (1,))[0] * _F(1 / LOG_2)
    scores, packed, queries = area + args[AT_SCORES], area + args[AT_VALUES], area
    sums, peaks, totals = area + args[AT_SUMS], area + args[AT_PEAKS], area + args[AT_TOTALS]
    next_keys, next_values = keys + AHEAD * key_stride, values + AHEAD * value_stride
    key_bytes = (BLOCK * key_stride // (32 * num_tiles) + 63) // 64 * 64
    value_bytes = (BLOCK * value_stride // (32 * num_tiles) + 63) // 64 * 64
    _pack_values(values, value_stride, value_dim, packed)
    for _ in range(num_tiles):
        _score(keys, key_stride, queries, key_dim, scores)
        for token in range(num_tokens, BLOCK):
            store(scores + 64 * token, full(_F(LOWEST)))
        shrink = _weigh(
            *(scores, peaks, totals, scale),
            *(next_keys, key_bytes, next_values, value_bytes),
        )
        for chunk in range(0, WEIGHTS_BYTES, TILE_BYTES):
            transpose_pairs(scores + chunk, scores + chunk)
        if any_below_one(shrink):
            _shrink(sums, value_dim, shrink, scores + WEIGHTS_BYTES)
        _add_values(scores, packed, value_dim, sums)
        next_keys += 32 * key_bytes
        next_values += 32 * value_bytes
        queries += 32 * key_dim
        sums += 64 * value_dim
        peaks += 64
        totals += 64


@njit(**OPTIONS)
def _attend_tail(args, keys, key_stride, values, value_stride, num_tokens, area):  # type: ignore[no-untyped-def]
    """Attends to a block that the prefix does not fill, in a copy with zeros behind."""
    copy = area + args[AT_TAIL]
    copied = copy + 2 * BLOCK * args[field.KEY_DIM]
    for at, source, stride, dim in (
        (copy, keys, key_stride, args[field.KEY_DIM]),
        (copied, values, value_stride, args[field.VALUE_DIM]),
    ):
        block = carray(uint16_at(at), (BLOCK, dim))
        block[num_tokens:] = 0
        for token in range(num_tokens):
            block[token] = carray(uint16_at(source + token * stride), (dim,))
    strides = 2 * args[field.KEY_DIM], 2 * args[field.VALUE_DIM]
    _attend_block(args, copy, strides[0], copied, strides[1], num_tokens, area)


@njit(**OPTIONS)
def _finish(args, unit, area):  # type: ignore[no-untyped-def]
    """Divides the sums by the totals, and writes what one unit found."""
    num_queries, dim = args[field.QUERIES], args[field.VALUE_DIM]
    sums = carray(float32_at(area + args[AT_SUMS]), (num_queries, dim))
    peaks = carray(float32_at(area + args[AT_PEAKS]), (num_queries,))
    totals = carray(float32_at(area + args[AT_TOTALS]), (num_queries,))
    out = carray(float32_at(args[field.OUT] + 4 * unit * num_queries * dim), (num_queries, dim))
    lse = carray(float32_at(args[field.LSE] + 4 * unit * num_queries), (num_queries,))
    for i in range(num_queries):
        share = _F(1) / totals[i]
        for e in range(dim):
            out[i, e] = sums[i, e] * share
        lse[i] = (peaks[i] + np.log2(totals[i])) * _F(LOG_2)


@njit(**OPTIONS)
def _attend(args):  # type: ignore[no-untyped-def]
    """Does the share of one thread; units are ordered as the results: by piece, then by head."""
    heads, pieces, num_units = (
        args[field.HEADS],
        args[field.PIECES],
        args[field.HEADS] * args[field.PIECES],
    )
    key_stride, value_stride = args[field.KEYS_TOKEN], args[field.VALUES_TOKEN]
    thread, first, stop = share_of(num_units)
    num_blocks = (args[field.LENGTH] + BLOCK - 1) // BLOCK
    num_tiles = (args[field.QUERIES] + TILE - 1) // TILE
    area = args[field.SCRATCH] + thread * args[field.SCRATCH_SIZE]
    configure_tiles(args[TILE_CONFIG])
    for unit in range(first, stop):
        piece, head = unit // heads, unit % heads
        _pack_queries(args, head, area)
        for i in range(num_tiles * args[field.VALUE_DIM]):
            store(area + args[AT_SUMS] + 64 * i, full(_F(0)))
        for i in range(num_tiles):
            store(area + args[AT_PEAKS] + 64 * i, full(_F(LOWEST)))
            store(area + args[AT_TOTALS] + 64 * i, full(_F(0)))
        for block in range(num_blocks * piece // pieces, num_blocks * (piece + 1) // pieces):
            start = block * BLOCK
            keys = args[field.KEYS] + head * args[field.KEYS_HEAD] + start * key_stride
            values = args[field.VALUES] + head * args[field.VALUES_HEAD] + start * value_stride
            num_tokens = min(BLOCK, args[field.LENGTH] - start)
            if num_tokens == BLOCK:
                _attend_block(args, keys, key_stride, values, value_stride, num_tokens, area)
            else:
                _attend_tail(args, keys, key_stride, values, value_stride, num_tokens, area)
        _finish(args, unit, area)
    release_tiles()


@c_function
def attend_bfloat16(pointer):  # type: ignore[no-untyped-def]
    """`_attend`."""
    _attend(carray(pointer, (NUM_ARGUMENTS,)))
