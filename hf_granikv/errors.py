"""The errors a caller may want to tell from others."""


class ColdPoolFullError(RuntimeError):
    """The pool of private tokens has no free slot left and may not grow."""


class IntegrityError(RuntimeError):
    """A pool's own equation does not hold: a slot was lost, doubled or handed to two owners."""


class UnannouncedForwardError(RuntimeError):
    """A forward pass reached the cache without its inputs having been announced first."""

    def __init__(self) -> None:
        super().__init__(
            "a forward pass reached the cache through a model that it does not know, so which "
            "columns are pads or repeat the prefix cannot be told. Use the model that prefilled "
            "the cache, call cache.attach(model) for another object with the same weights, and "
            "call the model itself, not its forward method."
        )


class PrefixFileError(ValueError):
    """A file cannot be loaded as a prefix of the model given, or be overwritten with one."""


class StalePrefixError(ValueError):
    """A prefix was about to be read by a model that does not compute as the prefix was computed."""


class TornStateError(RuntimeError):
    """A forward pass failed half-way and left recurrent states that cannot be taken back."""


class NotPackableError(ValueError):
    """A model needs keys and values in one piece, or a mask, where rows that come and go have none.

    `LiveRows` then runs each batch by itself, with masks.
    """
