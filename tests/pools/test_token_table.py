from itertools import chain

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_granikv.pools import TokenTable


def table_of(*rows: list[int]) -> TokenTable:
    table = TokenTable(len(rows))
    table.append(np.array([len(row) for row in rows]), np.array(list(chain(*rows)), dtype=np.int64))
    return table


def rows_of(table: TokenTable) -> list[list[int]]:
    return [table.row(row).tolist() for row in range(table.num_rows)]


def test_new_slots_go_to_the_rows_in_order() -> None:
    table = table_of([7], [3, 4])
    table.append(np.array([2, 0]), np.array([9, 1]))
    assert rows_of(table) == [[7, 9, 1], [3, 4]]
    assert table.padded().tolist() == [[7, 9, 1], [3, 4, -1]]
    assert table.flat().tolist() == [7, 9, 1, 3, 4]


def test_truncation_names_the_slots_that_rows_gave_up() -> None:
    table = table_of([7, 8, 9], [3, 4])
    assert table.truncate(np.array([2, 0])).tolist() == [8, 9]
    assert rows_of(table) == [[7], [3, 4]]


def test_truncated_slots_do_not_come_back_when_rows_grow_again() -> None:
    table = table_of([7, 8, 9], [3, 4, 5])
    table.truncate(np.array([2, 3]))
    table.append(np.array([1, 2]), np.array([20, 21, 22]))
    assert rows_of(table) == [[7, 20], [21, 22]]
    assert table.padded().tolist() == [[7, 20], [21, 22]]


def test_rows_may_repeat_vanish_and_change_places() -> None:
    table = table_of([7], [3, 4], [])
    table.select([1, 1, 2])
    assert rows_of(table) == [[3, 4], [3, 4], []]


def test_a_copy_is_independent() -> None:
    table = table_of([7], [3, 4])
    twin = table.copy()
    table.append(np.array([1, 1]), np.array([8, 9]))
    table.truncate(np.array([2, 0]))
    assert rows_of(twin) == [[7], [3, 4]]


def test_rows_laid_out_as_runs_continue_in_place() -> None:
    table = table_of([7, 9], [3])
    table.lay_out(table.laid_out(4), 4)
    assert rows_of(table) == [[0, 1], [4]]
    assert table.next_in_place(np.array([2, 3])).tolist() == [2, 3, 5, 6, 7]
    assert table.next_in_place(np.array([1, 1])).tolist() == [2, 5]
    assert table.next_in_place(np.array([0, 0])).tolist() == []


def test_equal_runs_go_on_together_as_far_as_there_is_room() -> None:
    table = table_of([7, 9], [3, 4])
    assert table.run_length is None
    table.lay_out(table.laid_out(4), 4)
    assert table.run_length == 2
    assert table.next_of_runs(3) is None
    slots = table.next_of_runs(2)
    assert slots.tolist() == [[2, 3], [6, 7]]
    table.append_to_runs(slots)
    assert rows_of(table) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert table.next_of_runs(1) is None


def test_runs_of_unequal_length_do_not_go_on_together() -> None:
    table = table_of([7, 9], [3])
    table.lay_out(table.laid_out(4), 4)
    assert (table.run_length, table.next_of_runs(1)) == (None, None)


def test_a_run_without_room_does_not_reach_into_the_next_one() -> None:
    table = table_of([7, 9], [3])
    table.lay_out(table.laid_out(4), 4)
    assert table.next_in_place(np.array([3, 0])) is None


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0], []], ids=str)
def test_rows_that_changed_places_are_no_longer_runs(order: list[int]) -> None:
    table = table_of([7, 9], [3])
    table.lay_out(table.laid_out(4), 4)
    table.select(order)
    assert table.stride is None
    assert table.next_in_place(np.ones(len(order), dtype=np.int64)) is None


def test_rows_that_stayed_in_place_are_still_runs() -> None:
    table = table_of([7, 9], [3])
    table.lay_out(table.laid_out(4), 4)
    table.select([0, 1])
    assert table.stride == 4


def test_an_empty_batch_has_no_slots() -> None:
    table = TokenTable(0)
    assert (table.max_length, table.flat().tolist(), table.padded().shape) == (0, [], (0, 0))


class TableWalk(RuleBasedStateMachine):
    """Random edits, against a list of lists."""

    @initialize(num_rows=st.integers(0, 5))
    def start(self, num_rows: int) -> None:
        self.table = TokenTable(num_rows)
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.next_slot = 0

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        counts = data.draw(
            st.lists(st.integers(0, 9), min_size=len(self.rows), max_size=len(self.rows))
        )
        slots = np.arange(self.next_slot, self.next_slot + sum(counts))
        self.table.append(np.array(counts, dtype=np.int64), slots)
        rest = slots.tolist()
        for row, count in zip(self.rows, counts, strict=True):
            row.extend(rest[:count])
            rest = rest[count:]
        self.next_slot += sum(counts)

    @rule(num_new=st.integers(0, 4))
    def append_to_runs(self, num_new: int) -> None:
        slots = self.table.next_of_runs(num_new)
        if slots is None:
            return
        assert slots.shape == (len(self.rows), num_new)
        following = self.table.next_in_place(np.full(len(self.rows), num_new))
        assert slots.reshape(-1).tolist() == following.tolist()
        self.table.append_to_runs(slots)
        for row, its_slots in zip(self.rows, slots.tolist(), strict=True):
            row.extend(its_slots)
        self.next_slot = max(self.next_slot, int(slots.max()) + 1)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        counts = [data.draw(st.integers(0, len(row))) for row in self.rows]
        dropped = [row[len(row) - count :] for row, count in zip(self.rows, counts, strict=True)]
        got = self.table.truncate(np.array(counts, dtype=np.int64))
        assert got.tolist() == list(chain(*dropped))
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = range(len(self.rows))
        order = data.draw(st.lists(st.sampled_from(rows), max_size=6)) if rows else []
        self.table.select(order)
        self.rows = [list(self.rows[i]) for i in order]

    @rule(extra=st.integers(0, 5))
    def lay_out(self, extra: int) -> None:
        stride = max(map(len, self.rows), default=0) + extra
        self.table.lay_out(self.table.laid_out(stride), stride)
        self.rows = [
            list(range(i * stride, i * stride + len(row))) for i, row in enumerate(self.rows)
        ]
        self.next_slot = max(self.next_slot, len(self.rows) * stride)

    @rule()
    def copy(self) -> None:
        self.table = self.table.copy()

    @invariant()
    def the_table_lists_what_rows_own(self) -> None:
        table, longest = self.table, max(map(len, self.rows), default=0)
        assert rows_of(table) == self.rows
        assert table.lengths.tolist() == [len(row) for row in self.rows]
        assert table.flat().tolist() == list(chain(*self.rows))
        assert table.padded().tolist() == [row + [-1] * (longest - len(row)) for row in self.rows]

    @invariant()
    def the_next_slots_of_a_run_are_no_ones(self) -> None:
        counts = np.ones(len(self.rows), dtype=np.int64)
        following = self.table.next_in_place(counts)
        if following is not None and len(following):
            assert not set(following.tolist()) & set(self.table.flat().tolist())


TestTableWalk = TableWalk.TestCase
