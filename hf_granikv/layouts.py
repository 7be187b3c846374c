"""What is held of the rows of a batch, and how the columns of a forward map to their tokens."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hf_granikv.prompt_checks import Bools, Ints
from hf_granikv.row_prefixes import RowPrefixes


class HeldRows(NamedTuple):
    """The rows of the current batch, as far as reading inputs needs them.

    Attributes:
        reads: The prefixes that the rows read, or would start from.
        lengths: `[num_rows]` private tokens of each row; None if no batch has started.
        owned: `[num_rows, num_columns]` which columns since the prefix hold a token of the row; None
            if all do.
        num_columns: Columns since the prefix.
        recounts_positions: Whether positions that come along are to be counted anew.
        pads_first: Whether masks must show pads before the prefix: local layers count columns.
    """

    reads: RowPrefixes
    lengths: Ints | None
    owned: Bools | None
    num_columns: int
    recounts_positions: bool
    pads_first: bool = False


class Layout(NamedTuple):
    """How the columns of one forward pass map to tokens that rows own.

    Attributes:
        starts_batch: Whether the rows start from the prefix, replacing those held now.
        reads: The prefixes that the rows read.
        owned: `[num_rows, q_len]` True where a new column is a token of the row, False for pads.
        is_full: Whether all of them are tokens.
        dense_reason: Why the shared path must not be used, or None.
        recounts_positions: Whether rows end in pads: `generate` will count their positions on from
            the last column, which is wrong.
    """

    starts_batch: bool
    reads: RowPrefixes
    owned: Bools
    is_full: bool
    dense_reason: str | None = None
    recounts_positions: bool = False

    def positions(self, before: Ints) -> Ints:
        """`[num_rows, q_len]` the position of each new column, after so many tokens of each row."""
        positions = before[:, None]
        is_one_each = self.is_full and self.owned.shape[1] == 1
        return positions if is_one_each else positions + self.owned.cumsum(1) - 1


@lru_cache(maxsize=8)
def all_tokens(num_rows: int, q_len: int) -> Bools:
    """`[num_rows, q_len]` True, and read-only: forwards of one shape share it."""
    owned = np.ones((num_rows, q_len), dtype=bool)
    owned.setflags(write=False)
    return owned
