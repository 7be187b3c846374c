"""How far the tiles are from the reference on this CPU."""

import numpy as np
import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.shared_attention.reference import gemm_shared_attention
from hf_granikv.kernels.shared_attention.tiles import TiledAttention

# keys and values are rounded to bfloat16 before, the weights between
_BOUND = 1e-2
_ROWS, _HEADS, _RATIO, _Q_LEN, _SCALE = 3, 3, 2, 3, 0.1
# of a prefix in one piece and in several, none of whole tiles; of keys and of values
_SIZES = ((67, 64, 64), (531, 96, 128))


def largest_error() -> float:
    """Gives the largest error over what rounding explains; infinite for what is no number."""
    errors = [_error(*size) / _BOUND for size in _SIZES]
    return compiled.worst(errors)


def _error(length: int, key_dim: int, value_dim: int) -> float:
    chance = np.random.default_rng(0)

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(chance.standard_normal(size, dtype=np.float32)).bfloat16()

    query = draw(_ROWS, _HEADS * _RATIO, _Q_LEN, key_dim)
    keys, values = draw(_HEADS, length, key_dim), draw(_HEADS, length, value_dim)
    tiled = TiledAttention(query, keys, values, scale=_SCALE)
    tiled.run(query, keys, values)
    out, lse = tiled.states
    total = lse.logsumexp(0)
    out = (out * (lse - total).exp().unsqueeze(-1)).sum(0)
    packed = query.view(_ROWS, _HEADS, -1, key_dim).transpose(0, 1).reshape(_HEADS, -1, key_dim)
    # float32 products may be rounded more, as who runs this has asked torch to
    wide = [t.double() for t in (packed, keys, values)]
    want = gemm_shared_attention(*wide, scale=_SCALE)
    return max((out - want.out[0]).abs().max().item(), (total - want.lse[0]).abs().max().item())
