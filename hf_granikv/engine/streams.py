"""The texts of several turns as they come, in one stream."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hf_granikv.engine.turn import Turn, called_soon

Piece = tuple[Turn, str]


class _Listener:
    """Cancels what goes on of some turns once nobody listens, before the first piece too."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._readers = {turn: turn.reader() for turn in turns}

    def __del__(self) -> None:
        self._cancel()

    @property
    def _goes_on(self) -> bool:
        return not all(reader.is_done for reader in self._readers.values())

    def _check_outcomes(self) -> None:
        for turn in self._turns:
            turn.result()

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Cancels what goes on if listening breaks off in the body of the statement."""
        try:
            yield
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for turn in self._turns:
            if not turn.done():
                turn.cancel()


class Merged(_Listener, Iterator[Piece]):
    """Gives `(turn, piece)` as pieces come, blocking between them.

    A turn that fails does not end the others: the first error is raised when all are done. Whoever
    stops listening, cancels what goes on.

    Args:
        turns: Whose pieces.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__(turns)
        self._changed: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        for turn in turns:
            turn.listen(partial(self._changed.put, turn))
            # what came before
            self._changed.put(turn)

    def __next__(self) -> Piece:
        with self._cancelling():
            while self._goes_on:
                turn = self._changed.get()
                if piece := self._readers[turn].read():
                    return turn, piece
        self._check_outcomes()
        raise StopIteration

    def close(self) -> None:
        """Stops listening."""
        self._cancel()


class MergedAsync(_Listener, AsyncIterator[Piece]):
    """Gives `(turn, piece)` as pieces come, without blocking the event loop; as `Merged` otherwise.

    Args:
        turns: Whose pieces.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__(turns)
        self._changed: asyncio.Queue[Turn] = asyncio.Queue()
        self._listens = False

    async def __anext__(self) -> Piece:
        if not self._listens:
            self._listen()
        with self._cancelling():
            while self._goes_on:
                turn = await self._changed.get()
                if piece := self._readers[turn].read():
                    return turn, piece
        self._check_outcomes()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stops listening."""
        self._cancel()

    def _listen(self) -> None:
        # not before there is a loop
        self._listens = True
        for turn in self._turns:
            turn.listen(called_soon(partial(self._changed.put_nowait, turn)))
            self._changed.put_nowait(turn)


def named(pieces: Merged, then: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """Gives `(name, piece)`, and calls `then` when all turns have ended well."""
    for turn, piece in pieces:
        yield turn.name, piece
    then()


async def named_async(
    pieces: MergedAsync, then: Callable[[], None]
) -> AsyncIterator[tuple[str, str]]:
    """Does what `named` does; `then` may block."""
    async for turn, piece in pieces:
        yield turn.name, piece
    await asyncio.to_thread(then)
