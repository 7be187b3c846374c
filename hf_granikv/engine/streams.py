"""The texts of several turns as they come, in one stream."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence

from hf_granikv.engine.turn import Turn, called_soon

Pieces = Iterator[tuple[Turn, str]]


def merged(turns: Sequence[Turn]) -> Pieces:
    """Gives `(turn, piece)` as pieces come, blocking between them.

    A turn that fails does not end the others: the first error is raised when all are done. Whoever
    stops listening, cancels what goes on.
    """
    changed: queue.SimpleQueue[Turn] = queue.SimpleQueue()
    readers = {turn: turn.reader() for turn in turns}
    for turn in turns:
        turn.listen(lambda turn=turn: changed.put(turn))  # type: ignore[misc]
        # what came before
        changed.put(turn)
    try:
        while not all(reader.is_done for reader in readers.values()):
            turn = changed.get()
            if piece := readers[turn].read():
                yield turn, piece
    finally:
        for turn in turns:
            turn.cancel()
    for turn in turns:
        turn.result()


async def merged_async(turns: Sequence[Turn]) -> AsyncIterator[tuple[Turn, str]]:
    """Gives `(turn, piece)` as pieces come, without blocking the event loop; as `merged` otherwise."""
    changed: asyncio.Queue[Turn] = asyncio.Queue()
    readers = {turn: turn.reader() for turn in turns}
    for turn in turns:
        turn.listen(called_soon(lambda turn=turn: changed.put_nowait(turn)))  # type: ignore[misc]
        changed.put_nowait(turn)
    try:
        while not all(reader.is_done for reader in readers.values()):
            turn = await changed.get()
            if piece := readers[turn].read():
                yield turn, piece
    finally:
        for turn in turns:
            turn.cancel()
    for turn in turns:
        turn.result()
