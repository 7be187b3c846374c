"""Private tokens of the rows of a batch, kept one by one."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools.cold_write import ColdWrite
from hf_granikv.pools.slots import SlotAllocator
from hf_granikv.pools.storage import KeysAndValues, SlotStorage
from hf_granikv.pools.token_table import TokenTable

# room left behind each run, so that rows grow in place: at least so many slots
MIN_HEADROOM = 8
# rows are laid out as equal runs only while the slots that this leaves empty stay below
MAX_LAYOUT_WASTE = 0.5
SCATTERED_GROWTH = 1.125


class ColdPool:
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

    Attributes:
        table: Who owns which slot.
        peak_bytes: The largest number of bytes held by batches that have ended since `release`.
    """

    def __init__(self, num_layers: int, *, limit: int | None = None) -> None:
        self.limit = limit
        self.table = TokenTable(0)
        self._allocator = SlotAllocator()
        self._storage = SlotStorage(num_layers)
        self._gather_indices: dict[torch.device, Tensor] = {}
        # per layer, keys and values as [num_rows, num_kv_heads, stride, head_dim] while rows are runs
        self._run_views: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.peak_bytes = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that have stored any."""
        return self._storage.bytes_per_token

    @property
    def num_slots(self) -> int:
        """Slots in storage, free ones included."""
        return self._allocator.num_slots

    @property
    def num_tokens(self) -> int:
        """Slots that some row owns."""
        return self._allocator.num_slots - self._allocator.num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held and of the table."""
        return self._storage.num_bytes + self.table.nbytes

    def check_room(self, num_new: int, *, replacing: bool) -> None:
        """Checks that `num_new` tokens will fit, if need be once the rows held now are gone.

        Raises:
            ColdPoolFullError: With the numbers and the remedy.
        """
        live = 0 if replacing else self.num_tokens
        if self.limit is not None and live + num_new > self.limit:
            raise ColdPoolFullError(
                f"ColdPool has {self.limit - live} free slots of cold_slots={self.limit}, "
                f"{num_new} needed; raise cold_slots, run fewer rows, or generate fewer tokens."
            )

    def begin(self, num_rows: int) -> None:
        """Releases all rows and starts a batch of `num_rows` empty ones."""
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
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
        counts: NDArray[np.int64],
        source: NDArray[np.int64] | None,
        *,
        spare: float = 1 / 8,
    ) -> ColdWrite:
        """Gives each row `counts[i]` more slots, growing the storage if need be.

        Args:
            counts: `[num_rows]` new tokens of each row.
            source: `[counts.sum()]` see `ColdWrite`.
            spare: Room to leave behind a run, as a fraction of the longest: more of it saves
                copies, and holds more bytes.

        Raises:
            ColdPoolFullError: Before anything is changed.
        """
        self.check_room(int(counts.sum()), replacing=False)
        table, lengths = self.table, self.table.lengths
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
        is_even = source is None and len(set(lengths.tolist())) == 1 and table.stride is not None
        start = int(lengths[0]) if is_even else None
        table.append(counts, slots)
        self._gather_indices = {}
        sources = None if source is None else torch.from_numpy(source)
        return ColdWrite(torch.from_numpy(slots), sources, start)

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
        if write.start is not None:
            q_len = keys.shape[2]
            key_runs, value_runs = self._runs(layer_idx)
            key_runs.narrow(2, write.start, q_len).copy_(keys)
            value_runs.narrow(2, write.start, q_len).copy_(values)
            return
        slots, source = write.on(keys.device)
        tokens = [t.transpose(0, 1).flatten(1, 2) for t in (keys, values)]
        self._storage.put(layer_idx, slots, tokens, source)

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

    def add_row(self, tokens: Sequence[KeysAndValues | None], length: int) -> None:
        """Adds a row that holds these tokens, behind the others.

        Args:
            tokens: What `take_row` gave, of a pool over the same layers.
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
            self._forget_views()
            slots = self.extend(counts, None).slots
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
            self._storage.move(torch.from_numpy(old), torch.from_numpy(new))
            self._allocator.hold(new)
            self._allocator.free(old)
        table.move_last(row, new)
        self._forget_views()

    def tidy(self) -> None:
        """Makes rows that moved runs again, so that reading them needs no gather."""
        is_scattered = self.table.stride is None
        if is_scattered and len(held := self.table.flat()) and len(np.unique(held)) == len(held):
            self._lay_out(np.zeros(self.table.num_rows, dtype=np.int64), 1 / 8)

    def copy(self) -> "ColdPool":
        """An independent pool with the same rows."""
        twin = ColdPool(len(self._storage), limit=self.limit)
        twin._storage = self._storage.copy()
        twin._allocator.grow(self.num_slots)
        twin._allocator.hold(self.table.flat())
        twin.table = self.table.copy()
        return twin

    def check_integrity(self) -> None:
        """Checks that every slot is free or owned by exactly the rows that list it.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        self._allocator.check_integrity(self.table.flat())

    def _lay_out(self, counts: NDArray[np.int64], spare: float) -> bool:
        """Makes rows runs with room for `counts` more tokens each, if that may be."""
        table = self.table
        longest = int((table.lengths + counts).max(initial=0))
        stride = longest + max(MIN_HEADROOM, int(longest * spare))
        if self.limit is not None:
            stride = min(stride, self.limit // table.num_rows)
        self._forget_views()
        num_wasted = table.num_rows * longest - int((table.lengths + counts).sum())
        if stride < longest or num_wasted > MAX_LAYOUT_WASTE * table.num_rows * longest:
            return False
        old_slots, num_slots = table.flat(), table.num_rows * stride
        new_slots = table.laid_out(stride)
        if len(old_slots) or num_slots > self.num_slots:
            src, dst = torch.from_numpy(old_slots), torch.from_numpy(new_slots)
            self._storage.resize(num_slots, src, dst)
            self._allocator = SlotAllocator()
            self._allocator.grow(num_slots)
            self._allocator.hold(new_slots)
        table.lay_out(stride)
        return True

    def _grow(self, num_needed: int) -> None:
        if num_needed <= self.num_slots:
            return
        num_slots = max(num_needed, int(self.num_slots * SCATTERED_GROWTH))
        num_slots = num_slots if self.limit is None else min(num_slots, self.limit)
        self._forget_views()
        kept = torch.arange(self.num_slots)
        self._storage.resize(num_slots, kept, kept)
        self._allocator.grow(num_slots)

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
        index = self._gather_indices.get(device)
        if index is None:
            # slots of no one read slot 0: finite, and masked by whoever reads
            padded = np.maximum(self.table.padded(), 0).reshape(-1)
            index = self._gather_indices[device] = torch.from_numpy(padded).to(device)
        keys, values = (
            t.index_select(1, index).unflatten(1, size).transpose(0, 1) for t in storages
        )
        return keys, values

    def _forget_views(self) -> None:
        self._gather_indices = {}
        self._run_views = [None] * len(self._storage)
