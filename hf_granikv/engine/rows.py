"""What the engine asks of the thing that holds its rows and computes them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hf_granikv.pools import Prefix


class ParkedRow(Protocol):
    """What a row holds of its own while it is out of the batch: immutable, and freed when forgotten."""

    @property
    def prefix(self) -> Prefix | None:
        """The end of the chain that the row reads."""

    @property
    def num_tokens(self) -> int:
        """Its private tokens."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""


class Rows(Protocol):
    """Rows of a batch that come and go one by one.

    A row is any object, told from others by identity. `ColdPoolFullError` is raised before anything
    changes, and after any other error every row is as it was.
    """

    @property
    def num_slots_used(self) -> int:
        """Private tokens of all rows."""

    @property
    def num_slots_limit(self) -> int | None:
        """The most there may be."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one private token in all layers."""

    def start(self, prefix: Prefix | None, parked: Any = None) -> Any:
        """Gives a new row that reads a chain of prefixes, and goes on after what was parked."""

    def forward(self, feeds: Mapping[Any, Sequence[int]]) -> dict[Any, Tensor]:
        """Appends tokens to rows.

        Args:
            feeds: The ids of each row that takes part, at least one.

        Returns:
            `[vocab_size]` the logits after the last id of each.
        """

    def crop(self, row: Any, num_tokens: int) -> None:
        """Takes the last private tokens of a row away.

        Raises:
            ValueError: The model keeps states that have read them.
        """

    def park(self, row: Any) -> Any:
        """Takes a row out of the batch and gives what it holds."""

    def drop(self, row: Any) -> None:
        """Takes a row out of the batch and frees what it holds."""

    def num_tokens(self, row: Any) -> int:
        """Private tokens of a row."""

    def check_integrity(self) -> None:
        """Checks the pools.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
