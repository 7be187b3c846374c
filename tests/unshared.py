"""Parameters of tests, some of which know that rows share nothing."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_unshared(names: Iterable[str], unshared: Collection[str]) -> list[Any]:
    """Gives the names as parameters; those that share nothing are not warned of it."""
    mark = pytest.mark.nothing_shared
    return [pytest.param(name, marks=mark if name in unshared else ()) for name in names]
