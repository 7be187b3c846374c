"""What turns may take, checked when it is said."""

from dataclasses import dataclass

from hf_granikv.config import check_min_shared_tokens, is_count


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine; the `cold_slots` of its cache are another.

    Attributes:
        max_bytes: The most bytes of private tokens, of running turns and idle agents together: with
            what they have come to share, states, the free slots and tables of their pools, and what is
            there twice while a pool changes its size or a row its batch. None for no limit.
        max_rows: The most turns that run at a time; more wait.
        max_step_tokens: The most tokens of one forward pass, which bounds how long a newcomer's prompt
            keeps running answers waiting.
        min_shared_tokens: Hold every run of at least this many tokens that turns and idle agents have
            in common once, wherever that can be; None: where the cost model predicts a gain.
    """

    max_bytes: int | None = None
    max_rows: int = 64
    max_step_tokens: int = 256
    min_shared_tokens: int | None = None

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        for name in ("max_bytes", "max_rows", "max_step_tokens"):
            value = getattr(self, name)
            if not is_count(value) and not (name == "max_bytes" and value is None):
                raise ValueError(f"{name} is {value!r}; give a positive number.")
        check_min_shared_tokens(self.min_shared_tokens)
