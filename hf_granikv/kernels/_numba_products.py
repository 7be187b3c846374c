"""Products of matrices for numba, whose sums stay in registers until all is added."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit

from hf_granikv.kernels._numba_llvm import (
    ADDRESS,
    FAST,
    FLOATS,
    I64,
    NONE,
    broadcast,
    cpu_features,
    fetch,
    fused,
    llvm_intrinsic,
    pointer,
    read,
    splat,
    write,
)
from hf_granikv.kernels._numba_types import OPTIONS

# rows by vectors of 16 whose sums fit the registers: 32 of 16 numbers each, or 16 of 8
ADDED_ROWS, NUM_VECTORS = (8, 3) if "+avx512f" in cpu_features() else (4, 1)
# two sums for each, of every second column: rounded less, as where a product runs along vectors
NUM_CHAINS = 2
PRODUCT_ROWS = ADDED_ROWS // NUM_CHAINS
# bytes of the vectors of one number
STEP = 64 * NUM_VECTORS


class _Operands(NamedTuple):
    """What both kinds of products are given, all int64.

    Attributes:
        left: Address of the left matrix, of float32.
        of_row: Bytes between its rows.
        of_column: Bytes between its columns.
        right: Address of the right matrix, whose rows are vectors, `STEP` apart.
        count: Columns of the left one, rows of the right one.
        ahead: Address of what is fetched into the cache meanwhile.
        of_ahead: Bytes of that for every column. They are asked for one by one: many at once would
            take the buffers that what is read now needs.
    """

    left: Any
    of_row: Any
    of_column: Any
    right: Any
    count: Any
    ahead: Any
    of_ahead: Any


_OPERANDS = (ADDRESS,) * len(_Operands._fields)


def product(num_vectors: int) -> Any:
    """A function that multiplies a matrix, read number by number, by one that is read in vectors.

    Returns:
        A function of how many rows the left matrix has, of where the product goes, whose rows are
        `STEP` apart, of an address that it does not use, and of the fields of `_Operands`. For
        every `PRODUCT_ROWS` rows it fetches the next `count * of_ahead` bytes.
    """
    return _by_rows(PRODUCT_ROWS, num_vectors, is_added=False)


def added_product(num_vectors: int) -> Any:
    """As `product`, added to what is there times factors, which are vectors at the third address.

    It goes by `ADDED_ROWS` where that goes by `PRODUCT_ROWS`.
    """
    return _by_rows(ADDED_ROWS, num_vectors, is_added=True)


def _by_rows(num_rows: int, num_vectors: int, *, is_added: bool) -> Any:
    several, one = (_rows(num, num_vectors, is_added=is_added) for num in (num_rows, 1))

    @njit(**OPTIONS)
    def multiply(rows, to, factors, left, of_row, of_column, right, count, ahead, of_ahead):  # type: ignore[no-untyped-def]
        for _ in range(rows // num_rows):
            several(to, factors, left, of_row, of_column, right, count, ahead, of_ahead)
            left += num_rows * of_row
            to += num_rows * STEP
            ahead += count * of_ahead
        for _ in range(rows % num_rows):
            one(to, factors, left, of_row, of_column, right, count, ahead, 0)
            left += of_row
            to += STEP

    return multiply


def _rows(num_rows: int, num_vectors: int, *, is_added: bool) -> Any:
    @llvm_intrinsic(NONE, ADDRESS, ADDRESS, *_OPERANDS)
    def multiply(builder: Any, to: Any, factors: Any, *operands: Any) -> None:
        places = _places(builder, to, num_rows, num_vectors)
        before, num_chains = [splat(FLOATS, 0.0)] * len(places), NUM_CHAINS
        if is_added:
            by = [read(builder, at, FLOATS) for at in _places(builder, factors, 1, num_vectors)]
            there = (read(builder, place, FLOATS) for place in places)
            before = [
                builder.fmul(value, by[i % num_vectors], flags=FAST)
                for i, value in enumerate(there)
            ]
            num_chains = 1
        sums = _summed(builder, _Operands(*operands), before, num_vectors, num_chains)
        for total, place in zip(sums, places, strict=True):
            write(builder, total, place)

    return multiply


def _places(builder: Any, address: Any, num_rows: int, num_vectors: int) -> list[Any]:
    offsets = [STEP * i + 64 * v for i in range(num_rows) for v in range(num_vectors)]
    return [builder.add(address, ir.Constant(I64, offset)) for offset in offsets]


def _summed(
    builder: Any, given: _Operands, before: Sequence[Any], num_vectors: int, num_chains: int
) -> list[Any]:
    """Appends the loop over the columns of the left matrix; gives the sums after it.

    With several chains, each sum is that of as many, of every so manieth column.
    """
    num_sums, size = len(before), ir.Constant(I64, num_chains)

    def add_column(column: Any, vectors: Any, sums: Sequence[Any]) -> list[Any]:
        loaded = [read(builder, at, FLOATS) for at in _places(builder, vectors, 1, num_vectors)]
        totals = []
        for i in range(0, num_sums, num_vectors):
            factor = broadcast(builder, builder.load(pointer(builder, column, ir.FloatType())))
            column = builder.add(column, given.of_row)
            totals += [fused(builder, factor, x, sums[i + v]) for v, x in enumerate(loaded)]
        return totals

    def add_columns(column: Any, vectors: Any, ahead: Any, *chains: Any) -> list[Any]:
        fetch(builder, ahead)
        totals = []
        for i in range(0, len(chains), num_sums):
            totals += add_column(column, vectors, chains[i : i + num_sums])
            column = builder.add(column, given.of_column)
            vectors = builder.add(vectors, ir.Constant(I64, STEP))
            ahead = builder.add(ahead, given.of_ahead)
        return [column, vectors, ahead, *totals]

    zeros = [splat(FLOATS, 0.0)] * num_sums * (num_chains - 1)
    states = [given.left, given.right, given.ahead, *before, *zeros]
    rounds = builder.udiv(given.count, size)
    column, vectors, ahead, *totals = _repeat(builder, rounds, states, add_columns)
    sums = totals[:num_sums]
    for i in range(num_sums, len(totals), num_sums):
        pairs = zip(sums, totals[i : i + num_sums], strict=True)
        sums = [builder.fadd(*pair, flags=FAST) for pair in pairs]
    rest = builder.urem(given.count, size)
    return _repeat(builder, rest, [column, vectors, ahead, *sums], add_columns)[3:]


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
