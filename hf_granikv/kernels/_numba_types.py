"""What numba lacks: bfloat16, pointers from addresses, functions that become vector operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from hf_granikv.kernels._numba_llvm import FAST, I16, I32, I64, llvm_intrinsic, pointer

_F32 = ir.FloatType()
C_OPTIONS: dict[str, Any] = {"fastmath": set(FAST), "error_model": "numpy"}
# of what compiled code alone calls: without the ways in from Python, which take long to compile
OPTIONS = {**C_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# numba links parts that it has optimised and optimises the whole again: what is kept on disk is not
# the code that ran when it was compiled. At level 3, LLVM 22 lost a loop of one turn on the way
_OPT_LEVEL = 2

_FOLDER = Path(__file__).parent


def c_function(function: Callable[..., None]) -> Any:
    """Compiles what takes a pointer to int64, with all that it calls, and keeps it on disk.

    Numba compiles anew when the file of the function has changed; here also when others have. What
    it calls must not be kept by itself.
    """
    function.__qualname__ += f".{_sources()}"
    signature = types.void(types.CPointer(types.int64))
    with opt_level():
        try:
            return cfunc(signature, cache=True, **C_OPTIONS)(function)
        except RuntimeError:
            # no folder to keep it in: each process compiles it
            return cfunc(signature, **C_OPTIONS)(function)


@contextmanager
def opt_level() -> Iterator[None]:
    """Has kernels optimised as far as is right: numba has a level for all that is compiled, none for one."""
    settings: Any = config
    before = settings.OPT
    settings.OPT = type(before)(min(before, _OPT_LEVEL))
    try:
        yield
    finally:
        settings.OPT = before


def _sources() -> str:
    digest = sha256()
    for path in sorted(_FOLDER.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _constant(value: int) -> Any:
    return ir.Constant(I32, value)


@intrinsic
def as_float(typing_context: Any, number: Any) -> Any:
    """float32 of a float32, or of the bits of a bfloat16 in a uint16."""

    def widen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], I32), _constant(16))
        return builder.bitcast(bits, _F32)

    if number == types.float32:
        return types.float32(types.float32), lambda context, builder, signature, args: args[0]
    return types.float32(types.uint16), widen


@intrinsic
def as_element(typing_context: Any, number: Any, like: Any) -> Any:
    """A finite float32 as an element of the array `like`: itself, or the nearest bfloat16."""

    def narrow(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
        rounded = builder.add(builder.add(bits, _constant(0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, _constant(16)), I16)

    if like.dtype == types.float32:
        return types.float32(types.float32, like), lambda context, builder, signature, args: args[0]
    return types.uint16(types.float32, like), narrow


@llvm_intrinsic(types.float32, types.float32)
def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to the power of a whole float32 between -126 and 127."""
    biased = builder.add(builder.fptosi(exponent, I32), _constant(127))
    return builder.bitcast(builder.shl(biased, _constant(23)), _F32)


@llvm_intrinsic(types.float32, types.float32, types.float32)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two float32."""
    kind = ir.FunctionType(_F32, [_F32, _F32])
    function = builder.module.declare_intrinsic("llvm.maxnum", (_F32,), kind)
    return builder.call(function, (a, b), fastmath=("nnan", "nsz"))


@njit(**OPTIONS)
def exp_of_negative(x: Any) -> Any:
    """E to the power of a float32 that is not positive, to 2e-7; -inf gives 1e-38.

    Source: 2^f for |f| <= 1/2 by the Taylor series of degree 6, times a power of two.
    """
    x = larger(x * np.float32(1.4426950408889634), np.float32(-126))
    whole = np.rint(x)
    f = x - whole
    p = np.float32(1.5403530393381609e-4)
    p = p * f + np.float32(1.3333558146428443e-3)
    p = p * f + np.float32(9.6181291076284772e-3)
    p = p * f + np.float32(5.5504108664821580e-2)
    p = p * f + np.float32(2.4022650695910072e-1)
    p = p * f + np.float32(6.9314718055994531e-1)
    p = p * f + np.float32(1)
    return p * _power_of_two(whole)


@intrinsic
def pointer_like(typing_context: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of the kind that the array `like` has."""
    element = I16 if like.dtype == types.uint16 else _F32

    def convert(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return pointer(builder, args[0], element)

    return types.CPointer(like.dtype)(types.int64, like), convert


def pointer_to(element: Any, llvm_element: Any) -> Any:
    """A function for numba that makes a pointer of an address; both arguments are the kind of element."""

    @llvm_intrinsic(types.CPointer(element), types.int64)
    def at(builder: Any, address: Any) -> Any:
        return pointer(builder, address, llvm_element)

    return at


uint16_at = pointer_to(types.uint16, I16)
float32_at = pointer_to(types.float32, _F32)
int64_at = pointer_to(types.int64, I64)


@njit(**OPTIONS)
def number_at(numbers: Any, i: Any) -> Any:
    """The i-th of the int64 at an address; i itself where that is 0."""
    if numbers == 0:
        return i
    return carray(int64_at(numbers), (i + 1,))[i]
