"""How pools share bytes: everybody gets what it needs, and nobody more than there is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools.budget import Need, PoolBudget, shared_out

needs = st.lists(st.builds(Need, st.integers(0, 200), st.integers(0, 150)), max_size=6)


@given(needs, st.integers(0, 600))
def test_needs_are_met_within_what_there_is(asked, num_slots):
    if sum(need.num_tokens for need in asked) > num_slots:
        with pytest.raises(ColdPoolFullError, match=f"{num_slots} fit in what the budget leaves"):
            shared_out(num_slots, asked)
        return
    grants = shared_out(num_slots, asked)
    for need, grant in zip(asked, grants, strict=True):
        assert grant.num_kept <= need.num_slots
        assert need.num_tokens <= grant.limit
        assert grant.num_kept <= grant.limit
    assert sum(grant.limit for grant in grants) <= num_slots


@given(needs)
def test_nothing_is_taken_away_while_there_is_enough(asked):
    num_slots = sum(map(max, asked))
    grants = shared_out(num_slots, asked)
    assert [grant.num_kept for grant in grants] == [need.num_slots for need in asked]


def test_a_little_room_is_taken_last():
    # 40 slots free, of which 10 are needed: an eighth of the tokens stays free
    kept = shared_out(150, [Need(140, 100), Need(0, 10)])[0]
    assert kept.num_kept == 140
    kept = shared_out(125, [Need(140, 100), Need(0, 10)])[0]
    assert kept.num_kept == 112
    kept = shared_out(110, [Need(140, 100), Need(0, 10)])[0]
    assert kept.num_kept == kept.limit == 100


@given(st.integers(1, 10**6), st.integers(2, 400), st.integers(1, 200), st.integers(0, 5000))
def test_what_is_there_twice_is_within_the_bytes(max_bytes, half, largest, per_row):
    budget = PoolBudget(max_bytes, 2 * half, min(half, largest), per_row)
    num_slots = budget.room_bytes // budget.bytes_per_token
    assert budget.room_bytes + num_slots * budget.largest_bytes_per_token <= max_bytes
    assert budget.num_tokens * budget.bytes_per_token <= budget.room_bytes
    assert budget.tokens_per_row * budget.bytes_per_token >= per_row


@given(st.integers(1, 500), st.integers(2, 400), st.integers(1, 200))
def test_the_least_bytes_for_tokens_are_found(num_tokens, half, largest):
    sizes = PoolBudget(0, 2 * half, min(half, largest))
    least = sizes.bytes_for(num_tokens)
    assert replace(sizes, max_bytes=least).num_tokens == num_tokens
    assert replace(sizes, max_bytes=least - 1).num_tokens < num_tokens
