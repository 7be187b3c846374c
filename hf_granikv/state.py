"""What all layers of one cache share: the prefix, the rows, and the forward under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

import numpy as np
from torch import Tensor

from hf_granikv.config import CacheOptions
from hf_granikv.errors import UnannouncedForwardError
from hf_granikv.inputs import Bools, HeldRows, Layout
from hf_granikv.journal import Journal
from hf_granikv.pools import ColdPool, HotPool, Prefix, RowStates
from hf_granikv.pools.cold import ColdWrite
from hf_granikv.views import LayerKind, StepPlan
from hf_granikv.visibility import dense_columns, suffix_mask, why_not_dense


@dataclass(frozen=True, slots=True)
class Step:
    """The forward pass under way."""

    plan: StepPlan
    write: ColdWrite


class CacheState:
    """Pools, rows and the current step of one `AsymmetricPagedCache`.

    Attributes:
        layers: What each layer stores and sees.
        has_windows: Whether some layer is local.
        hot: The pool of prefixes, shared with every fork.
        cold: The pool of private tokens, this cache's own.
        row_states: What layers keep of the rows that do not keep tokens.
        prefix: The prefix that rows start from; None for a plain cache.
        shared_len: Prefix tokens that the rows see; less than the prefix after a crop into it.
        num_columns: Mask columns since the prefix.
        peak_bytes: The most that rows of batches before this one held, since the last release.
        step_id: Counts forward passes; a layer that has stored this one carries the same number.
        is_generation_pending: Whether `generate` has taken the cache and not run it yet.
        recounts_positions: Whether `generate` runs rows that end in pads; it counts their positions
            on from the last column, which is wrong.
    """

    def __init__(self, layers: Sequence[LayerKind], options: CacheOptions, hot: HotPool) -> None:
        self.layers = tuple(layers)
        self.has_windows = any(layer.window is not None for layer in layers)
        self.options = options
        self.hot = hot
        self.cold = ColdPool(len(layers), limit=options.cold_slots)
        self.row_states = RowStates()
        self.journal = Journal()
        self.prefix: Prefix | None = None
        self.shared_len = 0
        self.num_columns = 0
        self.step_id = 0
        self.is_generation_pending = False
        self.recounts_positions = False
        self._owned: Bools | None = None
        self._staged: Layout | None = None
        self._step: Step | None = None
        self._is_open = False
        self._shared_before: int | None = None
        self.peak_bytes = 0
        self._hold: finalize | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first forward."""
        return self.cold.table.num_rows

    @property
    def num_held(self) -> int:
        """Columns held: of the prefix and since."""
        return self.shared_len + self.num_columns

    def held_rows(self) -> HeldRows:
        """The rows as `inputs` needs to see them."""
        starts = () if self.prefix is None else self.prefix.states
        if not self.num_rows:
            return HeldRows(self.shared_len, None, None, False, self.has_windows, starts)
        lengths, owned = self.cold.table.lengths, self._owned_columns()
        recounts = self.recounts_positions
        return HeldRows(self.shared_len, lengths, owned, recounts, self.has_windows, starts)

    def seq_length(self, layer_step_id: int) -> int:
        """Columns that a layer holds; a layer that has yet to store the step lacks its columns."""
        if self._staged is not None:
            return self._staged.shared_len + (0 if self._staged.starts_batch else self.num_columns)
        if layer_step_id != self.step_id and self._step is not None:
            return self.num_held - self._step.plan.q_len
        return self.num_held

    def stage(self, layout: Layout) -> None:
        """Notes how the coming forward is laid out; no token changes until its first layer.

        Raises:
            TornStateError: If it would go on from states that a failed forward has changed.
        """
        self.settle()
        if layout.starts_batch:
            stored = () if self.prefix is None else self.prefix.states.get(layout.shared_len, ())
            self.peak_bytes = max(self.peak_bytes, self.private_bytes)
            self.row_states.begin(stored, len(layout.owned))
        self.row_states.open_step()
        self._staged = layout

    def begin_step(self, key_states: Tensor) -> Step:
        """Makes room for the tokens of a forward, at its first layer.

        Args:
            key_states: `[num_rows, num_kv_heads, q_len, head_dim]` of that layer.

        Raises:
            ColdPoolFullError: Before anything is changed.
            TornStateError: If a failed forward has changed the states of the rows.
            UnannouncedForwardError: If there is a prefix and the inputs of this forward are unknown.
            ValueError: If the rows are not those held.
        """
        self.row_states.check_whole()
        num_rows, _, q_len, _ = key_states.shape
        layout, self._staged = self._staged, None
        if layout is None or layout.owned.shape != (num_rows, q_len):
            layout = self._plain_layout(num_rows, q_len)
        counts = layout.owned.sum(1)
        self.cold.check_room(int(counts.sum()), replacing=layout.starts_batch)
        self._shared_before = None
        if layout.starts_batch:
            self._shared_before = self._reset_shared_len
            self._start_rows(num_rows, layout.shared_len)
            self.recounts_positions = layout.recounts_positions
        before = self.cold.table.lengths
        is_even = bool(layout.owned.all())
        source = None if is_even else np.flatnonzero(layout.owned)
        # without a prefix the cache replaces DynamicCache and must not hold more than it does
        spare = 1 / 128 if self.prefix is None else 1 / 8
        write = self.cold.extend(counts, source, spare=spare)
        if self._owned is not None or not is_even:
            self._owned = np.concatenate([self._owned_columns(), layout.owned], axis=1)
        self.num_columns += q_len
        self.step_id += 1
        plan = self._plan(layout, before)
        self._step, self._is_open = Step(plan, write), True
        return self._step

    @property
    def is_staged(self) -> bool:
        """Whether the coming forward has been announced and not begun."""
        return self._staged is not None

    def current_step(self) -> Step:
        """The step that the first layer began."""
        assert self._step is not None
        return self._step

    def write(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> None:
        """Stores the new tokens of one layer.

        Args:
            layer_idx: The layer.
            key_states: `[num_rows, num_kv_heads, q_len, head_dim]`.
            value_states: Likewise.
        """
        self.cold.write(layer_idx, self.current_step().write, key_states, value_states)

    def settle(self, *, is_complete: bool = False) -> None:
        """Drops what a forward left that failed, as one does that is not known to be complete."""
        staged, self._staged = self._staged, None
        is_half = self._is_open and not is_complete
        self._is_open = False
        shared_before = self._shared_before
        if staged is not None:
            shared_before = self._reset_shared_len if staged.starts_batch else None
        if is_half:
            self.crop(self.current_step().plan.q_len)
        has_failed = is_half or (self.row_states.is_open and not is_complete)
        if has_failed and shared_before is not None:
            self._start_rows(0, shared_before)
            self.row_states.release()
        elif is_half and not self.row_states.is_open:
            self.row_states.tear()
        else:
            self.row_states.close_step(has_failed=has_failed)

    def crop(self, num_columns: int) -> None:
        """Takes the last columns away, those of the prefix last; the prefix itself stays."""
        from_rows = min(num_columns, self.num_columns)
        kept = self.num_columns - from_rows
        if self._owned is None:
            counts = np.full(self.num_rows, from_rows, dtype=np.int64)
        else:
            counts = self._owned[:, kept:].sum(1)
            self._owned = self._owned[:, :kept]
        self.cold.truncate(counts)
        self.num_columns = kept
        self.shared_len = max(0, self.shared_len - (num_columns - from_rows))
        self._step = None

    def select_rows(self, indices: np.ndarray) -> None:
        """Makes row i the former row `indices[i]`."""
        if not self.num_rows:
            return
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_rows):
            raise ValueError(
                f"rows {indices.tolist()} were asked for, the cache holds rows 0 to "
                f"{self.num_rows - 1}."
            )
        self.cold.select(indices)
        self.row_states.select(indices)
        self._owned = None if self._owned is None else self._owned[indices]

    def check_takes_prefix(self) -> None:
        """Checks that a prefix may come.

        Raises:
            ValueError: If there is one already, or rows that do not start from it.
        """
        if self.prefix is not None or self.num_rows:
            held = f"{self.num_rows} rows already; call cache.reset() first"
            if self.prefix is not None:
                held = "a prefix already; call cache.release(prefix) first"
            raise ValueError(f"the cache holds {held}, or build another cache.")

    def hold(self, prefix: Prefix) -> None:
        """Takes over one hold of a prefix, until `let_go` or the end of this state."""
        self.prefix = prefix
        self._hold = finalize(self, self.hot.release, prefix)
        self._hold.atexit = False

    def let_go(self) -> None:
        """Drops the hold and the rows that start from the prefix."""
        assert self._hold is not None
        self._hold()
        self.prefix = self._hold = None
        self.release_rows()

    def release_rows(self) -> None:
        """Frees everything private; the prefix stays and is whole again."""
        self._start_rows(0, self._whole_len)
        self.cold.release()
        self.row_states.release()
        self.peak_bytes = 0
        self.is_generation_pending = False
        self._staged, self._step, self._is_open = None, None, False

    def fork(self) -> "CacheState":
        """An independent state over the same HOT pool; the row states are the layers' to copy."""
        twin = CacheState(self.layers, self.options, self.hot)
        twin.cold = self.cold.copy()
        if self.prefix is not None:
            self.hot.acquire(self.prefix)
            twin.hold(self.prefix)
        twin.shared_len, twin.num_columns = self.shared_len, self.num_columns
        twin.step_id, twin.recounts_positions = self.step_id, self.recounts_positions
        twin._owned = None if self._owned is None else self._owned.copy()
        return twin

    @property
    def private_bytes(self) -> int:
        """Bytes of what rows hold of their own."""
        return self.cold.num_bytes + self.row_states.num_bytes

    @property
    def _whole_len(self) -> int:
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def _reset_shared_len(self) -> int:
        """Prefix tokens that rows see once those held now are gone."""
        return self._whole_len if self.num_rows else self.shared_len

    def _start_rows(self, num_rows: int, shared_len: int) -> None:
        self.cold.begin(num_rows)
        self.num_columns, self._owned, self.recounts_positions = 0, None, False
        self.shared_len = shared_len

    def _plain_layout(self, num_rows: int, q_len: int) -> Layout:
        if self.prefix is not None:
            self.row_states.tear()
            raise UnannouncedForwardError
        if self.num_rows and self.num_rows != num_rows:
            raise ValueError(
                f"the forward has {num_rows} rows, the cache holds {self.num_rows}; use a new cache, "
                "reset() this one, or repeat its rows with batch_repeat_interleave."
            )
        starts_batch = not self.num_rows
        return Layout(starts_batch, self.shared_len, np.ones((num_rows, q_len), dtype=bool))

    def _plan(self, layout: Layout, before: np.ndarray) -> StepPlan:
        table, owned, mask, columns = self.cold.table, layout.owned, None, None
        # without a prefix nobody reads it, and it is as large as the scores of one head
        if self.prefix is not None:
            mask = suffix_mask(owned, before, table.max_length)
        if self._owned is not None:
            columns = dense_columns(
                self._owned, table.lengths, self.shared_len, pads_first=self.has_windows
            )
        return StepPlan(
            num_rows=self.num_rows,
            q_len=owned.shape[1],
            shared_len=self.shared_len,
            kv_len=self.num_held,
            suffix_mask=mask,
            positions=self.shared_len + before[:, None] + owned.cumsum(1) - 1,
            is_token=owned,
            column_index=columns,
            dense_reason=layout.dense_reason,
            dense_refusal=why_not_dense(owned) if self.has_windows else None,
            dispatch=self.options.dispatch,
            journal=self.journal,
        )

    def _owned_columns(self) -> Bools:
        if self._owned is not None:
            return self._owned
        return np.ones((self.num_rows, self.num_columns), dtype=bool)
