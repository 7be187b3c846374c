"""What may be done with a cache while engines run over it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from threading import Lock, RLock, get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Runner(Protocol):
    """What runs over a cache, on a thread of its own."""

    def paused(self) -> AbstractContextManager[object]:
        """Keeps it between two steps."""

    @property
    def may_step(self) -> bool:
        """Whether it may run a step while the calling thread goes on."""

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more turns."""


class StepLock:
    """Held for each step of the engines over one cache, and by those who keep them from it.

    There is one for all of them: who waits for several in turn may wait for who waits for him. A
    thread may take it again while it holds it; once it lets go, others that wait come before it, so
    that no engine keeps another one from its steps.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        # who has let go of the lock meets the next one in front of it here
        self._turnstile = Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == get_ident()

    def __enter__(self) -> None:
        if self.is_ours:
            self._lock.acquire()
        else:
            with self._turnstile:
                self._lock.acquire()
            self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()


class EngineUse:
    """The engines that run over one cache; they are held weakly.

    Attributes:
        step_lock: What each of them holds for a step.
    """

    def __init__(self) -> None:
        self.step_lock = StepLock()
        self._runners: WeakSet[Runner] = WeakSet()

    def add(self, runner: Runner) -> None:
        """Notes that something runs over the cache from now on."""
        self._runners.add(runner)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps all of them between two steps."""
        with ExitStack() as stack:
            for runner in list(self._runners):
                stack.enter_context(runner.paused())
            yield

    def check_is_paused(self) -> None:
        """Checks that none of them may run a step now.

        Raises:
            RuntimeError: If one may.
        """
        if any(runner.may_step for runner in list(self._runners)):
            raise RuntimeError(
                "an engine runs over this cache and may change it at any time; run the model with the "
                "cache inside `with engine.paused():`, or with a fork of the cache."
            )

    def check_none_runs(self, model: str) -> None:
        """Checks that a model may come which the cache does not know, and forget those it knows.

        Args:
            model: What to call it.

        Raises:
            ValueError: If one of them runs with a model that the cache knows.
        """
        if any(not runner.is_closed for runner in list(self._runners)):
            raise ValueError(
                f"an engine runs over this cache with another model object than the {model} given, and "
                "the cache holds no prefix to compare the two by; give the engine's model, close the "
                "engine, or build a cache for each."
            )


def between_steps(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Lets a method of a cache wait for the steps under way of the engines that run over it."""

    @wraps(method)
    def waiting(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.engines.paused():
            return method(self, *args, **kwargs)

    return waiting
