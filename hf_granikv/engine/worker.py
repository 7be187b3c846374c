"""The thread that owns the model and the batch."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import torch

from hf_granikv.engine.batch import Batch
from hf_granikv.engine.job import Job
from hf_granikv.engine_use import StepLock

logger = logging.getLogger(__name__)


class Worker:
    """Runs a batch on a thread of its own, as long as there is something to do.

    What callers hand over is taken between two steps. The thread is started by the first turn, and
    knows nothing of the engine, so that a forgotten engine can end it.

    Args:
        batch: Touched by the thread alone, or by whoever has paused it.
        step_lock: Held for each step, and by those who pause.
    """

    def __init__(self, batch: Batch, step_lock: StepLock) -> None:
        self._batch = batch
        self._changed = threading.Condition()
        self._orders: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._num_pausing = 0
        self._is_closed = False
        self._because: BaseException | None = None
        self._step_lock = step_lock

    @property
    def is_closed(self) -> bool:
        """Whether no more turns are taken."""
        return self._is_closed

    @property
    def may_step(self) -> bool:
        """Whether a step may run while the calling thread goes on: it neither runs nor pauses them."""
        is_ours = threading.current_thread() is self._thread or self._step_lock.is_ours
        return not (self._is_closed or is_ours)

    def submit(self, job: Job) -> None:
        """Lets a turn wait for its place in the batch.

        Raises:
            RuntimeError: The engine is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError(
                    "the engine is closed and takes no more turns; make another one."
                )
            self._orders.append(lambda: self._batch.add(job))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="hf_granikv engine", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Ends a turn after the step under way."""
        self._order(lambda: self._batch.cancel(job))

    def tidy(self) -> None:
        """Gives back what closed agents shared, after the step under way."""
        if self._thread is not None and not self._is_closed:
            self._order(self._batch.tidy)

    def _order(self, order: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[Batch]:
        """Keeps the thread between two steps while the caller uses the model."""
        with self.gathering(), self._step_lock:
            yield self._batch

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Lets no step begin meanwhile, so that what is submitted begins together."""
        with self._changed:
            self._num_pausing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_pausing -= 1
                self._changed.notify_all()

    def close(self, because: BaseException | None = None) -> None:
        """Ends all turns and the thread, after the step under way.

        Args:
            because: What turns fail with; None cancels them.
        """
        with self._changed:
            self._is_closed = True
            self._because = self._because or because
            thread = self._thread
            self._changed.notify_all()
        # the thread cannot end before whoever keeps it between two steps lets it go on
        is_ours = thread is threading.current_thread() or self._step_lock.is_ours
        if thread is not None and not is_ours:
            thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._next_orders():
                    with self._step_lock:
                        self._step()
        except BaseException as error:
            logger.exception("the thread of the engine ends")
            self._give_up(error)

    def _step(self) -> None:
        try:
            self._batch.step()
        except Exception as error:
            logger.exception("a step of the engine failed")
            self._batch.fail_all(error)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._is_closed = True
            orders, self._orders = self._orders, []
        for order in orders:
            order()
        self._batch.fail_all(error)

    def _next_orders(self) -> bool:
        """Waits for something to do, and takes what was handed over; False when it is over."""
        with self._changed:
            while not self._is_closed and (
                self._num_pausing or (self._batch.is_empty and not self._orders)
            ):
                self._changed.wait()
            is_closed = self._is_closed
        with self._step_lock:
            while self._orders:
                # one that fails leaves the others to `_give_up`
                self._orders.pop(0)()
            if is_closed and self._because is not None:
                self._batch.fail_all(self._because)
            elif is_closed:
                self._batch.cancel_all()
        return not is_closed
