"""How functions for numba are made from LLVM's own instructions, on vectors of 16 float32."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.registry import cpu_target
from numba.extending import intrinsic, register_model

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS = ir.VectorType(ir.FloatType(), 16)
INTS = ir.VectorType(I32, 16)
SHORTS = ir.VectorType(I16, 32)
# neither NaN nor infinity is excluded: an empty part has -inf
FAST = ("reassoc", "contract", "nsz", "arcp")


class Vector(types.Opaque):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__("float32x16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, FLOATS)


ADDRESS, VECTOR, NONE = types.int64, Vector(), types.void


def llvm_intrinsic(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function of fixed types for numba, from one that appends LLVM instructions to a builder."""

    def of(emit: Callable[..., Any]) -> Any:
        def typed() -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = emit(builder, *args)
                return context.get_dummy_value() if result is NONE else value

            return result(*kinds), generate

        # numba reads the number of arguments from the signature
        takers: list[Any] = [
            lambda context: typed(),
            lambda context, a: typed(),
            lambda context, a, b: typed(),
            lambda context, a, b, c: typed(),
            lambda context, a, b, c, d: typed(),
            lambda context, a, b, c, d, e: typed(),
            lambda context, a, b, c, d, e, f: typed(),
            lambda context, a, b, c, d, e, f, g: typed(),
            lambda context, a, b, c, d, e, f, g, h: typed(),
            lambda context, a, b, c, d, e, f, g, h, i: typed(),
        ]
        return intrinsic(takers[len(kinds)])

    return of


def cpu_features() -> list[str]:
    """What the CPU has that numba compiles for, such as `+avx2`."""
    return cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def splat(kind: Any, value: float) -> Any:
    """A constant vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def broadcast(builder: Any, number: Any) -> Any:
    """Appends a vector of one float32."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, nothing, splat(INTS, 0))


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """A pointer to what lies at an address."""
    return builder.inttoptr(address, kind.as_pointer())


def read(builder: Any, address: Any, kind: Any) -> Any:
    """Reads what lies at an address, at no more than that of two bytes."""
    value = builder.load(pointer(builder, address, kind))
    value.align = 2
    return value


def write(builder: Any, value: Any, address: Any) -> None:
    """Writes to an address likewise."""
    builder.store(value, pointer(builder, address, value.type)).align = 2


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Calls a function that LLVM knows by name."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [a.type for a in args])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Appends a * b + c, one instruction where there is one."""
    return builder.fadd(builder.fmul(a, b, flags=FAST), c, flags=FAST)


def fetch(builder: Any, address: Any) -> None:
    """Asks for the 64 bytes around an address, which need not exist."""
    # to be read, into the second level, as data
    hints = (ir.Constant(I32, number) for number in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address, I8), *hints)
