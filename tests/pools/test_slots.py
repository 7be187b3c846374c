import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_granikv.errors import IntegrityError
from hf_granikv.pools import SlotAllocator


def slots_of(*slots: int) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def allocator_with(num_slots: int, taken: np.ndarray) -> SlotAllocator:
    allocator = SlotAllocator()
    allocator.grow(num_slots)
    assert allocator.try_take(taken)
    return allocator


def test_a_new_allocator_is_empty_and_whole() -> None:
    allocator = SlotAllocator()
    assert (allocator.num_slots, allocator.num_free) == (0, 0)
    allocator.check_integrity(slots_of())


def test_growing_adds_free_slots_and_never_takes_any_away() -> None:
    allocator = allocator_with(4, slots_of(0, 3))
    allocator.grow(10)
    allocator.grow(6)
    assert (allocator.num_slots, allocator.num_free) == (10, 8)


def test_allocating_nothing_gives_nothing() -> None:
    assert SlotAllocator().allocate(0).tolist() == []


def test_the_first_run_that_fits_is_preferred() -> None:
    # free: 1, 3-4, 6-9
    allocator = allocator_with(10, slots_of(0, 2, 5))
    assert allocator.allocate(2).tolist() == [3, 4]
    assert allocator.allocate(3).tolist() == [6, 7, 8]
    assert allocator.allocate(1).tolist() == [1]


def test_without_a_fitting_run_the_longest_runs_are_used() -> None:
    # free: 1, 3-4, 6-8
    allocator = allocator_with(9, slots_of(0, 2, 5))
    assert allocator.allocate(5).tolist() == [6, 7, 8, 3, 4]


def test_a_freed_slot_is_handed_out_before_growth() -> None:
    allocator = allocator_with(4, slots_of(0, 1, 2, 3))
    allocator.free(slots_of(2))
    assert allocator.allocate(1).tolist() == [2]
    assert allocator.num_slots == 4


def test_a_shared_slot_is_free_only_after_its_last_holder() -> None:
    allocator = allocator_with(2, slots_of(0))
    allocator.hold(slots_of(0, 0))
    allocator.free(slots_of(0, 0))
    assert allocator.num_free == 1
    allocator.free(slots_of(0))
    assert allocator.num_free == 2


@pytest.mark.parametrize("wanted", [(0,), (1, 4), (3, 2)], ids=["held", "beyond", "one_held"])
def test_taking_what_is_not_free_changes_nothing(wanted: tuple[int, ...]) -> None:
    allocator = allocator_with(4, slots_of(0, 2))
    assert not allocator.try_take(slots_of(*wanted))
    allocator.check_integrity(slots_of(0, 2))


@pytest.mark.parametrize(
    "claimed",
    [(0,), (0, 1, 1), (0, 1, 2), (0, 9)],
    ids=["lost", "doubled", "freed_while_held", "beyond_the_end"],
)
def test_a_broken_ledger_is_reported(claimed: tuple[int, ...]) -> None:
    allocator = allocator_with(4, slots_of(0, 1))
    with pytest.raises(IntegrityError, match=r"holds sum to 2"):
        allocator.check_integrity(slots_of(*claimed))


def test_freeing_twice_is_reported() -> None:
    allocator = allocator_with(4, slots_of(0, 1))
    allocator.free(slots_of(1))
    allocator.free(slots_of(1))
    with pytest.raises(IntegrityError):
        allocator.check_integrity(slots_of(0))


class SlotWalk(RuleBasedStateMachine):
    """Random takes, holds and frees, against a dictionary of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator()
        self.holds: dict[int, int] = {}

    @property
    def free(self) -> list[int]:
        return [s for s in range(self.allocator.num_slots) if s not in self.holds]

    @rule(extra=st.integers(0, 9))
    def grow(self, extra: int) -> None:
        self.allocator.grow(self.allocator.num_slots + extra)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.free
        count = data.draw(st.integers(0, len(free)))
        slots = self.allocator.allocate(count).tolist()
        assert len(set(slots)) == count
        assert set(slots) <= set(free)
        if any(set(range(s, s + count)) <= set(free) for s in free):
            assert slots == list(range(slots[0], slots[0] + count)) if count else True
        self.holds.update(dict.fromkeys(slots, 1))

    @rule(slots=st.lists(st.integers(0, 12), max_size=5, unique=True))
    def try_take(self, slots: list[int]) -> None:
        is_possible = set(slots) <= set(self.free)
        assert self.allocator.try_take(slots_of(*slots)) == is_possible
        if is_possible:
            self.holds.update(dict.fromkeys(slots, 1))

    @precondition(lambda self: self.allocator.num_slots)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, self.allocator.num_slots - 1), max_size=6))
        self.allocator.hold(slots_of(*slots))
        for slot in slots:
            self.holds[slot] = self.holds.get(slot, 0) + 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        held = [slot for slot, count in sorted(self.holds.items()) for _ in range(count)]
        chosen = data.draw(st.lists(st.sampled_from(range(len(held))), unique=True))
        slots = [held[i] for i in chosen]
        self.allocator.free(slots_of(*slots))
        for slot in slots:
            self.holds[slot] -= 1
        self.holds = {slot: count for slot, count in self.holds.items() if count}

    @invariant()
    def no_slot_is_lost_or_doubled(self) -> None:
        held = [slot for slot, count in self.holds.items() for _ in range(count)]
        self.allocator.check_integrity(slots_of(*held))
        assert self.allocator.num_free == len(self.free)


TestSlotWalk = SlotWalk.TestCase
