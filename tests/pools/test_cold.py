from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools import ColdPool

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 3
# tokens are told apart by the rest, copies of one token by the multiple
OF_COPY = 4096
TOKEN_BYTES = 2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * 4

Rows = list[list[int]]


def planted(token_ids: list[int] | np.ndarray, layer_idx: int) -> Tensor:
    """Gives `[num_tokens, heads, head_dim]` numbers that tell token, layer, head and place."""
    place = torch.arange(NUM_HEADS * HEAD_DIM).view(NUM_HEADS, HEAD_DIM) / 16
    tokens = torch.tensor(np.array(token_ids) % OF_COPY, dtype=torch.float32)
    return tokens.view(-1, 1, 1) + place + OF_COPY * layer_idx


@dataclass
class PlantedPool:
    """A pool beside a list of what each row must read."""

    pool: ColdPool
    rows: Rows = field(default_factory=list)
    next_token: int = 1
    num_copies: int = 0

    def begin(self, num_rows: int) -> None:
        self.pool.begin(num_rows)
        self.rows = [[] for _ in range(num_rows)]

    def write(self, owned: np.ndarray, *, num_layers: int = NUM_LAYERS) -> None:
        """Stores a new token wherever `owned` is True; every other column is NaN."""
        token_ids = np.full(owned.shape, np.nan)
        new = np.arange(self.next_token, self.next_token + owned.sum())
        token_ids[owned] = new
        source = None if owned.all() else np.flatnonzero(owned)
        counts = owned.shape[1] if source is None else owned.sum(1)
        write = self.pool.extend(counts, source)
        for layer_idx in range(num_layers):
            keys = planted(token_ids.reshape(-1), layer_idx).view(*owned.shape, NUM_HEADS, HEAD_DIM)
            self.pool.write(layer_idx, write, keys.transpose(1, 2), -keys.transpose(1, 2))
        self.next_token += len(new)
        for row, row_ids in enumerate(token_ids):
            self.rows[row] += [int(t) for t in row_ids[~np.isnan(row_ids)]]

    def append(self, *counts: int) -> None:
        """Stores `counts[i]` new tokens per row, behind pads where rows differ."""
        self.write(np.arange(max(counts)) >= max(counts) - np.array(counts)[:, None])

    def truncate(self, counts: list[int]) -> None:
        self.pool.truncate(np.array(counts, dtype=np.int64))
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, counts, strict=True)]

    def select(self, order: list[int]) -> None:
        self.pool.select(order)
        self.rows = [list(self.rows[i]) for i in order]

    def leave(self, row: int) -> tuple[list[Any], list[int]]:
        """Takes a row out, the last one taking its place; gives what it held."""
        taken, tokens = self.pool.take_row(row), self.rows[row]
        self.pool.remove_row(row)
        self.rows[row] = self.rows[-1]
        self.rows = self.rows[:-1]
        return taken, tokens

    def join(self, taken: list[Any], tokens: list[int]) -> None:
        self.pool.add_row(taken, len(tokens))
        self.num_copies += 1
        self.rows.append([token % OF_COPY + OF_COPY * self.num_copies for token in tokens])

    def fork(self) -> "PlantedPool":
        rows = [list(row) for row in self.rows]
        return PlantedPool(self.pool.copy(), rows, self.next_token, self.num_copies)

    def check(self) -> None:
        self.pool.check_integrity()
        table, live = self.pool.table, {token for row in self.rows for token in row}
        assert table.lengths.tolist() == [len(row) for row in self.rows]
        assert self.pool.num_tokens == len(live)
        owners = {
            (slot, token)
            for i, row in enumerate(self.rows)
            for slot, token in zip(table.row(i).tolist(), row, strict=True)
        }
        # one slot per token and one token per slot: none is doubled or seen by a stranger
        assert len(owners) == len(live) == len({slot for slot, _ in owners})
        if live:
            self.check_content(0)
            self.check_content(NUM_LAYERS - 1)

    def check_content(self, layer_idx: int) -> None:
        keys, values = self.pool.read(layer_idx)
        longest = max(map(len, self.rows))
        assert keys.shape == values.shape == (len(self.rows), NUM_HEADS, longest, HEAD_DIM)
        # weights of hidden tokens are zero, and zero times NaN is NaN
        assert keys.isfinite().all()
        assert values.isfinite().all()
        for row, expected in enumerate(self.rows):
            want = planted(expected, layer_idx).transpose(0, 1)
            assert torch.equal(keys[row, :, : len(expected)], want)
            assert torch.equal(values[row, :, : len(expected)], -want)


def pool_of(*lengths: int, limit: int | None = None) -> PlantedPool:
    held = PlantedPool(ColdPool(NUM_LAYERS, limit=limit))
    held.begin(len(lengths))
    held.append(*lengths)
    return held


def rows_in(pool: ColdPool) -> Rows:
    return [pool.table.row(row).tolist() for row in range(pool.table.num_rows)]


def storage_ptr(held: PlantedPool) -> int:
    return held.pool.read(0)[0].untyped_storage().data_ptr()


def test_rows_of_similar_length_are_read_without_a_gather() -> None:
    held = pool_of(5, 7, 6)
    first, second = held.pool.read(0)[0], held.pool.read(0)[0]
    assert first.data_ptr() == second.data_ptr()
    assert held.pool.num_bytes == 4 * first.untyped_storage().nbytes() + held.pool.table.nbytes


def test_pads_own_no_slot() -> None:
    held = pool_of(5, 1, 3)
    assert held.pool.num_tokens == 9
    held.check()


def test_pads_are_read_as_zeros_whatever_other_rows_hold() -> None:
    held = pool_of(5, 1, 1000)
    for storage in held.pool.storage(0) or ():
        storage[:, held.pool.table.row(0)] = torch.nan

    for read in held.pool.read(0):
        assert read[0, :, :5].isnan().all()
        assert read[1, :, 1:].eq(0).all()
        assert read[1:].isfinite().all()


def test_one_long_row_does_not_make_the_others_hold_its_length() -> None:
    held = pool_of(1000, 1, 1, 1, 1, 1, 1, 1)
    held.check()
    assert held.pool.num_slots < 1100


def test_rows_grow_in_place_while_there_is_room() -> None:
    held = pool_of(4, 4)
    before = storage_ptr(held)
    held.append(1, 1)
    held.append(3, 2)
    assert storage_ptr(held) == before
    held.check()


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (0, 0)], ids=["equal", "ragged", "empty"])
def test_one_number_for_all_rows_is_that_of_each(lengths: tuple[int, int], num_new: int) -> None:
    by_rows, at_once = pool_of(*lengths).pool, pool_of(*lengths).pool
    for _ in range(5):  # past the end of the runs
        want = by_rows.extend(np.full(2, num_new), None)
        got = at_once.extend(num_new, None)
        assert (got.slots.tolist(), got.start) == (want.slots.tolist(), want.start)
        assert rows_in(at_once) == rows_in(by_rows)
        at_once.check_integrity()


def test_rows_that_get_nothing_stay_as_they_are() -> None:
    pool = pool_of(4, 4).pool
    before = rows_in(pool)
    assert pool.extend(0, None).slots.tolist() == []
    assert rows_in(pool) == before
    pool.check_integrity()


def test_equal_runs_without_a_free_slot_behind_them_move() -> None:
    held = pool_of(4, 4)
    # a slot behind the second row, as if another row held it
    taken = held.pool.table.next_in_place(np.array([0, 1]))
    assert held.pool._allocator.try_take(taken)
    write = held.pool.extend(1, None)
    assert not set(write.slots.tolist()) & set(taken.tolist())


def test_growth_is_amortised() -> None:
    held, sizes = pool_of(1, 1), set()
    for _ in range(2000):
        held.append(1, 1)
        sizes.add(held.pool.num_slots)
    held.check()
    assert len(sizes) < 60
    assert held.pool.num_slots <= 2 * 2001 * 9 / 8


def test_scattered_growth_is_amortised() -> None:
    held, sizes = pool_of(1, 1), set()
    held.select([1, 0])
    for _ in range(500):
        held.append(1, 1)
        sizes.add(held.pool.num_slots)
    held.check()
    assert len(sizes) < 60
    assert held.pool.num_slots < 2 * 501 * 1.2


def test_reordering_copies_nothing() -> None:
    held = pool_of(4, 4, 4)
    before, num_bytes = storage_ptr(held), held.pool.num_bytes - held.pool.table.nbytes
    storages = [held.pool.storage(i)[0].untyped_storage().data_ptr() for i in range(NUM_LAYERS)]
    held.select([2, 2, 0])
    assert [
        held.pool.storage(i)[0].untyped_storage().data_ptr() for i in range(NUM_LAYERS)
    ] == storages
    assert storages[0] == before
    assert held.pool.num_bytes - held.pool.table.nbytes == num_bytes
    held.check()


def test_beams_share_slots_until_they_differ() -> None:
    held = pool_of(6)
    held.select([0, 0, 0])
    assert held.pool.num_tokens == 6
    held.append(1, 1, 1)
    assert held.pool.num_tokens == 9
    held.select([1, 1, 1])
    assert held.pool.num_tokens == 7
    held.check()


def test_slots_of_dropped_beams_serve_the_next_tokens() -> None:
    held = pool_of(6)
    held.select([0, 0, 0])
    held.append(1, 1, 1)
    num_slots = held.pool.num_slots
    for best in (0, 2, 1, 0, 2, 1):
        held.select([best] * 3)
        held.append(1, 1, 1)
    assert held.pool.num_slots <= num_slots * 1.125 + 1
    held.check()


def test_truncated_slots_are_free_at_once() -> None:
    held = pool_of(6, 6)
    num_slots = held.pool.num_slots
    held.truncate([4, 0])
    assert held.pool.num_tokens == 8
    held.append(4, 0)
    assert held.pool.num_slots == num_slots
    held.check()


def test_starting_a_batch_frees_the_one_before() -> None:
    held = pool_of(9, 9)
    num_slots = held.pool.num_slots
    held.begin(2)
    assert held.pool.num_tokens == 0
    held.append(9, 9)
    assert held.pool.num_slots == num_slots
    held.check()


def test_release_gives_the_memory_back() -> None:
    held = pool_of(9, 9)
    held.pool.release()
    held.rows = []
    assert (held.pool.num_slots, held.pool.num_bytes, held.pool.peak_bytes) == (0, 0, 0)
    held.check()


def test_a_token_costs_its_keys_and_values_in_every_layer() -> None:
    assert pool_of(3).pool.bytes_per_token == TOKEN_BYTES


@pytest.mark.parametrize(
    "lengths",
    [(4, 4, 4), (10, 1, 1), (1, 10, 1), (12, 0, 0)],
    ids=lambda ls: "-".join(map(str, ls)),
)
def test_a_limit_can_be_used_to_the_last_slot(lengths: tuple[int, ...]) -> None:
    held = pool_of(*lengths, limit=12)
    held.check()
    assert held.pool.num_slots == held.pool.num_tokens == 12


def test_a_full_pool_says_so_before_it_changes_anything() -> None:
    held = pool_of(5, 3, limit=10)
    pool, before = held.pool, (storage_ptr(held), held.pool.num_bytes, held.pool.num_slots)
    with pytest.raises(ColdPoolFullError, match=r"2 free slots of cold_slots=10, 3 needed; raise"):
        held.append(1, 2)
    assert (storage_ptr(held), pool.num_bytes, pool.num_slots) == before
    held.check()
    held.append(2, 0)
    held.check()


def test_room_is_reckoned_without_the_rows_that_are_replaced() -> None:
    pool = pool_of(5, 3, limit=10).pool
    pool.check_room(10, replacing=True)
    with pytest.raises(ColdPoolFullError, match="10 free slots of cold_slots=10, 11 needed"):
        pool.check_room(11, replacing=True)


def test_rows_that_come_and_go_stay_runs() -> None:
    held = pool_of(5, 9, 3, 7)
    parked = held.leave(1)
    assert held.pool.table.stride is not None, "the last row took its place"
    held.check()
    held.append(1, 1, 1)
    held.join(*parked)
    assert held.pool.table.stride is not None
    held.check()
    held.select([3, 0])
    assert held.pool.table.stride is None
    held.pool.tidy()
    assert held.pool.table.stride is not None
    held.append(1, 1)
    held.check()


class ColdWalk(RuleBasedStateMachine):
    """Random life of a pool; forks stay under watch while the walk goes on with one of them."""

    @initialize(limit=st.one_of(st.none(), st.integers(1, 80)), num_rows=st.integers(1, 5))
    def start(self, limit: int | None, num_rows: int) -> None:
        self.held = PlantedPool(ColdPool(NUM_LAYERS, limit=limit))
        self.held.begin(num_rows)
        self.others: list[PlantedPool] = []
        self.parked: list[tuple[list[Any], list[int]]] = []

    @rule(num_rows=st.integers(1, 6))
    def begin_again(self, num_rows: int) -> None:
        self.held.begin(num_rows)

    @precondition(lambda self: self.held.rows)
    @rule(data=st.data(), q_len=st.sampled_from([1, 1, 2, 5, 20]))
    def write(self, data: st.DataObject, q_len: int) -> None:
        size = len(self.held.rows) * q_len
        is_even = data.draw(st.booleans())
        bits = [True] * size
        if not is_even:
            bits = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        owned = np.array(bits).reshape(-1, q_len)
        limit, live = self.held.pool.limit, self.held.pool.num_tokens
        if limit is None or live + owned.sum() <= limit:
            num_layers = data.draw(st.sampled_from([NUM_LAYERS] * 4 + [1]))
            self.held.write(owned, num_layers=num_layers)
            if num_layers < NUM_LAYERS:
                self.held.truncate(owned.sum(1).tolist())
        else:
            with pytest.raises(ColdPoolFullError):
                self.held.write(owned)

    @precondition(lambda self: self.held.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        self.held.truncate([data.draw(st.integers(0, len(row))) for row in self.held.rows])

    @precondition(lambda self: self.held.rows)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = st.sampled_from(range(len(self.held.rows)))
        self.held.select(data.draw(st.lists(rows, min_size=1, max_size=6)))

    @precondition(lambda self: self.held.rows)
    @rule(data=st.data(), comes_back=st.booleans())
    def leave(self, data: st.DataObject, comes_back: bool) -> None:
        parked = self.held.leave(data.draw(st.sampled_from(range(len(self.held.rows)))))
        if comes_back or not self.held.rows:
            self.held.join(*parked)
        else:
            self.parked.append(parked)

    @precondition(lambda self: self.parked)
    @rule()
    def join(self) -> None:
        parked = self.parked.pop()
        limit, live = self.held.pool.limit, self.held.pool.num_tokens
        if limit is None or live + len(parked[1]) <= limit:
            self.held.join(*parked)
        else:
            with pytest.raises(ColdPoolFullError):
                self.held.join(*parked)

    @precondition(lambda self: self.held.rows)
    @rule()
    def tidy(self) -> None:
        self.held.pool.tidy()

    @rule(share=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def shrink(self, share: float) -> None:
        before, num_tokens = self.held.pool.num_slots, self.held.pool.num_tokens
        wanted = max(int(before * share), num_tokens)
        self.held.pool.shrink(wanted)
        assert self.held.pool.num_slots <= min(before, wanted)

    @rule()
    def fork(self) -> None:
        self.others = [*self.others[-2:], self.held.fork()]

    @precondition(lambda self: self.others)
    @rule()
    def go_on_with_another(self) -> None:
        self.held, *self.others = [*self.others, self.held]

    @rule()
    def release(self) -> None:
        self.held.pool.release()
        self.held.rows = []
        assert self.held.pool.num_bytes == 0

    @invariant()
    def every_row_reads_exactly_its_own_tokens(self) -> None:
        self.held.check()
        pool = self.held.pool
        assert pool.limit is None or pool.num_slots <= pool.limit
        # what is there is what is said, in every layer that has written
        of_slots = pool.num_slots * pool.bytes_per_token
        assert pool.num_bytes - pool.table.nbytes == of_slots

    @invariant()
    def forks_are_untouched(self) -> None:
        for other in self.others:
            other.check()


TestColdWalk = ColdWalk.TestCase
