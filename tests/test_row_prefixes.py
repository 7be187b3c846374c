from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedModel
from trees import READ, planted

from hf_granikv.row_prefixes import NO_ROWS, RowPrefixes, repeated

Change = Callable[[RowPrefixes], RowPrefixes]

CHANGES: dict[str, Change] = {
    "seeing": lambda reads: reads.seeing(np.arange(reads.num_rows)),
    "shortened": lambda reads: reads.shortened(5),
    "shortened_by_nothing": lambda reads: reads.shortened(0),
    "selected": lambda reads: reads.selected(np.array([4, 6, 4])),
    "selected_as_they_are": lambda reads: reads.selected(np.arange(reads.num_rows)),
    "selected_none": lambda reads: reads.selected(np.arange(0)),
    "joined": lambda reads: reads.joined(reads.leaves[1], 99),
    "exchanged": lambda reads: reads.exchanged({reads.leaves[1]: reads.leaves[2]}),
    "repeated": lambda reads: repeated(reads, 2 * reads.num_rows),
    "no_rows": lambda reads: NO_ROWS,
}


def told_by(reads: RowPrefixes) -> tuple[object, ...]:
    """All that rows tell of themselves."""
    return (
        *(reads.longest, reads.is_even, reads.chain_lengths.tolist()),
        *(reads.longest_chain, reads.shortest_chain, reads.column_of_prefix().tolist()),
        [
            (its.prefix, its.group.depth, its.group.start, its.group.stop)
            for its in reads.readings()
        ],
        [None if its.group.rows is None else its.group.rows.tolist() for its in reads.readings()],
    )


@pytest.mark.parametrize("name", CHANGES)
def test_rows_made_of_others_tell_of_themselves(
    tiny_model: Callable[..., PreTrainedModel], name: str
) -> None:
    """What is worked out once belongs to the rows that it was worked out for."""
    _, held = planted(tiny_model("llama"))
    reads = RowPrefixes.whole([held.get(name) for name in READ])
    before = told_by(reads)
    changed = CHANGES[name](reads)
    lengths = changed.lengths.tolist()
    told = told_by(changed)
    assert told == told_by(RowPrefixes(changed.leaves, changed.lengths.copy()))
    assert told[:2] == (max(lengths, default=0), len(set(lengths)) <= 1)
    assert told[2] == [0 if leaf is None else leaf.stop for leaf in changed.leaves]
    assert told_by(reads) == before


def test_rows_that_see_more_and_less_of_one_prefix_change_places(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    _, held = planted(tiny_model("llama"))
    leaf = held.get(next(name for name in READ if name is not None))
    reads = RowPrefixes((leaf, leaf), np.array([5, 7]))
    assert reads.selected(np.array([1, 0])).lengths.tolist() == [7, 5]
    assert reads.selected(np.array([0, 1])) is reads
