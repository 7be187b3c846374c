"""The errors and warnings a caller may want to tell from others."""

import sys
import warnings

from hf_granikv.wording import counted

# whose lines are not those of a caller
_NO_CALLERS = {"hf_granikv", "torch", "transformers"}


class ColdPoolFullError(RuntimeError):
    """The pool of private tokens has no free slot left and may not grow."""


class IntegrityError(RuntimeError):
    """A pool's own equation does not hold: a slot was lost, doubled or handed to two owners."""


class UnannouncedForwardError(RuntimeError):
    """A forward pass reached the cache whose inputs are not known, or are not what it stores.

    Args:
        stored: Rows and columns that its first layer brings.
        announced: Rows and columns that its inputs had; None if nobody announced it.
    """

    def __init__(self, stored: tuple[int, int], announced: tuple[int, int] | None) -> None:
        if announced is None:
            text = (
                "a forward pass reached the cache through a model that it does not know, or past the "
                "model, so which columns are pads or repeat the prefix cannot be told. Use the model "
                "that prefilled the cache, or call cache.attach(model) for another object with the "
                "same weights; and call the model itself, not its forward method or a part of it."
            )
        else:
            text = (
                f"the first layer stores {counted(stored[0], 'row')} x {counted(stored[1], 'column')} of a "
                f"forward pass whose inputs have {announced[0]} x {announced[1]}: the model changes them on the "
                "way, so which columns are pads or repeat the prefix cannot be told. Use "
                "DynamicCache for this model."
            )
        super().__init__(text)


class UnreadCacheError(RuntimeError):
    """A forward pass was over, and no layer had read the cache that it was given."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"no layer of {model} has read the cache that this forward pass was given, so what it "
            "computed lacks the prefix and all tokens before the new ones. Gradient checkpointing in "
            "training mode takes caches away, and so may a wrapper or a hook: leave that out "
            "(model.gradient_checkpointing_disable(), or model.eval()), or pass whole prompts without "
            "a cache."
        )


class CutGraphError(RuntimeError):
    """A backward needs gradients of tokens that an earlier forward has stored."""

    def __init__(self) -> None:
        super().__init__(
            "this backward needs gradients of tokens that an earlier forward of the same rows has "
            "stored, and a cache keeps no graph. Run all tokens to train on in one forward, those "
            "before them under torch.no_grad(); or call cache.reset() before the next forward."
        )


class RowsTakenError(RuntimeError):
    """A call would go on from rows of a cache that are gone, or another call's."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; a cache holds the rows of one call at a time. Give each call a cache.fork(), "
            "which shares the prefix, and release rows when the call has returned."
        )


class PrefixFileError(ValueError):
    """A file cannot be loaded as a prefix of the model given, or be overwritten with one."""


class StalePrefixError(ValueError):
    """A prefix was about to be read by a model that does not compute as the prefix was computed."""


class TornStateError(RuntimeError):
    """A forward pass failed half-way and left recurrent states that cannot be taken back."""


class NotCompiledError(RuntimeError):
    """`torch.compile` could not compile a decode step.

    Args:
        why: Its own words.
        name: The class of the model.
    """

    def __init__(self, why: str, name: str) -> None:
        # what follows tells how to see more of torch
        first = why.strip().partition("\n\n")[0]
        super().__init__(
            f"the decode step could not be compiled ({' '.join(first.split())}). torch.compile needs a "
            "C++ compiler on a CPU, found as g++ or named by the environment variable CXX, and Triton on "
            f"a GPU. To go on without, delete the attribute forward of the {name}, which may lie inside of "
            "a wrapper."
        )


class NothingSharedWarning(UserWarning):
    """Sharing was asked for, and nothing is shared, or less than could be; the text says why."""


def warn_nothing_shared(why: str) -> None:
    """Warns at the line that called this package, directly or through transformers."""
    frame, level = sys._getframe(1), 2
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").split(".")[0] in _NO_CALLERS
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(why, NothingSharedWarning, stacklevel=level)


class NotPackableError(ValueError):
    """A model needs keys and values in one piece, or a mask, where rows that come and go have none.

    `LiveRows` then runs each batch by itself, with masks.
    """
