"""CPU kernels that numba compiles, run on the threads of torch; there are none without numba."""

import ctypes
import logging
import math
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

# what an import takes that compiles nothing is less
_SLOW_S = 3.0
# older ones come with an LLVM that reads pointers otherwise; as in pyproject.toml
_NUMBA = (0, 62)

# what runs several compiled functions in one parallel region
CHAIN = "hf_granikv.kernels._numba_chain"

# an environment variable: 0 leaves everything to torch
SWITCH = "HF_GRANIKV_COMPILED"
# the names under which compiled code asks for the number of its thread, and how many there are, and
# waits for them
THREAD_NUM, NUM_THREADS = "hf_granikv_thread_num", "hf_granikv_num_threads"
BARRIER = "hf_granikv_barrier"


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
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT=1 is set"
        if _numbers(version := numba.__version__) < _NUMBA:
            return f"numba {version} is too old (pip install --upgrade 'hf-granikv[cpu]')"
        start = time.perf_counter()
        module = import_module(module_name)
    # a numba that cannot be imported beside this numpy, a cache that cannot be read
    except Exception as error:
        logger.warning("Compiled kernels are not used, numba fails: %s", error)
        return f"numba fails: {' '.join(str(error).split())}"
    if (seconds := time.perf_counter() - start) > _SLOW_S:
        logger.warning(
            "Compiled %s in %.0f s, kept on disk where there is a place for it.",
            module_name,
            seconds,
        )
    return module


@cache
def fault(module_name: str, trial: Callable[[], float]) -> str:
    """Says why a module that can be loaded is not to be used; nothing if it computes what it should.

    Compilers err, on some CPUs and not on others, so that no kernel is trusted before it has been
    seen to be right on this one: once in a process, in some milliseconds.

    Args:
        module_name: A module that `load` gives.
        trial: Runs it beside its reference; gives the largest error over what rounding explains.
    """
    try:
        with torch.no_grad():
            error = trial()
    except Exception as reason:
        logger.warning("%s is not used, its trial fails: %s", module_name, reason)
        return f"its trial fails: {' '.join(str(reason).split())}"
    if error <= 1:
        return ""
    logger.warning(
        "%s is not used: on this CPU numba compiles it to something else than it says, with errors "
        "%.2g times what rounding explains. Please report this with what `numba -s` prints.",
        module_name,
        error,
    )
    return f"numba compiles it wrongly for this CPU (error {error:.2g} times the bound)"


def worst(errors: Iterable[float]) -> float:
    """Gives the largest error of a trial; infinite where one is no number."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


@cache
def register_symbols() -> None:
    """Lets compiled code ask for its threads; to be called before numba compiles or loads any."""
    from llvmlite import binding

    openmp = _openmp()
    assert openmp is not None, "load says so"
    functions = {
        THREAD_NUM: openmp.omp_get_thread_num,
        NUM_THREADS: openmp.omp_get_num_threads,
        BARRIER: openmp.GOMP_barrier,
    }
    for name, function in functions.items():
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


class Task(NamedTuple):
    """A compiled function, and what it is called with.

    Attributes:
        address: Of a C function that takes a pointer to int64.
        numbers: What it points to. They may change, but not how many there are.
        num_threads: How many threads are worth waking, at least one; it runs on any number.
    """

    address: int
    numbers: "array[int]"
    num_threads: int


def address_of(numbers: NDArray[Any]) -> int:
    """The address of the first of some numbers."""
    # numpy's own ways go through ctypes
    return torch.from_numpy(numbers).data_ptr()


def readable(tensor: Tensor) -> Tensor:
    """A tensor of the same numbers whose memory holds them, those of the last dimension side by side."""
    if tensor.stride(-1) == 1 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().contiguous()


class Chain:
    """Tasks that run in one parallel region: the last one when all others are done.

    Args:
        tasks: At least two. Their numbers stay where they are.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        calls = [(task.address, task.numbers.buffer_info()[0]) for task in tasks]
        # threads wait for each other
        calls.insert(-1, (0, 0))
        self._numbers = array("q", [len(calls), *chain.from_iterable(calls)])
        self._num_threads = max(task.num_threads for task in tasks)
        self._address: int = load(CHAIN).run_all.address

    def run(self) -> None:
        """Runs them."""
        run(self._address, self._numbers, self._num_threads)


def run(task: int, arguments: "array[int]", num_threads: int) -> None:
    """Calls a compiled function in each of up to `num_threads` threads.

    They are the threads that torch itself uses: others would compete with those, which go on
    spinning for a while after each of its operations. There may be fewer of them, as where
    `OMP_THREAD_LIMIT` says so: a function shares its work among as many as it finds.

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
