"""CPU kernels that numba compiles, run on the threads of torch; there are none without numba."""

import ctypes
import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from array import array

logger = logging.getLogger(__name__)

# an environment variable: 0 leaves everything to torch
SWITCH = "HF_GRANIKV_COMPILED"
# the name under which compiled code asks for the number of its thread
THREAD_NUM = "hf_granikv_thread_num"


@cache
def load(module_name: str) -> Any:
    """Imports a module of compiled kernels, which compiles them where no cache on disk has them.

    Returns:
        The module, or a string that says why there is none here.
    """
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'hf-granikv[cpu]')"
    if _openmp() is None:
        return "this build of torch does not run on GNU OpenMP"
    try:
        return import_module(module_name)
    except (
        Exception
    ) as error:  # a numba that cannot be imported beside this numpy, no place for a cache
        logger.warning("Compiled kernels are not used, numba fails: %s", error)
        return f"numba fails: {error}"


@cache
def register_symbols() -> None:
    """Lets compiled code ask for its thread; to be called before numba compiles or loads any."""
    from llvmlite import binding

    openmp = _openmp()
    assert openmp is not None, "load says so"
    binding.add_symbol(THREAD_NUM, ctypes.cast(openmp.omp_get_thread_num, ctypes.c_void_p).value)


def run(task: int, arguments: "array[int]", num_threads: int) -> None:
    """Calls a compiled function in each of `num_threads` threads.

    They are the threads that torch itself uses: others would compete with those, which go on
    spinning for a while after each of its operations.

    Args:
        task: Address of a C function that takes a pointer to int64.
        arguments: What it points to.
        num_threads: Threads, at least one.
    """
    _parallel()(task, arguments.buffer_info()[0], num_threads, 0)


@cache
def _parallel() -> Any:
    openmp = _openmp()
    assert openmp is not None, "load says so"
    function = openmp.GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@cache
def _openmp() -> ctypes.CDLL | None:
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        return ctypes.CDLL(str(path))
    return None
