"""Which tokens each thread reads, in the compiled `decode_attention`.

A row and kv head is a unit of work. Threads read equally many tokens, whatever rows have: a long unit
goes to several of them, each with a piece. A share ends in the middle of one at most, and so begins.
"""

from numba import carray, njit

from hf_granikv.kernels._numba_types import OPTIONS, int64_at
from hf_granikv.kernels.decode_attention import _arguments as field
from hf_granikv.kernels.decode_attention._numba_tokens import num_tokens

# what a unit takes besides reading, in tokens
_BASE = 16
# the fewest tokens of a piece, and what it is a multiple of
_LEAST, _STEP = field.LEAST_PIECE, 16


@njit(**OPTIONS)
def _edge(unit, token, tokens):  # type: ignore[no-untyped-def]
    """The unit and token at which a share ends that would end at some token of a unit."""
    token = token // _STEP * _STEP
    if tokens < 2 * _LEAST:
        return (unit, 0) if 2 * token < tokens else (unit + 1, 0)
    if token < _LEAST:
        return unit, 0
    return (unit, token) if tokens - token >= _LEAST else (unit + 1, 0)


@njit(**OPTIONS)
def share_out(args, team, to):  # type: ignore[no-untyped-def]
    """Writes at which unit and token of it each share begins, and behind the last one where it ends.

    Args:
        args: Those of the kernel.
        team: How many threads there are.
        to: The address of as many pairs of int64, and one more.

    Returns:
        How many threads have a share, and whether some unit is in several of them.
    """
    heads, whole = args[field.HEADS], 0
    for row in range(args[field.ROWS]):
        whole += heads * (_BASE + num_tokens(args, row))
    threads = max(1, min(team, whole // (_BASE + _LEAST)))
    shares, is_cut = carray(int64_at(to), (threads + 1, 2)), False
    shares[0, :], shares[threads, 0], shares[threads, 1] = 0, args[field.ROWS] * heads, 0
    before, thread = 0, 1
    for row in range(args[field.ROWS]):
        tokens = num_tokens(args, row)
        size = _BASE + tokens
        while thread < threads and whole * thread // threads - before < heads * size:
            at = whole * thread // threads - before
            unit, token = _edge(row * heads + at // size, at % size * tokens // size, tokens)
            shares[thread, 0], shares[thread, 1] = unit, token
            is_cut |= token > 0
            thread += 1
        before += heads * size
    return threads, is_cut


@njit(**OPTIONS)
def share(shares_at, thread):  # type: ignore[no-untyped-def]
    """The unit and token at which the share of a thread begins, and at which it ends."""
    shares = carray(int64_at(shares_at), (thread + 2, 2))
    return (shares[thread, 0], shares[thread, 1]), (shares[thread + 1, 0], shares[thread + 1, 1])
