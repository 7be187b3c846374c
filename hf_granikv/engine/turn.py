"""The caller's end of a turn: its tokens as they come, and its reply."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING

from hf_granikv.agent import Reply
from hf_granikv.engine.text import TextPieces, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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

    Attributes:
        name: See above.
        prompt_tokens: See above.
        kept_tokens: Prompt tokens that its agent held from earlier turns.
        shared_tokens: Prompt tokens that it read of what others hold or have computed.
        computed_tokens: Prompt tokens computed so far; those that were given back meanwhile count again.
        first_token_s: When the first token came, by `time.perf_counter`; None before.
        last_token_s: When the latest did.
        first_step: The engine's forward pass that gave the first token.
        last_step: The one that gave the latest.
    """

    def __init__(self, name: str, prompt_tokens: int, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.name = name
        self.prompt_tokens = prompt_tokens
        self.kept_tokens = self.shared_tokens = self.computed_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.first_step = self.last_step = 0
        self._tokenizer = tokenizer
        self._changed = threading.Condition()
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._error: BaseException | None = None
        self._reply: Reply | None = None
        self._listeners: list[Callable[[], None]] = []
        self._on_cancel: Callable[[], None] | None = None
        self._on_end: Callable[[Reply], None] | None = None
        self._is_cancelling = False

    def __repr__(self) -> str:
        state = self._finish_reason or ("failed" if self._error else "going on")
        return f"<Turn of {self.name!r}: {len(self._token_ids)} tokens, {state}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the answer so far."""
        return tuple(self._token_ids)

    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"` or `"cancelled"`; None while it goes on, and where it failed."""
        return self._finish_reason

    @property
    def is_cancelling(self) -> bool:
        """Whether somebody has asked for its end."""
        return self._is_cancelling

    def done(self) -> bool:
        """Whether no more tokens will come."""
        return self._finish_reason is not None or self._error is not None

    def cancel(self) -> None:
        """Asks for the end of the turn, after the step under way at the latest.

        What was generated stays, and `result` gives it. Without effect on a turn that is done.
        """
        self._is_cancelling = True
        on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the turn is done, at most `timeout` seconds; gives whether it is."""
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with self._changed:
                while not self.done():
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._changed.wait(left)
        except KeyboardInterrupt:
            self.cancel()
            raise
        return True

    def result(self, timeout: float | None = None) -> Reply:
        """Waits for the reply.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: It is not there by then; the turn goes on.
            Exception: Whatever ended the turn otherwise.
        """
        if not self.wait(timeout):
            raise TimeoutError(
                f"{self.name!r} has {len(self._token_ids)} tokens after {timeout} seconds and goes "
                "on; wait again, or cancel the turn."
            )
        return self._outcome()

    def __iter__(self) -> Iterator[str]:
        """Gives the text in pieces, blocking between them."""
        reader = self.reader()
        while not reader.is_done:
            try:
                with self._changed:
                    while not reader.has_news():
                        self._changed.wait()
            except KeyboardInterrupt:
                self.cancel()
                raise
            if piece := reader.read():
                yield piece
        self._outcome()

    def __await__(self) -> Generator[object, None, Reply]:
        """Waits for the reply without blocking the event loop."""
        return self._when_done().__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Gives the text in pieces without blocking the event loop."""
        reader = self.reader()
        changed = self._heard()
        while not reader.is_done:
            await self._until(changed, reader.has_news)
            if piece := reader.read():
                yield piece
        self._outcome()

    def reader(self) -> "TurnReader":
        """Gives the text from the start to somebody who waits by other means."""
        return TurnReader(self, self._tokenizer)

    def listen(self, listener: Callable[[], None]) -> None:
        """Has a function called on the engine's thread whenever something has changed."""
        with self._changed:
            self._listeners.append(listener)

    def put(self, token_id: int, step: int) -> None:
        """Takes the next token; for the engine."""
        self.last_token_s, self.last_step = time.perf_counter(), step
        if self.first_token_s is None:
            self.first_token_s, self.first_step = self.last_token_s, step
        self._token_ids.append(token_id)
        self._tell()

    def end(self, finish_reason: str) -> None:
        """Ends the turn; for the engine."""
        try:
            # what hangs on the reply is there before anybody sees it
            if self._on_end is not None:
                self._on_end(self._made_reply(finish_reason))
        # what would end a thread of its own must not leave the turn without an end
        except BaseException as error:
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
            try:
                listener()
            except Exception:
                # the engine serves others as well
                logger.exception("a listener of %r failed", self)

    def _heard(self) -> asyncio.Event:
        """An event of the running loop that is set whenever something has changed."""
        changed = asyncio.Event()
        self.listen(called_soon(changed.set))
        return changed

    async def _until(self, changed: asyncio.Event, holds: Callable[[], bool]) -> None:
        while not holds():
            changed.clear()
            if holds():
                return
            try:
                await changed.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise

    async def _when_done(self) -> Reply:
        await self._until(self._heard(), self.done)
        return self._outcome()


class TurnReader:
    """Somebody's place in the text of a turn.

    Attributes:
        is_done: Whether everything has been read.
    """

    def __init__(self, turn: Turn, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.is_done = False
        self._turn = turn
        self._pieces = TextPieces(tokenizer)
        self._num_read = 0

    def has_news(self) -> bool:
        """Whether there are tokens that were not read, or the turn is done."""
        return self._turn.done() or len(self._turn._token_ids) > self._num_read

    def read(self) -> str:
        """Gives the text that is settled since the last time, often none; does not wait."""
        # no token comes after the end, so the end is looked at first
        is_done = self._turn.done()
        new_ids = self._turn._token_ids[self._num_read :]
        self._num_read += len(new_ids)
        piece = self._pieces.put(new_ids)
        if is_done and not self.is_done:
            self.is_done = True
            piece += self._pieces.end()
        return piece


def called_soon(function: Callable[[], object]) -> Callable[[], None]:
    """Gives what calls a function on the running event loop, from any thread, as long as the loop runs."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        # a loop that has ended hears nothing more
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call
