"""Compiled functions one after the other in one parallel region."""

from typing import Any

from llvmlite import ir
from numba import carray, njit

from hf_granikv.kernels._numba_llvm import ADDRESS, I64, NONE, llvm_intrinsic, pointer
from hf_granikv.kernels._numba_threads import barrier
from hf_granikv.kernels._numba_types import OPTIONS, c_function

# a bound for the compiler alone
_MAX_ARGUMENTS = 1 << 20


@llvm_intrinsic(NONE, ADDRESS, ADDRESS)
def _call(builder: Any, function: Any, argument: Any) -> None:
    """Calls the function at an address with a pointer to int64."""
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
    builder.call(pointer(builder, function, kind), [pointer(builder, argument, I64)])


@njit(**OPTIONS)
def _run(args):  # type: ignore[no-untyped-def]
    for i in range(args[0]):
        task, numbers = args[1 + 2 * i], args[2 + 2 * i]
        if task == 0:
            barrier()
        else:
            _call(task, numbers)


@c_function
def run_all(pointer):  # type: ignore[no-untyped-def]
    """Calls functions: how many there are, then the address of each and of its arguments.

    Where an address is 0, threads wait until all have come so far.
    """
    _run(carray(pointer, (_MAX_ARGUMENTS,)))
