"""The errors a caller may want to tell from others."""


class ColdPoolFullError(RuntimeError):
    """The pool of private tokens has no free slot left and may not grow."""


class IntegrityError(RuntimeError):
    """A pool's own equation does not hold: a slot was lost, doubled or handed to two owners."""


class UnannouncedForwardError(RuntimeError):
    """A forward pass reached the cache without its inputs having been announced first."""


class StalePrefixError(ValueError):
    """A prefix was about to be read by a model that does not compute as the prefix was computed."""
