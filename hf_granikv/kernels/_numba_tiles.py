"""What only CPUs with AMX have, for numba: tiles, and what their operands are made with."""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from hf_granikv.kernels._numba_llvm import (
    ADDRESS,
    FAST,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    NONE,
    SHORTS,
    VECTOR,
    call,
    cpu_features,
    llvm_intrinsic,
    pointer,
    read,
    splat,
    write,
)
from hf_granikv.kernels._numba_vectors import ROUGH_EXP2, halves, polynomial

_NEEDS = ("avx512f", "avx512bw", "amx-tile", "amx-bf16")


@cache
def unsupported_reasons() -> list[str]:
    """Gives what numba's code for this CPU lacks; LLVM ends the process that asks for it."""
    features = cpu_features()
    return [f"this CPU has no {name}" for name in _NEEDS if f"+{name}" not in features]


@llvm_intrinsic(VECTOR, VECTOR)
def exp2(builder: Any, x: Any) -> Any:
    """2 to the power of finite numbers, to 4e-6 of itself; 0 far below zero."""
    whole = call(builder, "llvm.rint.v16f32", FLOATS, x)
    fraction = builder.fsub(x, whole, flags=FAST)
    power = polynomial(builder, fraction, ROUGH_EXP2)
    return call(
        builder,
        "llvm.x86.avx512.mask.scalef.ps.512",
        FLOATS,
        *(power, whole, splat(FLOATS, 0.0), ir.Constant(I16, -1), ir.Constant(I32, 4)),
    )


@llvm_intrinsic(NONE, ADDRESS, VECTOR, VECTOR)
def store_pairs(builder: Any, address: Any, first: Any, second: Any) -> None:
    """Puts two vectors, not negative, rounded to bfloat16, one number of each in turn."""
    # half a unit in the last place carries into what stays
    low, high = (
        builder.add(builder.bitcast(vector, INTS), splat(INTS, 0x8000))
        for vector in (first, second)
    )
    low = builder.lshr(low, splat(INTS, 16))
    write(builder, builder.or_(low, builder.and_(high, splat(INTS, -0x10000))), address)


@llvm_intrinsic(NONE, ADDRESS, ADDRESS)
def transpose_pairs(builder: Any, source: Any, target: Any) -> None:
    """Transposes 16 x 16 elements of 4 bytes, rows of 64 bytes behind each other."""
    offsets = [ir.Constant(I64, 64 * i) for i in range(16)]
    rows = [read(builder, builder.add(source, offset), INTS) for offset in offsets]
    for size in (1, 2, 4, 8):
        # 2 x 2 blocks of this size change places across the diagonal
        upper, lower = halves(size)
        for i in range(16):
            if not i & size:
                pair = rows[i], rows[i | size]
                rows[i] = builder.shuffle_vector(*pair, upper)
                rows[i | size] = builder.shuffle_vector(*pair, lower)
    for row, offset in zip(rows, offsets, strict=True):
        write(builder, row, builder.add(target, offset))


@llvm_intrinsic(NONE, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def interleave(builder: Any, first: Any, second: Any, target: Any, target_2: Any) -> None:
    """Puts 2 x 32 elements of 2 bytes, one of each in turn: 16 pairs to each target."""
    pair = read(builder, first, SHORTS), read(builder, second, SHORTS)
    for address, start in ((target, 0), (target_2, 16)):
        order = [half + start + i for i in range(16) for half in (0, 32)]
        indices = ir.Constant(ir.VectorType(I32, 32), order)
        write(builder, builder.shuffle_vector(*pair, indices), address)


def _tile(builder: Any, name: str, *args: Any) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


@llvm_intrinsic(NONE, ADDRESS)
def configure_tiles(builder: Any, address: Any) -> None:
    """Takes the sizes of the tiles from the 64 bytes at an address."""
    _tile(builder, "ldtilecfg", pointer(builder, address, I8))


@llvm_intrinsic(NONE)
def release_tiles(builder: Any) -> None:
    """Leaves the tiles as they were found."""
    _tile(builder, "tilerelease")


def load_tile(number: int) -> Any:
    """A function that loads a tile from an address, its rows so many bytes apart."""

    @llvm_intrinsic(NONE, ADDRESS, types.int64)
    def load(builder: Any, address: Any, stride: Any) -> None:
        tile = ir.Constant(I8, number)
        _tile(builder, "tileloadd64", tile, pointer(builder, address, I8), stride)

    return load


def store_tile(number: int) -> Any:
    """A function that puts a tile to an address, its rows so many bytes apart."""

    @llvm_intrinsic(NONE, ADDRESS, types.int64)
    def store(builder: Any, address: Any, stride: Any) -> None:
        tile = ir.Constant(I8, number)
        _tile(builder, "tilestored64", tile, pointer(builder, address, I8), stride)

    return store


def clear_tile(number: int) -> Any:
    """A function that sets a tile to 0."""

    @llvm_intrinsic(NONE)
    def clear(builder: Any) -> None:
        _tile(builder, "tilezero", ir.Constant(I8, number))

    return clear


def add_product(total: int, a: int, b: int) -> Any:
    """A function that adds to a tile of float32 the product of two of bfloat16."""

    @llvm_intrinsic(NONE)
    def add(builder: Any) -> None:
        _tile(builder, "tdpbf16ps", *(ir.Constant(I8, tile) for tile in (total, a, b)))

    return add
