"""The caller's end of a turn: its tokens as they come, and its reply."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING

from hf_granikv.agent import Reply
from hf_granikv.engine.text import TextPieces, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Turn:
    """One answer on its way, for any number of threads and event loops.

    `result()` and `await turn` give the reply; `for piece in turn` and `async for piece in turn` give
    its text as it comes, from the start each time. What went wrong is raised where the outcome is asked
    for. An interrupt of the thread that waits, and the cancellation of the task that does, cancel the
    turn.

    Args:
        name: Whose answer it is.
        prompt_tokens: Tokens of the whole prompt.
        tokenizer: Makes text of the answer.
    """

    def __init__(self, name: str, prompt_tokens: int, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.name = name
        self.prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._changed = threading.Condition()
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._error: BaseException | None = None
        self._reply: Reply | None = None
        self._listeners: list[Callable[[], None]] = []
        self._on_cancel: Callable[[], None] | None = None
        self._on_end: Callable[[Reply], None] | None = None
        self._num_computed = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the answer so far."""
        return tuple(self._token_ids)

    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"` or `"cancelled"`; None while it goes on, and where it failed."""
        return self._finish_reason

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far: those not held before, and again those given back meanwhile."""
        return self._num_computed

    def done(self) -> bool:
        """Whether no more tokens will come."""
        return self._finish_reason is not None or self._error is not None

    def cancel(self) -> None:
        """Asks for the end of the turn, after the step under way at the latest.

        What was generated stays, and `result` gives it. Without effect on a turn that is done.
        """
        on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel()

    def result(self, timeout: float | None = None) -> Reply:
        """Waits for the reply.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: It is not there by then; the turn goes on.
            Exception: Whatever ended the turn otherwise.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with self._changed:
                while not self.done():
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(
                            f"{self.name!r} has {len(self._token_ids)} tokens after {timeout} "
                            "seconds and goes on; wait again, or cancel the turn."
                        )
                    self._changed.wait(left)
        except KeyboardInterrupt:
            self.cancel()
            raise
        return self._outcome()

    def __iter__(self) -> Iterator[str]:
        """Gives the text in pieces, blocking between them."""
        pieces, num_read, is_done = TextPieces(self._tokenizer), 0, False
        while not is_done:
            try:
                with self._changed:
                    while not self.done() and len(self._token_ids) == num_read:
                        self._changed.wait()
                    is_done = self.done()
                    new_ids = self._token_ids[num_read:]
            except KeyboardInterrupt:
                self.cancel()
                raise
            num_read += len(new_ids)
            if piece := pieces.put(new_ids):
                yield piece
        if rest := pieces.end():
            yield rest
        self._outcome()

    def __await__(self) -> Generator[object, None, Reply]:
        """Waits for the reply without blocking the event loop."""
        return self._when_done().__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Gives the text in pieces without blocking the event loop."""
        pieces, num_read, is_done = TextPieces(self._tokenizer), 0, False
        changed = self._heard()
        while not is_done:
            await self._next_change(changed, num_read)
            with self._changed:
                is_done = self.done()
                new_ids = self._token_ids[num_read:]
            num_read += len(new_ids)
            if piece := pieces.put(new_ids):
                yield piece
        if rest := pieces.end():
            yield rest
        self._outcome()

    def put(self, token_id: int) -> None:
        """Takes the next token; for the engine."""
        self._token_ids.append(token_id)
        self._tell()

    def computed(self, num_tokens: int) -> None:
        """Counts prompt tokens that were computed; for the engine."""
        self._num_computed += num_tokens

    def end(self, finish_reason: str) -> None:
        """Ends the turn; for the engine."""
        try:
            # what hangs on the reply is there before anybody sees it
            if self._on_end is not None:
                self._on_end(self._made_reply(finish_reason))
        except Exception as error:
            self.fail(error)
            return
        self._finish_reason = finish_reason
        self._close()

    def fail(self, error: BaseException) -> None:
        """Ends the turn with an error; for the engine."""
        self._error = error
        self._close()

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Says what `cancel` does, until the turn is done; for the engine."""
        self._on_cancel = cancel

    def on_end(self, take: Callable[[Reply], None]) -> None:
        """Has the reply taken on the engine's thread before the turn is done, unless it fails."""
        self._on_end = take

    def _outcome(self) -> Reply:
        if self._error is not None:
            raise self._error
        assert self._finish_reason is not None
        return self._made_reply(self._finish_reason)

    def _made_reply(self, finish_reason: str) -> Reply:
        if self._reply is None:
            ids = tuple(self._token_ids)
            text = decoded(self._tokenizer, ids)
            self._reply = Reply(self.name, text, ids, self.prompt_tokens, finish_reason)
        return self._reply

    def _close(self) -> None:
        self._on_cancel = self._on_end = None
        self._tell()
        self._listeners.clear()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _heard(self) -> asyncio.Event:
        """An event of the running loop that is set whenever something has changed."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def listener() -> None:
            # a loop that has ended hears nothing more
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(listener)
        return changed

    async def _next_change(self, changed: asyncio.Event, num_read: int) -> None:
        while not self.done() and len(self._token_ids) == num_read:
            changed.clear()
            if self.done() or len(self._token_ids) != num_read:
                return
            try:
                await changed.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise

    async def _when_done(self) -> Reply:
        changed = self._heard()
        while not self.done():
            await self._next_change(changed, len(self._token_ids))
        return self._outcome()
