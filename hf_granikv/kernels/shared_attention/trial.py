"""How far a compiled kernel is from the reference on this CPU."""

import numpy as np
import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.compiled_attention import CompiledAttention
from hf_granikv.kernels.shared_attention.reference import gemm_shared_attention

# tiles round the weights between
_BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
_HEADS, _RATIO, _Q_LEN, _SCALE = 3, 2, 3, 0.1
# rows; of a prefix in one piece and in several, none of whole blocks; of keys and of values
_SIZES = ((1, 67, 64, 64), (3, 67, 64, 64), (6, 67, 64, 64), (11, 531, 96, 128), (65, 33, 32, 64))


def largest_error(kernel: type[CompiledAttention]) -> float:
    """Gives the largest error over what rounding explains; infinite for what is no number."""
    errors = [
        _error(kernel, dtype, *size) / _BOUNDS[dtype] for dtype in kernel.dtypes for size in _SIZES
    ]
    return compiled.worst(errors)


def _error(
    kernel: type[CompiledAttention],
    dtype: torch.dtype,
    rows: int,
    length: int,
    key_dim: int,
    value_dim: int,
) -> float:
    chance = np.random.default_rng(0)

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(chance.standard_normal(size, dtype=np.float32)).to(dtype)

    query = draw(rows, _HEADS * _RATIO, _Q_LEN, key_dim)
    keys, values = draw(_HEADS, length, key_dim), draw(_HEADS, length, value_dim)
    attention = kernel(query, keys, values, scale=_SCALE)
    attention.run(query, keys, values)
    out, lse = attention.states
    total = lse.logsumexp(0)
    out = (out * (lse - total).exp().unsqueeze(-1)).sum(0)
    packed = query.view(rows, _HEADS, -1, key_dim).transpose(0, 1).reshape(_HEADS, -1, key_dim)
    # float32 products may be rounded more, as who runs this has asked torch to
    wide = [t.double() for t in (packed, keys, values)]
    want = gemm_shared_attention(*wide, scale=_SCALE)
    return max((out - want.out[0]).abs().max().item(), (total - want.lse[0]).abs().max().item())
