"""Pools that grow, shrink and lay their rows out anew, and what they hold meanwhile."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from test_cold import HEAD_DIM, NUM_HEADS, NUM_LAYERS, TOKEN_BYTES, pool_of
from token_bytes import TokenBytes, tensor_bytes
from torch import Tensor

from hf_granikv.pools.run_spread import RunSpread
from hf_granikv.pools.slot_moves import SlotMoves


def test_slots_are_given_back_to_the_last_one() -> None:
    held = pool_of(9, 3, 7)
    held.truncate([5, 1, 0])
    held.pool.shrink(0)
    assert held.pool.num_slots == held.pool.num_tokens == 13
    held.check()
    assert held.pool.num_bytes == 13 * TOKEN_BYTES + held.pool.table.nbytes
    held.append(2, 0, 1)
    held.check()


def test_rows_stay_runs_where_they_fit_into_fewer_slots() -> None:
    held = pool_of(20, 19, 20)
    parked = held.leave(1)
    stride = held.pool.table.stride
    held.pool.shrink(2 * stride + 1)
    assert (held.pool.num_slots, held.pool.table.stride) == (2 * stride + 1, stride)
    held.pool.shrink(45)
    assert (held.pool.num_slots, held.pool.table.stride) == (44, 22)
    held.check()
    held.join(*parked)
    held.check()


def test_shared_slots_stay_shared_where_slots_are_given_back() -> None:
    held = pool_of(6, 6)
    held.select([1, 1, 1])
    held.append(1, 1, 1)
    held.pool.shrink(0)
    assert held.pool.num_slots == held.pool.num_tokens == 9
    held.check()


def test_a_pool_that_most_have_left_gives_back_what_they_had() -> None:
    held, sizes = pool_of(*[100] * 8), []
    for _ in range(7):
        held.leave(0)
        held.pool.tidy()
        held.check()
        sizes.append(held.pool.num_slots)
    assert sizes[-1] <= 150
    # seldom, and each time to half at most
    changes = [(a, b) for a, b in itertools.pairwise(sizes) if a != b]
    assert len(changes) <= 3
    assert all(b <= a / 2 for a, b in changes)


def test_coming_and_going_at_the_edge_does_not_change_the_size_each_time() -> None:
    held, sizes = pool_of(*[50] * 4), set()
    for _ in range(50):
        parked = held.leave(0)
        held.pool.tidy()
        held.append(*[1] * 3)
        held.join(*parked)
        held.pool.tidy()
        held.check()
        sizes.add(held.pool.num_slots)
    assert len(sizes) <= 10


def test_a_lent_row_is_found_where_it_lies_now() -> None:
    held, other = pool_of(10, 10), pool_of(3)
    held.select([1, 0])
    held.truncate([0, 6])
    lent = held.pool.lend_row(0)
    held.pool.shrink(0)
    other.join(lent, held.rows[0])
    other.check()
    held.check()


def test_a_row_that_joins_has_no_run_where_the_limit_leaves_none() -> None:
    """Its tokens would fit where its run would begin, and that run would end behind the pool."""
    held = pool_of(10, 4)
    parked = held.leave(1)
    stride = held.pool.table.stride
    held.pool.shrink(stride)
    held.pool.limit = stride + 6
    held.join(*parked)
    held.check()
    held.append(1, 1)
    held.check()


def test_rows_are_not_made_runs_again_for_a_single_token() -> None:
    """Under a limit that leaves no room to grow they would be scattered again at once."""
    held = pool_of(10, 10, limit=24)
    held.select([1, 0])
    held.pool.tidy()
    assert held.pool.table.stride is None
    held.pool.limit = 36
    held.pool.tidy()
    assert held.pool.table.stride == 18
    held.check()


@pytest.mark.parametrize("change", ["grow", "lay out", "shrink", "compact"])
def test_one_tensor_at_a_time_is_there_twice(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    seen = TokenBytes(monkeypatch)
    held = pool_of(40, 40)
    if change in ("grow", "compact"):
        held.select([1, 0])
    before = held.pool.num_slots
    seen.start()
    if change in ("grow", "lay out"):
        held.append(30, 30)
        largest = held.pool.num_slots
        assert largest > before
    else:
        held.truncate([30, 30])
        held.pool.shrink(25)
        largest = before
        assert held.pool.num_slots <= 25
    held.check()
    one_tensor = tensor_bytes(NUM_HEADS, largest, HEAD_DIM)
    assert seen.peak <= 2 * NUM_LAYERS * one_tensor + one_tensor


@pytest.mark.parametrize("at", range(2 * 2 * NUM_LAYERS))
@pytest.mark.parametrize("lengths", [(100, 100), (110, 90), (5, 4)], ids=["even", "runs", "index"])
def test_an_interrupted_move_leaves_tokens_where_they_were(
    monkeypatch: pytest.MonkeyPatch, at: int, lengths: tuple[int, int]
) -> None:
    """Every tensor is read once and written once; one of these is broken off half-way."""
    held, num_calls = pool_of(*lengths), 0
    held.select([1, 0])

    def breaking(verb: Any) -> Any:
        def run(self: SlotMoves, tensor: Tensor, side: int) -> None:
            nonlocal num_calls
            num_calls += 1
            target = tensor if verb is put else self._buffer(tensor)
            before, half = target.clone(), target.shape[1] // 2
            verb(self, tensor, side)
            if num_calls == at + 1:
                target[:, half:] = before[:, half:]
                raise KeyboardInterrupt

        return run

    put = SlotMoves._put
    with monkeypatch.context() as patch:
        patch.setattr(SlotMoves, "_take", breaking(SlotMoves._take))
        patch.setattr(SlotMoves, "_put", breaking(put))
        with pytest.raises(KeyboardInterrupt):
            held.pool.tidy()
    held.check()
    held.pool.tidy()
    held.check()


@pytest.mark.parametrize("at", range(2 * NUM_LAYERS))
@pytest.mark.parametrize("is_written", [False, True])
def test_rows_are_where_they_were_if_moving_them_apart_breaks_off(
    monkeypatch: pytest.MonkeyPatch, at: int, is_written: bool
) -> None:
    held, copy, num_calls = pool_of(20, 3, 20), RunSpread.copy, 0

    def breaking(self: RunSpread, storage: Tensor, larger: Tensor) -> None:
        nonlocal num_calls
        if num_calls != at or is_written:
            copy(self, storage, larger)
        num_calls += 1
        if num_calls == at + 1:
            raise MemoryError

    room = held.pool.table.stride - 20
    with monkeypatch.context() as patch:
        patch.setattr(RunSpread, "copy", breaking)
        with pytest.raises(MemoryError):
            held.pool.extend(np.array([room + 1, 0, 0]), None)
    held.check()
    held.append(room + 1, 0, 2)
    held.check()


def test_moving_apart_that_breaks_off_leaves_no_storage_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows had left, so that the others would have done with fewer slots than there were."""
    held, copy, num_calls = pool_of(*[16] * 6), RunSpread.copy, 0
    for _ in range(2):
        held.leave(0)
    room = held.pool.table.stride - 16

    def breaking(self: RunSpread, storage: Tensor, larger: Tensor) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise MemoryError
        copy(self, storage, larger)

    with monkeypatch.context() as patch:
        patch.setattr(RunSpread, "copy", breaking)
        with pytest.raises(MemoryError):
            held.pool.extend(np.full(4, room + 1), None)
    assert num_calls == 3
    assert all(t.shape[1] >= held.pool.num_slots for t in held.pool._storage._tensors())
    held.check()
    held.append(*[room + 1] * 4)
    held.check()


def test_a_row_joins_that_is_longer_than_runs_are_apart() -> None:
    """Its run would begin behind the last slot, and is there to be filled all the same."""
    held = pool_of(30, 4)
    parked = held.leave(0)
    held.pool.shrink(0)
    assert held.pool.table.stride == held.pool.num_slots == 4
    held.join(*parked)
    held.check()
    held.append(1, 9)
    held.check()


def test_rows_that_grow_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = pool_of(20, 3, 20)
    monkeypatch.setattr(SlotMoves, "__init__", lambda *args: pytest.fail("moved once more"))
    for _ in range(60):
        held.append(1, 1, 1)
    held.check()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([0, 1, 2, 10, 11, 12], [0, 1, 2, 5, 6, 7]),
        ([10, 11, 12, 0, 1, 2], [0, 1, 2, 5, 6, 7]),
        ([*range(100), *range(150, 300)], [*range(120, 220), *range(20, 120), *range(250, 300)]),
        ([7, 3, 5], [3, 5, 7]),
        ([4], [0]),
    ],
    ids=["even", "crossing", "runs", "cycle", "one"],
)
def test_tokens_move_whatever_the_pattern(src: list[int], dst: list[int]) -> None:
    tensors = [torch.randn(2, 300, 3), torch.randn(1, 300, 5).bfloat16()]
    wanted = [t.clone() for t in tensors]
    for want, tensor in zip(wanted, tensors, strict=True):
        want[:, dst] = tensor[:, src]
    SlotMoves(np.array(src), np.array(dst), tensors).run()
    assert all(map(torch.equal, tensors, wanted))
