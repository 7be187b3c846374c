"""Private tokens of the rows of a batch, kept one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.pools.cold_write import ColdWrite, Places
from hf_granikv.pools.slot_rows import SlotRows
from hf_granikv.pools.slots import SlotAllocator
from hf_granikv.pools.storage import KeysAndValues
from hf_granikv.pools.token_table import TokenTable


class ColdPool(SlotRows):
    """One growable pool of token slots per layer, and the table that says who owns which.

    ```
    layer l   K [num_kv_heads, num_slots, head_dim]   V likewise
    head h    |row 0 ......|    |row 1 ..|      |row 2 ........|  |
               <- length -> room               rows start `stride` slots apart
    ```

    While rows are runs at a regular distance, all of them are one strided view and nothing is
    gathered. A batch whose rows share slots (beams) or differ much in length is scattered, and
    read through an index. A slot is viewable as a page of size 1.

    Args:
        num_layers: Layers that store tokens.
        limit: The most slots the pool may ever have; None for no limit.
    """

    def __init__(self, num_layers: int, *, limit: int | None = None) -> None:
        super().__init__(num_layers, limit=limit)
        # on each device: the slots of all rows and columns, and which of these are pads
        self._gather_indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # per layer, keys and values as [num_rows, num_kv_heads, stride, head_dim] while rows are runs
        self._run_views: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def begin(self, num_rows: int) -> None:
        """Releases all rows and starts a batch of `num_rows` empty ones."""
        self._note_peak()
        self._allocator.free(self.table.flat())
        self.table = TokenTable(num_rows)
        self._forget_views()

    def release(self) -> None:
        """Releases all rows and gives the storages back."""
        self.begin(0)
        self._allocator = SlotAllocator()
        self._storage.release()
        self.peak_bytes = 0

    def extend(
        self,
        counts: NDArray[np.int64] | int,
        source: NDArray[np.int64] | None,
        *,
        spare: float = 1 / 8,
    ) -> ColdWrite:
        """Gives each row `counts[i]` more slots, growing the storage if need be.

        Args:
            counts: `[num_rows]` new tokens of each row; one number for all rows, without a `source`.
            source: `[counts.sum()]` see `ColdWrite`.
            spare: Room to leave behind a run, as a fraction of the longest: more of it saves
                copies, and holds more bytes.

        Raises:
            ColdPoolFullError: Before anything is changed.
        """
        table = self.table
        if isinstance(counts, int):
            assert source is None, "every row stores all that it is given"
            self.check_room(table.num_rows * counts, replacing=False)
            if (write := self._extend_runs(counts)) is not None:
                return write
            counts = np.full(table.num_rows, counts)
        self.check_room(int(counts.sum()), replacing=False)
        # an empty batch has not been laid out yet; a scattered one stays scattered, since a
        # beam search would otherwise copy its rows at every step
        may_lay_out = table.stride is not None or table.max_length == 0
        slots = table.next_in_place(counts)
        if slots is None and may_lay_out and self._lay_out(counts, spare):
            slots = table.next_in_place(counts)
        if slots is None or not self._allocator.try_take(slots):
            table.scatter()
            self._grow(self.num_tokens + int(counts.sum()))
            slots = self._allocator.allocate(int(counts.sum()))
        start = table.run_length if source is None else None
        table.append(counts, slots)
        self._gather_indices = {}
        return ColdWrite(slots, source, start)

    def write(self, layer_idx: int, write: ColdWrite, keys: Tensor, values: Tensor) -> None:
        """Stores the new tokens of one layer.

        Args:
            layer_idx: The layer.
            write: What `extend` returned for this forward.
            keys: `[num_rows, num_kv_heads, q_len, head_dim]` of all tokens of the forward.
            values: Likewise.
        """
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        self._storage.open(layer_idx, keys, values)
        places = self.places(layer_idx, write, keys.shape[2])
        if places is not None:
            places.put(keys, values)
            return
        slots, source = write.on(keys.device)
        tokens = [t.transpose(0, 1).flatten(1, 2) for t in (keys, values)]
        self._storage.put(layer_idx, slots, tokens, source)

    def places(self, layer_idx: int, write: ColdWrite, q_len: int) -> Places | None:
        """Where `write` puts tokens that lie side by side.

        Args:
            layer_idx: A layer that has written before.
            write: What `extend` returned for this forward.
            q_len: Tokens per row of the forward.

        Returns:
            None if rows are no runs of equal length.
        """
        if write.start is None:
            return None
        keys, values = self._runs(layer_idx)
        start = write.start
        return Places(keys.narrow(2, start, q_len), values.narrow(2, start, q_len))

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows, row i valid up to `table.lengths[i]`.

        Returns:
            Two `[num_rows, num_kv_heads, max_length, head_dim]` tensors: views of the pool while
            rows are runs (valid until the next `extend`), gathered copies otherwise.
        """
        width = self.table.max_length
        if self.table.stride is not None:
            key_runs, value_runs = self._runs(layer_idx)
            return key_runs.narrow(2, 0, width), value_runs.narrow(2, 0, width)
        return self._gathered(layer_idx)

    def storage(self, layer_idx: int) -> KeysAndValues | None:
        """See `SlotStorage.layer`."""
        return self._storage.layer(layer_idx)

    def truncate(self, counts: NDArray[np.int64]) -> None:
        """Frees the last `counts[i]` tokens of each row."""
        self._allocator.free(self.table.truncate(counts))
        self._gather_indices = {}

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes row i the former row `indices[i]`; slots are shared, nothing is copied."""
        before = self.table.flat()
        self.table.select(indices)
        self._allocator.hold(self.table.flat())
        self._allocator.free(before)
        self._forget_views()

    def take_row(self, row: int) -> list[KeysAndValues | None]:
        """Copies of what a row holds: per layer `[num_kv_heads, length, head_dim]`, in order."""
        slots = torch.from_numpy(self.table.row(row).copy())
        return [self._storage.take(layer_idx, slots) for layer_idx in range(len(self._storage))]

    def lend_row(self, row: int, num_tokens: int | None = None) -> "LentTokens":
        """What a row holds, or its first tokens, read when it is asked for; valid until rows change."""
        return LentTokens(self, row, num_tokens)

    def add_row(self, tokens: Sequence[KeysAndValues | None], length: int) -> None:
        """Adds a row that holds these tokens, behind the others.

        Args:
            tokens: What `take_row` or `lend_row` gave, of a pool over the same layers.
            length: Tokens of the row.

        Raises:
            ColdPoolFullError: Before anything is changed.
        """
        self.check_room(length, replacing=False)
        self.table.add_row()
        num_rows, stride = self.table.num_rows, self.table.stride
        counts = np.where(np.arange(num_rows) == num_rows - 1, length, 0)
        try:
            if stride is not None and length <= stride:
                self._grow(num_rows * stride)
                # a limit may have left less than a run for it
                if self.num_slots < num_rows * stride:
                    self.table.scatter()
            self._forget_views()
            slots = torch.from_numpy(self.extend(counts, None).slots)
            for layer_idx, held in enumerate(tokens):
                if held is not None:
                    self._storage.open(layer_idx, *held)
                    self._storage.put(layer_idx, slots, held)
        except BaseException:
            self.remove_row(num_rows - 1)
            raise

    def remove_row(self, row: int) -> None:
        """Frees what a row holds; the last row takes its place."""
        table, last = self.table, self.table.num_rows - 1
        self._allocator.free(table.row(row))
        old = new = table.row(last).copy()
        if table.stride is not None and row != last:
            new = row * table.stride + np.arange(len(old))
            self._storage.move(old, new)
            self._allocator.hold(new)
            self._allocator.free(old)
        table.move_last(row, new)
        self._forget_views()

    def copy(self) -> "ColdPool":
        """An independent pool with the same rows."""
        twin = ColdPool(len(self._storage), limit=self.limit)
        twin._storage = self._storage.copy()
        twin._allocator.grow(self.num_slots)
        twin._allocator.hold(self.table.flat())
        twin.table = self.table.copy()
        return twin

    def _extend_runs(self, num_new: int) -> ColdWrite | None:
        """Gives each row so many more slots behind its run; None if rows are no equal runs with room."""
        start, slots = self.table.run_length, self.table.next_of_runs(num_new)
        if slots is None or not self._allocator.try_take(flat := slots.reshape(-1)):
            return None
        self.table.append_to_runs(slots)
        self._gather_indices = {}
        return ColdWrite(flat, None, start)

    def _runs(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        views = self._run_views[layer_idx]
        if views is None:
            keys, values = (self._as_runs(t) for t in self._storage.written(layer_idx))
            views = self._run_views[layer_idx] = keys, values
        return views

    def _as_runs(self, storage: Tensor) -> Tensor:
        stride, num_rows = self.table.stride, self.table.num_rows
        assert stride is not None
        runs = storage[:, : num_rows * stride].unflatten(1, (num_rows, stride))
        return runs.transpose(0, 1)

    def _gathered(self, layer_idx: int) -> KeysAndValues:
        storages = self._storage.written(layer_idx)
        device, size = storages[0].device, (self.table.num_rows, self.table.max_length)
        if device not in self._gather_indices:
            padded = self.table.padded().reshape(-1)
            slots, pads = np.maximum(padded, 0), np.flatnonzero(padded < 0)
            on_device = [torch.from_numpy(t).to(device) for t in (slots, pads)]
            self._gather_indices[device] = on_device[0], on_device[1]
        index, hidden = self._gather_indices[device]
        keys, values = (t.index_select(1, index) for t in storages)
        if len(hidden):
            # masked by whoever reads; 0, since what another row holds need not be a number
            keys.index_fill_(1, hidden, 0)
            values.index_fill_(1, hidden, 0)
        return (
            keys.unflatten(1, size).transpose(0, 1),
            values.unflatten(1, size).transpose(0, 1),
        )

    def _forget_views(self) -> None:
        self._gather_indices = {}
        self._run_views = [None] * len(self._storage)


class LentTokens(Sequence[KeysAndValues | None]):
    """Keys and values of a row, layer by layer, as they are in its pool.

    Args:
        pool: The pool.
        row: The row.
        num_tokens: How many of its first tokens; None for all.
    """

    def __init__(self, pool: ColdPool, row: int, num_tokens: int | None) -> None:
        self._pool = pool
        self._row = row
        self.num_tokens = len(pool.table.row(row)[:num_tokens])

    def __len__(self) -> int:
        return len(self._pool._storage)

    def __getitem__(self, layer_idx: Any) -> Any:
        # slots may have moved since it was lent
        slots = self._pool.table.row(self._row)[: self.num_tokens]
        return self._pool._storage.lend(layer_idx, slots.copy())
