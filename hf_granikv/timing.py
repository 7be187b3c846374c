"""Times the steps of a running `generate` and shows that they go on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from tqdm.auto import tqdm


class Streamer(Protocol):
    """What `generate` tells its steps to, as transformers' `BaseStreamer` has it."""

    def put(self, value: Tensor) -> None:
        """Takes the prompts first, then the tokens of each step.

        Args:
            value: `[num_rows, width]` the padded prompts, then `[num_rows]` a token of each row.
        """

    def end(self) -> None:
        """Hears, without a value, that no more steps follow."""


@contextmanager
def forward_progress(model: Any, description: str) -> Iterator[None]:
    """Shows on a terminal how many layers of the forward pass in the `with` block are done.

    Args:
        model: A transformers model, or a wrapper of one.
        description: What the bar is headed with.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers)
    with tqdm(total=num_layers, desc=description, unit="layer", leave=False, disable=None) as bar:

        def count(*_: object) -> None:
            bar.update()

        hooks = [layer.register_forward_hook(count) for layer in next(stacks, ())]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class StepTimer:
    """Hears when each step is done, shows it, and hands the tokens on to the caller's streamer.

    The times are None where no step was heard of, because `generate` ran without this streamer.

    Attributes:
        total_s: Seconds between entering and leaving the `with` block.
    """

    def __init__(self, streamer: Streamer | None, num_steps: int | None) -> None:
        self.total_s = 0.0
        self._streamer = streamer
        # a caller who streams has something on the screen already; None is "only on a terminal"
        self._progress = tqdm(
            total=num_steps,
            desc="granikv",
            unit="step",
            delay=1,
            leave=False,
            disable=None if streamer is None else True,
        )
        # the start, the prompt's arrival, then the end of each step
        self._marks_s: list[float] = []

    def __enter__(self) -> "StepTimer":
        self._marks_s = [time.perf_counter()]
        return self

    def __exit__(self, *exception: object) -> None:
        self.total_s = time.perf_counter() - self._marks_s[0]
        self._progress.close()

    def put(self, value: Tensor) -> None:
        """Takes the prompts first, then the tokens of each step.

        Args:
            value: `[num_rows, width]` the padded prompts, then `[num_rows]` a token of each row.
        """
        if len(self._marks_s) > 1:
            self._progress.update()
        self._marks_s.append(time.perf_counter())
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """Hands the end, which carries no value, on to the caller's streamer."""
        if self._streamer is not None:
            self._streamer.end()

    @property
    def _has_steps(self) -> bool:
        return len(self._marks_s) > 2

    @property
    def decode_steps(self) -> int | None:
        """Steps after the one over the suffixes."""
        return len(self._marks_s) - 3 if self._has_steps else None

    @property
    def prefill_s(self) -> float | None:
        """Seconds until the first token of each row."""
        return self._marks_s[2] - self._marks_s[0] if self._has_steps else None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first tokens to the last."""
        return self._marks_s[-1] - self._marks_s[2] if self._has_steps else None
