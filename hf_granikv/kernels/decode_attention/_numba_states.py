"""What states of prefixes add to one query, in the compiled `decode_attention`."""

import numpy as np
from numba import carray, njit

from hf_granikv.kernels._numba_types import (
    OPTIONS,
    as_float,
    exp_of_negative,
    float32_at,
    larger,
    number_at,
    uint16_at,
)

_F = np.float32

# positions in the numbers of one state, all int64; strides count elements
NUM_PIECES, STATE_OUT, STATE_PIECE, STATE_ROW, STATE_HEAD, STATE_QUERY = range(6)
STATE_LSE, LSE_PIECE, LSE_ROW, LSE_HEAD, LSE_QUERY, STATE_IS_FLOAT, STATE_ROWS = range(6, 13)
NUM_STATE_ARGUMENTS = 13


@njit(**OPTIONS)
def _add_one(out, value, weight):  # type: ignore[no-untyped-def]
    for e in range(out.shape[0]):
        out[e] += weight * as_float(value[e])


@njit(**OPTIONS)
def _lse(state, piece, row, head, i):  # type: ignore[no-untyped-def]
    at = piece * state[LSE_PIECE] + row * state[LSE_ROW]
    at += head * state[LSE_HEAD] + i * state[LSE_QUERY]
    return carray(float32_at(state[STATE_LSE] + 4 * at), (1,))[0]


@njit(**OPTIONS)
def peak_of_states(states, num_states, row, head, i, peak):  # type: ignore[no-untyped-def]
    """The larger of a number and the largest log-sum-exp that one query meets."""
    for number in range(num_states):
        state = states[number * NUM_STATE_ARGUMENTS :]
        at = number_at(state[STATE_ROWS], row)
        if at >= 0:
            for piece in range(state[NUM_PIECES]):
                peak = larger(peak, _lse(state, piece, at, head, i))
    return peak


@njit(**OPTIONS)
def add_states(states, num_states, row, head, i, out, peak, total):  # type: ignore[no-untyped-def]
    """Adds the states of the prefixes to one query's sum; gives the new total."""
    size = (len(out),)
    for number in range(num_states):
        state = states[number * NUM_STATE_ARGUMENTS :]
        at = number_at(state[STATE_ROWS], row)
        for piece in range(state[NUM_PIECES] if at >= 0 else 0):
            weight = exp_of_negative(_lse(state, piece, at, head, i) - peak)
            out_at = piece * state[STATE_PIECE] + at * state[STATE_ROW]
            out_at += head * state[STATE_HEAD] + i * state[STATE_QUERY]
            if state[STATE_IS_FLOAT] != 0:
                wide = carray(float32_at(state[STATE_OUT] + 4 * out_at), size)
                _add_one(out, wide, weight)
            else:
                narrow = carray(uint16_at(state[STATE_OUT] + 2 * out_at), size)
                _add_one(out, narrow, weight)
            total += weight
    return total
