"""The trie over a batch, against a search by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_granikv.shared_prefix import SharedPrefix, shared_prefixes

# few tokens, so that rows meet; one beyond a byte, one beyond 32 bits
TOKEN = st.sampled_from([0, 1, 255, 256, 2**33])
ROWS = st.lists(st.lists(TOKEN, max_size=6), max_size=7)


def found(rows: list[list[int]]) -> list[SharedPrefix]:
    return shared_prefixes([np.array(row, dtype=np.int64) for row in rows])


def common_head(row: list[int], other: list[int]) -> list[int]:
    return next(row[:n] for n in range(len(row), -1, -1) if row[:n] == other[:n])


def by_hand(rows: list[list[int]]) -> set[SharedPrefix]:
    """Every pair's common head, and all rows that begin with it."""
    nodes = set()
    for i, row in enumerate(rows):
        for other in rows[:i]:
            head = common_head(row, other)
            members = tuple(k for k, any_row in enumerate(rows) if any_row[: len(head)] == head)
            nodes.add(SharedPrefix(len(head), members))
    return {node for node in nodes if node.num_tokens}


@given(ROWS)
def test_the_trie_is_what_a_search_over_all_pairs_finds(rows: list[list[int]]) -> None:
    nodes = found(rows)
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == by_hand(rows)


@given(ROWS)
def test_nodes_come_with_most_rows_first(rows: list[list[int]]) -> None:
    sizes = [(len(node.rows), node.num_tokens) for node in found(rows)]
    assert sizes == sorted(sizes, reverse=True)


@given(ROWS, st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[list[int]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = found([rows[i] for i in order])
    back = {SharedPrefix(n.num_tokens, tuple(sorted(order[i] for i in n.rows))) for n in moved}
    assert back == set(found(rows))


@pytest.mark.parametrize("rows", [[], [[5, 6, 7]], [[], []], [[1], [2], [3]]])
def test_nothing_is_found_where_nothing_is_shared(rows: list[list[int]]) -> None:
    assert found(rows) == []


def test_equal_rows_share_all_of_themselves() -> None:
    assert found([[4, 5, 6]] * 3) == [SharedPrefix(3, (0, 1, 2))]


def test_a_row_may_end_where_others_go_on() -> None:
    nodes = found([[7, 8, 9, 1], [7, 8], [7, 8, 9, 2]])
    assert nodes == [SharedPrefix(2, (0, 1, 2)), SharedPrefix(3, (0, 2))]


def test_rows_that_part_one_by_one_need_no_recursion() -> None:
    rows = [[1] * length for length in range(1, 3001)]
    assert len(found(rows)) == 2999
