"""How far the compiled kernel is from its reference on this CPU."""

import numpy as np
import torch
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention.attention import DTYPES, DecodeAttention
from hf_granikv.kernels.decode_attention.reference import decode_attention
from hf_granikv.kernels.decode_attention.states import GroupStates, Segment
from hf_granikv.views import PrivateTokens

# of outputs up to 4, in another order of sums; two units of bfloat16 in the last place
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
# one vector, several, and such that are not full
_DIMS = ((16, 16), (64, 72), (40, 8))
# even and odd, up to more than a vector, and such that several threads share
_LENGTHS = (1, 2, 7, 16, 19, 33, 480)
_HEADS, _RATIO, _SLOTS, _SCALE = 2, 3, 512, 0.25


def largest_error() -> float:
    """Gives the largest error over what rounding explains; infinite for what is no number."""
    errors = [_error(dtype, *dims) / _BOUNDS[dtype] for dtype in DTYPES for dims in _DIMS]
    return compiled.worst(errors)


def _error(dtype: torch.dtype, key_dim: int, value_dim: int) -> float:
    chance = np.random.default_rng(0)

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(chance.standard_normal(size, dtype=np.float32)).to(dtype)

    num_rows = len(_LENGTHS)
    query = draw(num_rows, _HEADS * _RATIO, 1, key_dim)
    storages = draw(_HEADS, _SLOTS, key_dim), draw(_HEADS, _SLOTS, value_dim)
    # the last token of each row is stored on the way, where nobody else reads
    num_before = _SLOTS - num_rows
    slots = np.stack([chance.permutation(num_before)[: max(_LENGTHS)] for _ in range(num_rows)])
    new_slots = num_before + chance.permutation(num_rows)
    slots[np.arange(num_rows), np.array(_LENGTHS) - 1] = new_slots
    new = draw(num_rows, _HEADS, 1, key_dim), draw(num_rows, _HEADS, 1, value_dim)
    stored = tuple(storage.clone() for storage in storages)
    for storage, brought in zip(stored, new, strict=True):
        storage[:, new_slots] = brought[:, :, 0].transpose(0, 1)
    spans = np.array([(length // 3, length) for length in _LENGTHS])
    # every other row reads a segment, the others a prefix that has been attended to
    readers = np.where(np.arange(num_rows) % 2, np.arange(num_rows) // 2, -1)
    segment = Segment(draw(_HEADS, 5, key_dim), draw(_HEADS, 5, value_dim), readers)
    of_prefix = (2, num_rows // 2, _HEADS, _RATIO)
    others = np.roll(readers, 1)
    states = [GroupStates(draw(*of_prefix, value_dim), draw(*of_prefix).float(), others)]
    sinks = draw(_HEADS * _RATIO).float()
    private = PrivateTokens(storages, slots, max(_LENGTHS), lambda: storages, new_slots)
    attention = DecodeAttention(query, private, spans, scale=_SCALE, num_segment_tokens=[5])
    out = attention.run_at(
        query, attention.place(*storages, [segment]), states, sinks=sinks, new=new
    )
    if not all(map(torch.equal, storages, stored)):
        return np.inf
    # float32 products may be rounded more, as who runs this has asked torch to
    wide = [t.double() for t in (query, *stored, segment.keys, segment.values)]
    want = decode_attention(
        wide[0],
        (wide[1], wide[2]),
        slots,
        spans,
        states,
        segments=[Segment(wide[3], wide[4], readers)],
        scale=_SCALE,
        sinks=sinks,
    )
    return (out - want).abs().max().item()
