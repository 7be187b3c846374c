"""What all layers of one cache share: the prefixes, the rows, and the forward under way."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hf_granikv.batch_rows import BatchRows, ParkedRow
from hf_granikv.config import CacheOptions
from hf_granikv.errors import RowsTakenError, UnannouncedForwardError
from hf_granikv.forwards import Forwards
from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.journal import Journal
from hf_granikv.layouts import HeldRows, Layout, all_tokens
from hf_granikv.pools import HotPool, Prefix
from hf_granikv.pools.cold_write import ColdWrite
from hf_granikv.row_prefixes import NO_ROWS, RowPrefixes
from hf_granikv.step import ReadyLayer, Step
from hf_granikv.views import LayerKind, StepPlan
from hf_granikv.visibility import dense_columns, suffix_mask, why_not_dense
from hf_granikv.wording import counted


class CacheState(BatchRows):
    """Pools, rows and the current step of one `AsymmetricPagedCache`.

    Attributes:
        layers: What each layer stores and sees.
        has_windows: Whether some layer is local.
        hot: The pool of prefixes, shared with every fork.
        prefixes: What is held of `hot`, and what the next batch starts from.
        num_cropped: Prefix tokens that a crop took from the rows of a batch that has yet to start.
        peak_bytes: The most that rows of batches before this one held, since the last release.
        step_id: Counts forward passes; a layer that has stored this one carries the same number.
        is_generation_pending: Whether `generate` has taken the cache and not run it yet.
        returns_contiguous: Whether keys and values without a prefix are copied to be contiguous.
        graph_step: The first step whose tokens had a graph, which pools do not keep; None = none.
        is_live: Whether rows come and go: the inputs of forwards are read even without a prefix.
        forwards: How models run over the cache.
    """

    def __init__(self, layers: Sequence[LayerKind], options: CacheOptions, hot: HotPool) -> None:
        super().__init__(len(layers), options.cold_slots)
        self.layers = tuple(layers)
        self.has_windows = any(layer.window is not None for layer in layers)
        self.options = options
        self.hot = hot
        self.journal = Journal()
        self.prefixes = HeldPrefixes(hot)
        self.num_cropped = 0
        self.step_id = 0
        self.is_generation_pending = False
        self.returns_contiguous = False
        self.is_live = False
        self.graph_step: int | None = None
        self.forwards = Forwards()
        self._staged: Layout | None = None
        self._step: Step | None = None
        # columns of the forward under way; 0 between forwards
        self._num_open = 0
        self._cropped_before: int | None = None
        self.peak_bytes = 0

    @property
    def reads_inputs(self) -> bool:
        """Whether forwards go by parts: there is a prefix, or rows come and go."""
        return self.is_live or bool(self.prefixes)

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
            return HeldRows(starts, None, None, 0, False, self.has_windows)
        held = self.reads, self.cold.table.lengths, self._owned, self.num_columns
        return HeldRows(*held, self.recounts_positions, self.has_windows)

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
        self._staged, self.forwards.is_in_graph = layout, False

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
            layout = self._plain_layout(num_rows, q_len, layout)
        counts = q_len if layout.is_full else layout.owned.sum(1)
        num_new = num_rows * q_len if layout.is_full else int(layout.owned.sum())
        self.cold.check_room(num_new, replacing=layout.starts_batch)
        self._cropped_before = None
        if layout.starts_batch:
            self._cropped_before = self._cropped_once_gone
            self.start_rows(num_rows, layout.reads)
            self.recounts_positions = layout.recounts_positions
        before = self.cold.table.lengths
        source = None if layout.is_full else np.flatnonzero(layout.owned)
        # without a prefix the cache replaces DynamicCache and must not hold more than it does
        spare = 1 / 8 if self.reads_inputs else 1 / 128
        write = self.cold.extend(counts, source, spare=spare)
        try:
            self.append_columns(layout)
        except BaseException:
            self.cold.truncate(np.broadcast_to(counts, num_rows))
            raise
        # from here on `settle` takes the tokens back, which no layer has written
        self._num_open = q_len
        try:
            plan = self._plan(layout, before, write)
        except BaseException:
            self.settle()
            raise
        self.step_id += 1
        self.journal.steps_in_graphs += self.forwards.is_in_graph
        self._step = Step(plan, write, self.cold.table.max_length)
        return self._step

    @property
    def is_staged(self) -> bool:
        """Whether the coming forward has been announced and not begun."""
        return self._staged is not None

    def current_step(self) -> Step:
        """The step that the first layer began."""
        if self._step is None:
            raise RowsTakenError("the rows of this forward pass were dropped while it was running")
        return self._step

    def ready_layer(self, layer_idx: int) -> ReadyLayer | None:
        """What a layer of the step under way gives, once; None if it has to work it out."""
        return None if self._step is None else self._step.take_ready(layer_idx)

    def note_graph(self) -> bool:
        """Notes that the tokens of this step have a graph; gives whether earlier ones had one."""
        if self.graph_step is None:
            self.graph_step = self.step_id
        return self.graph_step < self.step_id

    def settle(self, *, is_complete: bool = False) -> None:
        """Drops what a forward left that failed, as one does that is not known to be complete."""
        if self._step is not None:
            self._step.end()
        if is_complete and self._num_open and self._step is not None:
            self.forwards.goes_straight = self._step.plan.goes_straight
        staged, self._staged = self._staged, None
        num_half = 0 if is_complete else self._num_open
        self._num_open = 0
        cropped_before = self._cropped_before
        if staged is not None:
            cropped_before = self._cropped_once_gone if staged.starts_batch else None
        if num_half:
            self.graph_step = None if self.graph_step == self.step_id else self.graph_step
            self._crop(num_half)
        has_failed = num_half > 0 or (self.row_states.is_open and not is_complete)
        if has_failed and cropped_before is not None:
            self.start_rows(0, NO_ROWS)
            self.num_cropped = cropped_before
            self.row_states.release()
        elif num_half and not self.row_states.is_open:
            self.row_states.tear()
        else:
            self.row_states.close_step(has_failed=has_failed)

    def crop(self, num_columns: int) -> None:
        """Takes the last columns away, those of the prefix last; the prefix itself stays."""
        self._settle_interrupted()
        self._crop(num_columns)

    def select_rows(self, indices: np.ndarray) -> None:
        """Makes row i the former row `indices[i]`."""
        self._settle_interrupted()
        super().select_rows(indices)

    def lend(self, row: int, num_tokens: int | None = None) -> ParkedRow:
        """See `BatchRows.lend`."""
        self._settle_interrupted()
        return super().lend(row, num_tokens)

    def _settle_interrupted(self) -> None:
        """Undoes what an interrupt has left, which torch does not show to hooks.

        Without a prefix nobody says when a forward is over, so there is nothing to tell it by.
        """
        if self.reads_inputs:
            self.settle()

    def _crop(self, num_columns: int) -> None:
        from_prefix = num_columns - self.drop_columns(num_columns)
        if self.num_rows:
            self.reads = self.reads.shortened(from_prefix)
        else:
            self.num_cropped += from_prefix
        self.graph_step = self.graph_step if self.num_columns else None
        self._step = None

    def let_go(self, prefix: Prefix) -> None:
        """Drops one hold (`HeldPrefixes`), and the rows if they read what is gone then."""
        self.prefixes.let_go(prefix)
        if not self.prefixes or not self.prefixes.serve(self.reads):
            self.release_rows()

    def let_all_go(self) -> None:
        """Drops every hold and all rows."""
        self.prefixes.let_all_go()
        self.epoch = object()
        self.release_rows()

    def release_rows(self) -> None:
        """Frees everything private; the prefix stays and is whole again."""
        self.start_rows(0, NO_ROWS)
        self.cold.release()
        self.row_states.release()
        self.peak_bytes = 0
        self.is_generation_pending = False
        self._staged, self._step, self._num_open = None, None, 0

    def fork(self, *, keeps_rows: bool = True) -> "CacheState":
        """An independent state over the same HOT pool; the row states are the layers' to copy."""
        self._settle_interrupted()
        twin = CacheState(self.layers, self.options, self.hot)
        twin.epoch = self.epoch
        if keeps_rows:
            twin.copy_rows(self)
        twin.prefixes.copy_from(self.prefixes)
        twin.num_cropped = self.num_cropped if keeps_rows else 0
        twin.forwards.goes_straight = self.forwards.goes_straight
        twin.step_id, twin.graph_step = self.step_id, self.graph_step if keeps_rows else None
        return twin

    @property
    def _cropped_once_gone(self) -> int:
        """Prefix tokens that rows to come lack once those held now are gone."""
        return 0 if self.num_rows else self.num_cropped

    def start_rows(self, num_rows: int, reads: RowPrefixes) -> None:
        """Frees the rows held and starts others, which see all that `reads` says."""
        super().start_rows(num_rows, reads)
        self.num_cropped, self.graph_step = 0, None

    def _plain_layout(self, num_rows: int, q_len: int, staged: Layout | None) -> Layout:
        if self.reads_inputs:
            self.row_states.tear()
            announced = None if staged is None else staged.owned.shape
            raise UnannouncedForwardError((num_rows, q_len), announced)
        if self.num_rows and self.num_rows != num_rows:
            raise ValueError(
                f"the forward has {counted(num_rows, 'row')}, the cache holds {self.num_rows}; use a new "
                "cache, reset() this one, or repeat its rows with batch_repeat_interleave."
            )
        if not self.num_rows and self.prefixes.has_dropped:
            self.journal.warn_unshared(
                "nothing is shared: the prefix was dropped by cache.invalidate() or release(), and none has "
                "been stored since; call cache.prefill. Until then rows go on from one call to the next, as "
                "over a DynamicCache, unless cache.reset() comes between."
            )
        reads = self.reads if self.num_rows else RowPrefixes.whole([None] * num_rows)
        return Layout(not self.num_rows, reads, all_tokens(num_rows, q_len), is_full=True)

    def _plan(self, layout: Layout, before: np.ndarray, write: ColdWrite) -> StepPlan:
        is_rectangle = self._owned is None and self.reads.is_even
        table, owned, mask, columns = self.cold.table, layout.owned, None, None
        # one token each after equally many sees all; without a prefix nobody reads the mask, and it
        # is as large as the scores of one head
        sees_all = owned.shape[1] == 1 and write.start is not None
        if self.reads_inputs and not sees_all:
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
            positions=layout.positions(self.reads.lengths + before),
            is_token=owned,
            column_index=columns,
            dense_reason=layout.dense_reason,
            dense_refusal=why_not_dense(owned) if self.has_windows else None,
            why_unmasked=self.forwards.why_unmasked(is_rectangle=is_rectangle),
            dispatch=self.options.dispatch,
            journal=self.journal,
            kept=self.kept,
        )
