"""How compiled kernels share their work among the threads that run them."""

import numpy as np
from numba import njit, types
from numba.core.types import ExternalFunction

from hf_granikv.kernels._numba_types import OPTIONS
from hf_granikv.kernels.compiled import BARRIER, NUM_THREADS, THREAD_NUM, register_symbols

register_symbols()
_thread_num = ExternalFunction(THREAD_NUM, types.int32())
_num_threads = ExternalFunction(NUM_THREADS, types.int32())
# waits for all threads of the team, and shows each what the others have written
barrier = ExternalFunction(BARRIER, types.void())


@njit(**OPTIONS)
def team():  # type: ignore[no-untyped-def]
    """The number of this thread, and how many there are."""
    return np.int64(_thread_num()), np.int64(_num_threads())


@njit(**OPTIONS)
def share_of(num_units):  # type: ignore[no-untyped-def]
    """The number of this thread, the first unit of work that it does, and the first that it does not."""
    thread, threads = team()
    return thread, num_units * thread // threads, num_units * (thread + 1) // threads
