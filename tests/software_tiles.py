"""Intel AMX in software, so that what is written for its tiles runs on any CPU with AVX-512.

As a plugin of pytest (`-p software_tiles`), in a process of its own. Each thread has eight tiles; as
Intel's instruction set reference has it, they are configured from 64 bytes before they are used, and
gone when released: what is read from a tile that is not configured is NaN.
"""

import numpy as np
import pytest
import torch
from numba import carray, cfunc, njit, types

from hf_granikv.kernels import _numba_tiles as real
from hf_granikv.kernels import _numba_types, compiled
from hf_granikv.kernels._numba_llvm import I8
from hf_granikv.kernels._numba_threads import team
from hf_granikv.kernels._numba_types import (
    C_OPTIONS,
    OPTIONS,
    as_float,
    float32_at,
    opt_level,
    pointer_to,
    uint16_at,
)
from hf_granikv.kernels.shared_attention import TiledAttention

MAX_THREADS, NUM_TILES, MAX_ROWS, MAX_WIDTH = 64, 8, 16, 64
PALETTE = 1
NO_NUMBER = 0xFFFF

_tiles = np.full((MAX_THREADS, NUM_TILES, MAX_ROWS, MAX_WIDTH // 2), NO_NUMBER, np.uint16)
_config = np.zeros((MAX_THREADS, MAX_WIDTH), np.uint8)
# compiled code finds them by address
TILES, CONFIG = compiled.address_of(_tiles.view(np.int16)), compiled.address_of(_config)
uint8_at = pointer_to(types.uint8, I8)


@njit(**OPTIONS)
def _thread():
    # more threads than there are tiles for get wrong results, and nobody else's memory
    return min(team()[0], MAX_THREADS - 1)


@njit(**OPTIONS)
def _config_of(thread):
    return carray(uint8_at(CONFIG + thread * MAX_WIDTH), (MAX_WIDTH,))


@njit(**OPTIONS)
def _address_of(thread, number):
    return TILES + (thread * NUM_TILES + number) * MAX_ROWS * MAX_WIDTH


@njit(**OPTIONS)
def _size(number):
    """The rows of a tile and the bytes of each; none where tiles are not configured."""
    thread = _thread()
    config = _config_of(thread)
    if config[0] != PALETTE:
        return thread, 0, 0
    return thread, np.int64(config[48 + number]), np.int64(config[16 + 2 * number])


@njit(**OPTIONS)
def _halves(thread, number):
    """A tile as elements of 2 bytes."""
    return carray(uint16_at(_address_of(thread, number)), (MAX_ROWS, MAX_WIDTH // 2))


@njit(**OPTIONS)
def _numbers(thread, number):
    """A tile as float32."""
    return carray(float32_at(_address_of(thread, number)), (MAX_ROWS, MAX_WIDTH // 4))


# element by element: what numba makes of an array set to another takes long to compile
@njit(**OPTIONS)
def _fill(array, value):
    for row in range(array.shape[0]):
        for column in range(array.shape[1]):
            array[row, column] = value


@njit(**OPTIONS)
def configure_tiles(address):
    thread = _thread()
    config, given = _config_of(thread), carray(uint8_at(address), (MAX_WIDTH,))
    for i in range(MAX_WIDTH):
        config[i] = given[i]
    for number in range(NUM_TILES):
        _fill(_halves(thread, number), 0)


@njit(**OPTIONS)
def release_tiles():
    thread = _thread()
    config = _config_of(thread)
    for i in range(MAX_WIDTH):
        config[i] = 0
    for number in range(NUM_TILES):
        _fill(_halves(thread, number), NO_NUMBER)


@njit(**OPTIONS)
def _load(number, address, stride):
    thread, rows, width = _size(number)
    tile = _halves(thread, number)
    _fill(tile, 0 if rows else NO_NUMBER)
    for row in range(rows):
        given = carray(uint16_at(address + row * stride), (width // 2,))
        for i in range(width // 2):
            tile[row, i] = given[i]


@njit(**OPTIONS)
def _store(number, address, stride):
    thread, rows, width = _size(number)
    tile = _halves(thread, number)
    for row in range(rows):
        place = carray(uint16_at(address + row * stride), (width // 2,))
        for i in range(width // 2):
            place[i] = tile[row, i]


@njit(**OPTIONS)
def _clear(number):
    thread, rows, _ = _size(number)
    _fill(_halves(thread, number), 0 if rows else NO_NUMBER)


@njit(**OPTIONS)
def _add_product(total, a, b):
    thread, rows, width = _size(total)
    pairs = _size(a)[2] // 4
    sums, left, right = _numbers(thread, total), _halves(thread, a), _halves(thread, b)
    for row in range(rows):
        for pair in range(pairs):
            first, second = as_float(left[row, 2 * pair]), as_float(left[row, 2 * pair + 1])
            for column in range(width // 4):
                sums[row, column] += first * as_float(right[pair, 2 * column])
                sums[row, column] += second * as_float(right[pair, 2 * column + 1])


def load_tile(number):
    return njit(**OPTIONS)(lambda address, stride: _load(number, address, stride))


def store_tile(number):
    return njit(**OPTIONS)(lambda address, stride: _store(number, address, stride))


def clear_tile(number):
    return njit(**OPTIONS)(lambda: _clear(number))


def add_product(total, a, b):
    return njit(**OPTIONS)(lambda: _add_product(total, a, b))


FUNCTIONS = configure_tiles, release_tiles, load_tile, store_tile, clear_tile, add_product


def compile_unkept(function):
    """What is compiled against tiles in software must not be taken for the real thing later."""
    with opt_level():
        return cfunc(types.void(types.CPointer(types.int64)), **C_OPTIONS)(function)


def _take_the_place_of_real_ones():
    if real.unsupported_reasons() == []:
        raise RuntimeError("this CPU has tiles: run the tests without the plugin")
    torch.cpu._init_amx = lambda: True
    real.unsupported_reasons = list
    with pytest.MonkeyPatch.context() as patch:
        for function in FUNCTIONS:
            patch.setattr(real, function.__name__, function)
        patch.setattr(_numba_types, "c_function", compile_unkept)
        assert not isinstance(compiled.load(TiledAttention.module), str)


_take_the_place_of_real_ones()
