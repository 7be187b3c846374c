"""What a cache can be asked to do, checked when it is built; where this package keeps files."""

import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

DISPATCH_CHOICES = ("auto", "cascade", "batched_gemm", "per_row")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of an `AsymmetricPagedCache`.

    Attributes:
        dispatch: `"auto"`, or the one backend that must run the prefix part.
        cold_slots: The most private tokens the cache may hold, over all rows; None for no limit.
    """

    dispatch: str = "auto"
    cold_slots: int | None = None

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        if self.dispatch not in DISPATCH_CHOICES:
            raise ValueError(
                f"dispatch {self.dispatch!r} is unknown; known: {', '.join(DISPATCH_CHOICES)}."
            )
        if self.cold_slots is not None and not is_count(self.cold_slots):
            raise ValueError(
                f"cold_slots is {self.cold_slots!r}; give a positive number of tokens, or None for "
                "a pool that grows as needed."
            )


def is_count(given: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    # True is an int, and numpy's integers are not
    return isinstance(given, Integral) and given is not True and int(given) >= 1


def check_min_shared_tokens(given: Any) -> None:
    """Checks from how many tokens on something is to be shared.

    Raises:
        ValueError: It is no positive number, and not None.
    """
    if given is not None and not is_count(given):
        raise ValueError(
            f"min_shared_tokens is {given!r}; give a positive number of tokens, or None to share "
            "where the cost model predicts a gain."
        )


def user_folder() -> Path:
    """Gives the folder for what is kept between runs: `HF_GRANIKV_HOME`, or one in the user's cache."""
    home = os.environ.get("HF_GRANIKV_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_granikv"


def check_out(out: str) -> None:
    """Refuses an `--out` that could not be written, before anything is measured.

    Raises:
        ValueError: Its folder is not there, or it is one.
    """
    file = Path(out).absolute()
    if file.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it.")
    if not file.parent.is_dir():
        raise ValueError(
            f"--out {out}: the folder {file.parent} does not exist; make it, or give another file."
        )


def check_is_there(name: str) -> None:
    """Refuses the name of a model that can only be a path, where nothing is; hub ids pass.

    Raises:
        ValueError: If there is nothing.
    """
    # as libraries below have it, ~ is no folder
    path = Path(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    if not name or (is_path and not path.exists()):
        raise ValueError(f"there is no file or folder {name!r}.")
