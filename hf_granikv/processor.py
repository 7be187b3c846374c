"""What this CPU can do, as torch tells it."""

from functools import cache

import torch


def is_avx512() -> bool:
    """Tells whether torch uses AVX-512 here."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def has_tiles() -> bool:
    """Tells whether torch multiplies bfloat16 in the matrix tiles of this CPU (Intel AMX)."""
    return (
        is_avx512()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and torch.cpu._is_amx_tile_supported()
    )


@cache
def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Tells whether this CPU multiplies matrices of this dtype in hardware.

    Where it does not, a product in half precision is some to hundreds of times slower than one in
    float32, so the operands are better cast first.
    """
    if dtype == torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        # with AVX-512 alone it says so too, and converts to float32 inside
        is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
        return not is_x86 or has_tiles() or torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
