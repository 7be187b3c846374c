"""What all layers of one cache share: the prefixes, the rows, and the forward under way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hf_granikv.config import CacheOptions
from hf_granikv.errors import UnannouncedForwardError
from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.inputs import Bools, HeldRows, Layout
from hf_granikv.journal import Journal
from hf_granikv.pools import ColdPool, HotPool, Prefix, RowStates
from hf_granikv.pools.cold import ColdWrite
from hf_granikv.row_prefixes import RowPrefixes
from hf_granikv.views import LayerKind, StepPlan
from hf_granikv.visibility import dense_columns, suffix_mask, why_not_dense

NO_ROWS = RowPrefixes.whole(())


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
        prefixes: What is held of `hot`, and what the next batch starts from.
        reads: The prefixes that the rows read; of no rows where none are held.
        num_cropped: Prefix tokens that a crop took from the rows of a batch that has yet to start.
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
        self.prefixes = HeldPrefixes(hot)
        self.reads = NO_ROWS
        self.num_cropped = 0
        self.num_columns = 0
        self.step_id = 0
        self.is_generation_pending = False
        self.recounts_positions = False
        self._owned: Bools | None = None
        self._staged: Layout | None = None
        self._step: Step | None = None
        self._is_open = False
        self._cropped_before: int | None = None
        self.peak_bytes = 0

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first forward."""
        return self.cold.table.num_rows

    @property
    def num_held(self) -> int:
        """Columns held: of the prefix and since."""
        if self.num_rows:
            return self.reads.longest + self.num_columns
        return max(0, self.prefixes.longest - self.num_cropped) + self.num_columns

    def held_rows(self, num_rows: int) -> HeldRows:
        """The rows as `inputs` needs to see them; if there are none, those that would start."""
        if not self.num_rows:
            starts = self.prefixes.starting_rows(num_rows).shortened(self.num_cropped)
            return HeldRows(starts, None, None, False, self.has_windows)
        lengths, owned = self.cold.table.lengths, self._owned_columns()
        return HeldRows(self.reads, lengths, owned, self.recounts_positions, self.has_windows)

    def seq_length(self, layer_step_id: int) -> int:
        """Columns that a layer holds; a layer that has yet to store the step lacks its columns."""
        if (staged := self._staged) is not None:
            return staged.reads.longest + (0 if staged.starts_batch else self.num_columns)
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
            self.peak_bytes = max(self.peak_bytes, self.private_bytes)
            self.row_states.begin(layout.reads.states(), len(layout.owned))
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
        self._cropped_before = None
        if layout.starts_batch:
            self._cropped_before = self._cropped_once_gone
            self._start_rows(num_rows, layout.reads)
            self.recounts_positions = layout.recounts_positions
        before = self.cold.table.lengths
        is_even = bool(layout.owned.all())
        source = None if is_even else np.flatnonzero(layout.owned)
        # without a prefix the cache replaces DynamicCache and must not hold more than it does
        spare = 1 / 8 if self.prefixes else 1 / 128
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
        cropped_before = self._cropped_before
        if staged is not None:
            cropped_before = self._cropped_once_gone if staged.starts_batch else None
        if is_half:
            self.crop(self.current_step().plan.q_len)
        has_failed = is_half or (self.row_states.is_open and not is_complete)
        if has_failed and cropped_before is not None:
            self._start_rows(0, NO_ROWS)
            self.num_cropped = cropped_before
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
        if self.num_rows:
            self.reads = self.reads.shortened(num_columns - from_rows)
        else:
            self.num_cropped += num_columns - from_rows
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
        self.reads = self.reads.selected(indices)
        self._owned = None if self._owned is None else self._owned[indices]

    def check_takes_prefix(self) -> None:
        """Checks that a prefix may come.

        Raises:
            ValueError: If there are rows that started without any.
        """
        if self.num_rows and not self.prefixes:
            raise ValueError(
                f"the cache holds {self.num_rows} rows already; call cache.reset() first, or build "
                "another cache."
            )

    def let_go(self, prefix: Prefix) -> None:
        """Drops one hold (`HeldPrefixes`), and the rows if they read what is gone then."""
        self.prefixes.let_go(prefix)
        if not self.prefixes or not self.prefixes.serve(self.reads):
            self.release_rows()

    def let_all_go(self) -> None:
        """Drops every hold and all rows."""
        self.prefixes.let_all_go()
        self.release_rows()

    def release_rows(self) -> None:
        """Frees everything private; the prefix stays and is whole again."""
        self._start_rows(0, NO_ROWS)
        self.cold.release()
        self.row_states.release()
        self.peak_bytes = 0
        self.is_generation_pending = False
        self._staged, self._step, self._is_open = None, None, False

    def fork(self) -> "CacheState":
        """An independent state over the same HOT pool; the row states are the layers' to copy."""
        twin = CacheState(self.layers, self.options, self.hot)
        twin.cold = self.cold.copy()
        twin.prefixes.copy_from(self.prefixes)
        twin.reads, twin.num_cropped = self.reads, self.num_cropped
        twin.num_columns = self.num_columns
        twin.step_id, twin.recounts_positions = self.step_id, self.recounts_positions
        twin._owned = None if self._owned is None else self._owned.copy()
        return twin

    @property
    def private_bytes(self) -> int:
        """Bytes of what rows hold of their own."""
        return self.cold.num_bytes + self.row_states.num_bytes

    @property
    def _cropped_once_gone(self) -> int:
        """Prefix tokens that rows to come lack once those held now are gone."""
        return 0 if self.num_rows else self.num_cropped

    def _start_rows(self, num_rows: int, reads: RowPrefixes) -> None:
        self.cold.begin(num_rows)
        self.num_columns, self._owned, self.recounts_positions = 0, None, False
        self.reads, self.num_cropped = reads, 0

    def _plain_layout(self, num_rows: int, q_len: int) -> Layout:
        if self.prefixes:
            self.row_states.tear()
            raise UnannouncedForwardError
        if self.num_rows and self.num_rows != num_rows:
            raise ValueError(
                f"the forward has {num_rows} rows, the cache holds {self.num_rows}; use a new cache, "
                "reset() this one, or repeat its rows with batch_repeat_interleave."
            )
        reads = self.reads if self.num_rows else RowPrefixes.whole([None] * num_rows)
        return Layout(not self.num_rows, reads, np.ones((num_rows, q_len), dtype=bool))

    def _plan(self, layout: Layout, before: np.ndarray) -> StepPlan:
        table, owned, mask, columns = self.cold.table, layout.owned, None, None
        # without a prefix nobody reads it, and it is as large as the scores of one head
        if self.prefixes:
            mask = suffix_mask(owned, before, table.max_length)
        if self._owned is not None:
            columns = dense_columns(
                self._owned, table.lengths, self.reads.longest, pads_first=self.has_windows
            )
        return StepPlan(
            num_rows=self.num_rows,
            q_len=owned.shape[1],
            prefix_lens=self.reads.lengths,
            kv_len=self.num_held,
            suffix_mask=mask,
            positions=(self.reads.lengths + before)[:, None] + owned.cumsum(1) - 1,
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
