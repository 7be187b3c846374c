"""Products of matrices for numba, whose sums stay in registers until all is added."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core.registry import cpu_target

from hf_granikv.kernels._numba_llvm import (
    ADDRESS,
    FAST,
    FLOATS,
    I64,
    NONE,
    broadcast,
    fused,
    llvm_intrinsic,
    pointer,
    read,
    splat,
    write,
)
from hf_granikv.kernels._numba_types import OPTIONS
from hf_granikv.kernels._numba_vectors import prefetch

_features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
# rows by vectors of 16 whose sums fit the registers: 32 of 16 numbers each, or 16 of 8
ADDED_ROWS, NUM_VECTORS = (8, 3) if "+avx512f" in _features else (4, 1)
# two sums for each, of every second column: rounded less, as where a product runs along vectors
NUM_CHAINS = 2
PRODUCT_ROWS = ADDED_ROWS // NUM_CHAINS
# bytes of the vectors of one number
STEP = 64 * NUM_VECTORS


def product(num_vectors: int) -> Any:
    """A function that multiplies a matrix, read number by number, by one that is read in vectors.

    Returns:
        A function of the address of the left matrix, the bytes between its rows and between its
        columns, and its rows; the address of the right one, whose rows are `STEP` apart, and how
        many they are, at least one; where the product goes, whose rows are too; and what is fetched
        into the cache meanwhile: an address, the bytes between rows and of each, and how many rows
        for `PRODUCT_ROWS` of the left matrix.
    """
    several, one = _rows(PRODUCT_ROWS, num_vectors), _rows(1, num_vectors)

    @njit(**OPTIONS)
    def multiply(left, of_row, of_column, rows, right, count, to, ahead):  # type: ignore[no-untyped-def]
        for i in range(rows // PRODUCT_ROWS):
            _fetch(ahead, i)
            several(left, of_row, of_column, right, count, to)
            left += PRODUCT_ROWS * of_row
            to += PRODUCT_ROWS * STEP
        for _ in range(rows % PRODUCT_ROWS):
            one(left, of_row, of_column, right, count, to)
            left += of_row
            to += STEP

    return multiply


def added_product(num_vectors: int) -> Any:
    """As `product`, added to what is there times factors: vectors at one more address, the last.

    It has `ADDED_ROWS` for `PRODUCT_ROWS`.
    """
    several, one = _added_rows(ADDED_ROWS, num_vectors), _added_rows(1, num_vectors)

    @njit(**OPTIONS)
    def multiply(left, of_row, of_column, rows, right, count, to, ahead, factors):  # type: ignore[no-untyped-def]
        for i in range(rows // ADDED_ROWS):
            _fetch(ahead, i)
            several(left, of_row, of_column, right, count, to, factors)
            left += ADDED_ROWS * of_row
            to += ADDED_ROWS * STEP
        for _ in range(rows % ADDED_ROWS):
            one(left, of_row, of_column, right, count, to, factors)
            left += of_row
            to += STEP

    return multiply


@njit(**OPTIONS)
def _fetch(ahead, share):  # type: ignore[no-untyped-def]
    """Asks for one share of some rows."""
    address, stride, num_bytes, rows = ahead
    address += share * rows * stride
    for _ in range(rows):
        for offset in range(0, num_bytes, 64):
            prefetch(address + offset)
        address += stride


def _rows(num_rows: int, num_vectors: int) -> Any:
    @llvm_intrinsic(NONE, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def multiply(builder: Any, left: Any, of_row: Any, of_column: Any, *rest: Any) -> None:
        right, count, to = rest
        zeros = [splat(FLOATS, 0.0)] * (num_rows * num_vectors)
        sums = _summed(
            builder, zeros, num_vectors, left, of_row, of_column, right, count, NUM_CHAINS
        )
        for total, place in zip(sums, _places(builder, to, num_rows, num_vectors), strict=True):
            write(builder, total, place)

    return multiply


def _added_rows(num_rows: int, num_vectors: int) -> Any:
    @llvm_intrinsic(NONE, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def multiply(builder: Any, left: Any, of_row: Any, of_column: Any, *rest: Any) -> None:
        right, count, to, factors = rest
        places = _places(builder, to, num_rows, num_vectors)
        by = [read(builder, at, FLOATS) for at in _places(builder, factors, 1, num_vectors)]
        before = [
            builder.fmul(read(builder, place, FLOATS), by[i % num_vectors], flags=FAST)
            for i, place in enumerate(places)
        ]
        sums = _summed(builder, before, num_vectors, left, of_row, of_column, right, count)
        for total, place in zip(sums, places, strict=True):
            write(builder, total, place)

    return multiply


def _places(builder: Any, address: Any, num_rows: int, num_vectors: int) -> list[Any]:
    offsets = [STEP * i + 64 * v for i in range(num_rows) for v in range(num_vectors)]
    return [builder.add(address, ir.Constant(I64, offset)) for offset in offsets]


def _summed(
    builder: Any,
    before: Sequence[Any],
    num_vectors: int,
    left: Any,
    of_row: Any,
    of_column: Any,
    right: Any,
    count: Any,
    num_chains: int = 1,
) -> list[Any]:
    """Appends the loop over the columns of the left matrix; gives the sums after it.

    With several chains, a sum is that of as many, of every so manieth column each: rounded less.
    """
    num_sums = len(before)

    def add_column(column: Any, vectors: Any, sums: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        loaded = [read(builder, at, FLOATS) for at in _places(builder, vectors, 1, num_vectors)]
        totals, row = [], column
        for i in range(0, num_sums, num_vectors):
            factor = broadcast(builder, builder.load(pointer(builder, row, ir.FloatType())))
            row = builder.add(row, of_row)
            totals += [fused(builder, factor, x, sums[i + v]) for v, x in enumerate(loaded)]
        vectors = builder.add(vectors, ir.Constant(I64, STEP))
        return builder.add(column, of_column), vectors, totals

    def add_columns(column: Any, vectors: Any, *chains: Any) -> list[Any]:
        totals = []
        for i in range(0, len(chains), num_sums):
            column, vectors, more = add_column(column, vectors, chains[i : i + num_sums])
            totals += more
        return [column, vectors, *totals]

    zeros = [splat(FLOATS, 0.0)] * num_sums * (num_chains - 1)
    chains, size = [*before, *zeros], ir.Constant(I64, num_chains)
    column, vectors, *totals = _repeat(
        builder, builder.udiv(count, size), [left, right, *chains], add_columns
    )
    sums = totals[:num_sums]
    for i in range(num_sums, len(totals), num_sums):
        pairs = zip(sums, totals[i : i + num_sums], strict=True)
        sums = [builder.fadd(*pair, flags=FAST) for pair in pairs]
    if num_chains == 1:
        return sums
    rest = builder.urem(count, size)
    return _repeat(builder, rest, [column, vectors, *sums], add_columns)[2:]


def _repeat(
    builder: Any, count: Any, states: Sequence[Any], step: Callable[..., Sequence[Any]]
) -> list[Any]:
    """Appends a loop that takes so many steps from some states to the next; gives the last."""
    start, names = builder.block, ("test", "step", "end")
    test, body, end = (builder.append_basic_block(name) for name in names)
    builder.branch(test)
    builder.position_at_end(test)
    remaining, *phis = (builder.phi(first.type) for first in (count, *states))
    builder.cbranch(builder.icmp_signed(">", remaining, ir.Constant(I64, 0)), body, end)
    builder.position_at_end(body)
    following = [builder.sub(remaining, ir.Constant(I64, 1)), *step(*phis)]
    for phi, first, then in zip((remaining, *phis), (count, *states), following, strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(then, builder.block)
    builder.branch(test)
    builder.position_at_end(end)
    return phis
