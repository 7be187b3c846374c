"""The errors a caller may meet that are not plain `ValueError`s."""


class ColdPoolFullError(RuntimeError):
    """The pool of private tokens has no free slot left and may not grow."""


class IntegrityError(RuntimeError):
    """A pool's own equation does not hold: a slot was lost, doubled or handed to two owners."""


class UnannouncedForwardError(RuntimeError):
    """A forward pass reached the cache without its inputs having been announced first."""


class TornStateError(RuntimeError):
    """A forward pass failed half-way and left recurrent states that cannot be taken back."""
