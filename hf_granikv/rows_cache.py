"""The part of the `Cache` contract that moves rows and takes tokens away."""

import numpy as np
import torch
from torch import Tensor

from hf_granikv.graph_cache import GraphCache
from hf_granikv.wording import counted


class RowsCache(GraphCache):
    """A cache whose rows can be reordered, repeated, dropped and shortened."""

    def reset(self) -> None:
        """Releases all rows and their memory; prefixes and bindings stay."""
        self._state.release_rows()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns of every row away.

        A crop into the prefix shortens what the rows of this cache see of it, until the next
        `reset` or `generate`; the stored prefix and its other readers are not touched.

        Args:
            tokens_to_remove: 0 or negative: minus the number of columns.

        Raises:
            ValueError: If it is positive, or the rest needs tokens of the prefix that no window
                could see when it was stored, or some layer keeps a state that has read them.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding may hand over a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not possible; give minus the number of tokens to "
                "remove."
            )
        if tokens_to_remove:
            self._served.check_can_take_back(f"crop({tokens_to_remove})")
        state = self._state
        self._served.check_reach(
            state.reads.shortened(max(0, -tokens_to_remove - state.num_columns))
        )
        state.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Asked by assisted decoding, which will crop; refused where that is not possible."""
        self._served.check_can_take_back("assisted decoding")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i the former row `beam_idx[i]`, `[num_rows]`; slots are shared, nothing is copied."""
        self._state.select_rows(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, `[num_kept]`, in that order; or those marked, `[num_rows]` bool."""
        chosen, num_rows = torch.as_tensor(indices).cpu(), self._state.num_rows
        if chosen.dtype == torch.bool:
            if num_rows and len(chosen) != num_rows:
                raise ValueError(
                    f"{counted(len(chosen), 'mark')} for the {counted(num_rows, 'row')} that the cache holds; "
                    "mark every row."
                )
            chosen = chosen.nonzero()[:, 0]
        self._state.select_rows(chosen.numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row; the copies share their slots."""
        self._state.select_rows(np.repeat(np.arange(self._state.num_rows), repeats))

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return self._state.num_rows or -1
