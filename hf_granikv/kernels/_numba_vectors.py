"""Vectors of 16 float32 for numba; on CPUs with narrower ones LLVM makes several of each."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from hf_granikv.kernels._numba_llvm import (
    ADDRESS,
    FAST,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    NONE,
    VECTOR,
    broadcast,
    call,
    fetch,
    fused,
    llvm_intrinsic,
    read,
    splat,
    write,
)

# 2^f for |f| <= 1/2, from the highest degree, with 2^0 = 1: least squares at Chebyshev nodes
EXP2 = (0.00132186725, 0.00967169794, 0.0555089295, 0.24022238, 0.693146856, 1.0)
# to 4e-6 of itself
ROUGH_EXP2 = (0.0096004, 0.05591689, 0.24023718, 0.69312199, 1.0)

_SHORTS = ir.VectorType(I16, 16)


@llvm_intrinsic(VECTOR, ADDRESS)
def load(builder: Any, address: Any) -> Any:
    """The vector at an address."""
    return read(builder, address, FLOATS)


@llvm_intrinsic(VECTOR, ADDRESS)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """16 bfloat16 at an address, as float32."""
    bits = builder.zext(read(builder, address, _SHORTS), INTS)
    return builder.bitcast(builder.shl(bits, splat(INTS, 16)), FLOATS)


@llvm_intrinsic(NONE, ADDRESS, VECTOR)
def store(builder: Any, address: Any, vector: Any) -> None:
    """Puts a vector to an address."""
    write(builder, vector, address)


@llvm_intrinsic(VECTOR, types.float32)
def full(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    return broadcast(builder, number)


@llvm_intrinsic(VECTOR, VECTOR, VECTOR)
def add(builder: Any, a: Any, b: Any) -> Any:
    """The sums."""
    return builder.fadd(a, b, flags=FAST)


@llvm_intrinsic(VECTOR, VECTOR, VECTOR)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """The differences."""
    return builder.fsub(a, b, flags=FAST)


@llvm_intrinsic(VECTOR, VECTOR, VECTOR)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """The products."""
    return builder.fmul(a, b, flags=FAST)


@llvm_intrinsic(VECTOR, VECTOR, VECTOR, VECTOR)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The products of the first two, plus the third."""
    return fused(builder, a, b, c)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@llvm_intrinsic(VECTOR, VECTOR, VECTOR)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each two, b where one is NaN."""
    return _larger(builder, a, b)


def polynomial(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """Appends a polynomial, given from the highest degree."""
    total = splat(FLOATS, coefficients[0])
    for coefficient in coefficients[1:]:
        total = fused(builder, total, x, splat(FLOATS, coefficient))
    return total


@llvm_intrinsic(VECTOR, VECTOR)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """2 to the power of numbers that are not positive, to 2e-7 of itself; 1e-38 from -126 on."""
    # in this order NaN stays what it is
    x = _larger(builder, splat(FLOATS, -126.0), x)
    whole = call(builder, "llvm.rint.v16f32", FLOATS, x)
    power = polynomial(builder, builder.fsub(x, whole, flags=FAST), EXP2)
    exponent = builder.shl(builder.fptosi(whole, INTS), splat(INTS, 23))
    return builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)


def _folded(builder: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Appends what makes one number of those of a vector."""
    for size in (8, 4, 2, 1):
        order = ir.Constant(INTS, [i ^ size for i in range(16)])
        x = combine(x, builder.shuffle_vector(x, x, order))
    return builder.extract_element(x, ir.Constant(I32, 0))


@llvm_intrinsic(types.float32, VECTOR)
def sum_of(builder: Any, x: Any) -> Any:
    """The sum of the numbers of a vector."""
    return _folded(builder, x, partial(builder.fadd, flags=FAST))


@llvm_intrinsic(types.float32, VECTOR)
def largest_of(builder: Any, x: Any) -> Any:
    """The largest number of a vector."""
    return _folded(builder, x, partial(_larger, builder))


def halves(size: int) -> tuple[Any, Any]:
    """Which of two vectors' numbers go to each, where blocks of a size cross the diagonal."""
    upper = [16 + (i ^ size) if i & size else i for i in range(16)]
    lower = [16 + i if i & size else i | size for i in range(16)]
    return ir.Constant(INTS, upper), ir.Constant(INTS, lower)


@llvm_intrinsic(VECTOR, ADDRESS)
def sums_of_rows(builder: Any, address: Any) -> Any:
    """The sums of 16 vectors that lie behind each other."""
    offsets = (ir.Constant(I64, 64 * i) for i in range(16))
    rows = [read(builder, builder.add(address, offset), FLOATS) for offset in offsets]
    for size in (1, 2, 4, 8):
        # a transposition, of which only the sum over the rows is kept
        upper, lower = halves(size)
        for i in range(0, 16, 2 * size):
            pair = rows[i], rows[i | size]
            parts = (builder.shuffle_vector(*pair, order) for order in (upper, lower))
            rows[i] = builder.fadd(*parts, flags=FAST)
    return rows[0]


@llvm_intrinsic(types.boolean, VECTOR)
def any_below_one(builder: Any, x: Any) -> Any:
    """Whether some number is less than 1."""
    bits = builder.bitcast(builder.fcmp_ordered("<", x, splat(FLOATS, 1.0)), I16)
    return builder.icmp_unsigned("!=", bits, ir.Constant(I16, 0))


@llvm_intrinsic(NONE, ADDRESS)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for the 64 bytes around an address, which need not exist."""
    fetch(builder, address)
