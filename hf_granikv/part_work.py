"""What attention works out of one part of the prefixes at the first layer of a kind in a forward pass."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.backends.base import Attend, row_index
from hf_granikv.dispatch import Decision, Dispatcher
from hf_granikv.journal import ForwardNotes, GroupNote
from hf_granikv.kernels.suffix_attention import SuffixMask, prepare_mask
from hf_granikv.views import GroupShape, LayerStep, PrefixPart, StepPlan, dtype_name
from hf_granikv.windows import PrefixView, prefix_view
from hf_granikv.wording import counted

# where rows read a prefix as if it was their own
_PASS = "in one pass with the rows' own tokens"


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What a layer does to its scores besides masking.

    Attributes:
        scale: Factor on them.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.
        sinks: `[num_q_heads]` logits of attention sinks, which enter the denominator once.
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None


class JournalEntry(NamedTuple):
    """How a part is served, for the journal of each forward pass.

    Attributes:
        backend_name: See `ForwardNotes.add`, like all others.
        group: Likewise.
        describe: Likewise.
        is_timed: Likewise.
    """

    backend_name: str
    group: Hashable
    describe: Callable[[], str]
    is_timed: bool

    def add(self, plan: StepPlan, note: GroupNote | None = None) -> GroupNote:
        """Enters it; the note of an earlier forward pass goes on."""
        return notes_of(plan).add(*self[:3], is_timed=self.is_timed, note=note)


@dataclass(frozen=True, slots=True)
class PartWork:
    """What attention works out of one part of the prefixes.

    Attributes:
        part_idx: The part.
        rows: Index of the rows that read it; None for all.
        row_map: `[num_rows]` which of those each row is, -1 for none; None for all.
        attend: What attends to it in a backend; None where `in_pass`, or where it is out of sight.
        in_pass: Whether rows read it as if it was their own, in the compiled pass of a decode step.
        view: What local layers see of it.
        fringe_mask: What only some rows see of its first tokens.
        note: Its entry in the journal.
        entry: What that is made of.
    """

    part_idx: int
    rows: slice | Tensor | None
    row_map: NDArray[np.int64] | None
    attend: Attend | None
    in_pass: bool
    view: PrefixView | None
    fringe_mask: SuffixMask | None
    note: GroupNote | None
    entry: JournalEntry | None

    @property
    def is_compiled(self) -> bool:
        """Whether a compiled kernel attends to it, which runs along with that of a decode step."""
        return self.attend is not None and self.attend.compiled is not None


def prepare_part(
    query: Tensor, step: LayerStep, part_idx: int, rule: ScoreRule, *, has_pass: bool
) -> PartWork:
    """Works out how the rows of a part attend to it.

    Args:
        query: `[rows, num_q_heads, q_len, head_dim]` of the first layer of its kind.
        step: What that one has stored, and who reads it.
        part_idx: The part.
        rule: What the layer does to its scores.
        has_pass: Whether a compiled pass attends to the rows' own tokens.
    """
    part, plan, view, attend, note = step.parts[part_idx], step.plan, None, None, None
    in_pass, entry = False, None
    group, common_start = part.group, part.start
    if step.window is not None:
        view = prefix_view(part, plan, step.window)
        common_start = view.common_start
    num_rows = len(query) if group.rows is None else len(group.rows)
    rows = None if group.rows is None else row_index(group.rows, query.device)
    if group.stop > common_start:
        shape = _group_shape(query, part, num_rows, group.stop - common_start, rule)
        decision = _dispatcher(plan.dispatch).choose(shape, str(query.device))
        plan.journal.reckoning = decision.origin
        backend, tensors = BACKENDS[decision.backend_name], common_keys(part, view)
        in_pass = has_pass and backend.is_by_row
        kernel = _PASS
        if not in_pass:
            planned = partial(backend.planned, scale=rule.scale, softcap=rule.softcap)
            attend = planned(query, *tensors, rows=group.rows)
            kernel = attend.kernel
        entry = JournalEntry(
            decision.backend_name,
            (part_idx, shape),
            partial(_described, shape, decision, kernel),
            is_timed=query.is_cpu or plan.journal.times_accelerators,
        )
        note = entry.add(plan)
    fringe_mask = None if view is None else ready_mask(view.fringe_mask, query)
    if view is not None and fringe_mask is not None:
        num_tokens = common_start - view.fringe_start
        shape = _group_shape(query, part, num_rows, num_tokens, rule)
        described = f"{_sized(shape)} that only some rows still see"
        fringe = (part_idx, shape, "fringe")
        notes_of(plan).add("per_row", fringe, lambda: described, is_timed=False)
    row_map = None
    if group.rows is not None:
        row_map = np.full(plan.num_rows, -1, dtype=np.int64)
        row_map[group.rows] = np.arange(num_rows)
    return PartWork(part_idx, rows, row_map, attend, in_pass, view, fringe_mask, note, entry)


def common_keys(part: PrefixPart, view: PrefixView | None) -> tuple[Tensor, Tensor]:
    """Keys and values that all rows of a part see."""
    num_before = 0 if view is None else view.common_start - part.start
    if not num_before:
        return part.keys, part.values
    return part.keys[:, num_before:], part.values[:, num_before:]


def ready_mask(mask: Tensor | None, query: Tensor) -> SuffixMask | None:
    """A mask as kernels take it, on the device of the query."""
    return None if mask is None else prepare_mask(mask.to(query.device), query.dtype)


def _group_shape(
    query: Tensor, part: PrefixPart, num_rows: int, prefix_len: int, rule: ScoreRule
) -> GroupShape:
    _, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads = part.keys.shape[0]
    return GroupShape(
        num_rows=num_rows,
        q_len=q_len,
        prefix_len=prefix_len,
        num_kv_heads=num_kv_heads,
        gqa_ratio=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=part.keys.element_size(),
        is_capped=rule.softcap is not None,
        dtype=dtype_name(part.keys.dtype),
    )


def notes_of(plan: StepPlan) -> ForwardNotes:
    """What a forward pass notes, whatever the number of layers and kinds."""
    notes: ForwardNotes | None = plan.scratch.get("notes")
    if notes is None:
        notes = plan.scratch["notes"] = ForwardNotes(plan.journal)
    return notes


@cache
def _dispatcher(choice: str) -> Dispatcher:
    return Dispatcher(choice, backends=BACKENDS)


def _described(shape: GroupShape, decision: Decision, kernel: str) -> str:
    predicted = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in decision.predicted_s.items())
    refused = "".join(
        f"; {name} refused: {', '.join(why)}" for name, why in decision.refused.items()
    )
    text = f"{_sized(shape)}, {decision.regime}-bound, predicted per layer: {predicted}{refused}"
    return f"{text}, {kernel}" if kernel else text


def _sized(shape: GroupShape) -> str:
    return f"{counted(shape.num_rows, 'row')} x {counted(shape.q_len, 'token')} over {shape.prefix_len}"
