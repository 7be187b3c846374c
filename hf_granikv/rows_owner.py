"""Whose rows a cache holds: those of one `generate` call, or of one loop by hand, at a time."""

from threading import Lock, enumerate, get_ident
from typing import Any

from hf_granikv.compat import generations_with
from hf_granikv.errors import RowsTakenError


class RowsOwner:
    """Notices calls that would go on from rows which are gone, or another call's.

    That is looked for where it can be: rows are missing, another thread has started them, or one
    `generate` call began inside another. A forward like the one before costs two comparisons.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._running_in: int | None = None
        self._marked_in: int | None = None
        self._started_in: int | None = None
        self._call: Any = None
        self._has_rows = False
        self._is_nested = False

    def mark(self) -> None:
        """Notes that `generate`, in this thread, is about to run, and so to start rows."""
        self._marked_in, self._has_rows = get_ident(), False

    @property
    def is_marked_here(self) -> bool:
        """Whether the last mark is of this thread."""
        return self._marked_in == get_ident()

    def enter(self) -> None:
        """Begins a forward.

        Raises:
            RowsTakenError: If one of another thread is under way.
        """
        with self._lock:
            if not self._may_run_here():
                raise RowsTakenError("a forward pass of another thread is under way in this cache")
            self._running_in = get_ident()

    def leave(self) -> bool:
        """Ends a forward of this thread; gives whether none of another one is under way."""
        with self._lock:
            is_ours = self._may_run_here()
            if is_ours:
                self._running_in = None
            return is_ours

    def check(self, cache: Any, num_rows: int, *, is_first: bool) -> None:
        """Checks that a forward goes on from rows of its own call.

        Args:
            cache: That the forward was given.
            num_rows: Rows held.
            is_first: Whether it is the first of a `generate` call, which starts rows.

        Raises:
            RowsTakenError: If it is of a `generate` call whose rows are gone.
        """
        here = get_ident()
        if is_first:
            calls = generations_with(cache)
            self._call, self._is_nested = next(iter(calls), None), len(calls) > 1
        elif self._has_rows and (not num_rows or here != self._started_in or self._is_nested):
            calls = generations_with(cache)
            if calls and not num_rows:
                raise RowsTakenError(
                    "the rows of this generate call were dropped while it was running, by reset(), "
                    "invalidate() or release()"
                )
            if calls and (here != self._started_in or calls[0] is not self._call):
                raise RowsTakenError(
                    "another call has started rows of its own in this cache while this generate "
                    "call was running"
                )
        self._started_in, self._has_rows = here, True

    def _may_run_here(self) -> bool:
        running = self._running_in
        if running in (None, get_ident()):
            return True
        # an interrupt may have ended a thread without a word
        return all(thread.ident != running for thread in enumerate())
