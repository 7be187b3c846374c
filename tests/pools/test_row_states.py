import numpy as np
import pytest
import torch
from torch import Tensor

from hf_granikv.errors import IntegrityError, TornStateError
from hf_granikv.pools import RowStates
from hf_granikv.pools.row_states import LayerStates, StateKey

CONV, RECURRENT = StateKey("conv_states", 0), StateKey("recurrent_states", 0)


class Layer:
    def __init__(self) -> None:
        self.held: dict[StateKey, Tensor] = {}

    def states(self) -> dict[StateKey, Tensor]:
        return dict(self.held)

    def load(self, states: LayerStates) -> None:
        self.held = dict(states)


def stored() -> list[LayerStates]:
    return [
        {CONV: torch.randn(1, 6, 4), RECURRENT: torch.randn(1, 2, 3, 5)},
        {CONV: torch.ones(1, 2, 4)},
    ]


@pytest.fixture
def layers() -> list[Layer]:
    return [Layer(), Layer()]


@pytest.fixture
def rows(layers: list[Layer]) -> RowStates:
    return RowStates(layers)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_each_row_starts_from_a_copy_of_its_own(
    rows: RowStates, layers: list[Layer], num_rows: int
) -> None:
    origin = stored()
    before = [{key: t.clone() for key, t in layer.items()} for layer in origin]
    rows.begin(origin, num_rows)
    for layer, want in zip(layers, before, strict=True):
        assert layer.held.keys() == want.keys()
        for key, state in layer.held.items():
            assert torch.equal(state, want[key].repeat(num_rows, *[1] * (state.ndim - 1)))
            state[0] += 1
            assert num_rows == 1 or not torch.equal(state[0], state[1])
    for layer, want in zip(origin, before, strict=True):
        assert all(torch.equal(t, want[key]) for key, t in layer.items())


def test_bytes_are_those_of_the_rows_and_gone_with_them(rows: RowStates) -> None:
    assert rows.num_bytes == 0
    rows.begin(stored(), 3)
    assert rows.num_bytes == 3 * 4 * (24 + 30 + 8)
    rows.select(np.array([1]))
    assert rows.num_bytes == 4 * (24 + 30 + 8)
    rows.release()
    assert rows.num_bytes == 0


def test_rows_that_start_empty_have_no_states(rows: RowStates, layers: list[Layer]) -> None:
    rows.begin(stored(), 2)
    rows.begin((), 2)
    assert [layer.held for layer in layers] == [{}, {}]


def of_rows(layers: list[Layer], *rows: list[LayerStates]) -> bool:
    """Whether the layers hold the states of these rows, in their order."""
    return all(
        torch.equal(state, torch.cat([row[i][key] for row in rows]))
        for i, layer in enumerate(layers)
        for key, state in layer.held.items()
    )


def test_rows_join_and_leave_in_place(rows: RowStates, layers: list[Layer]) -> None:
    first, second, third, fourth = (stored() for _ in range(4))
    for row in (first, second, third):
        rows.add_row(row)
    assert of_rows(layers, first, second, third)
    rows.check_integrity(3)
    rows.remove_row(0)
    assert of_rows(layers, third, second)
    places = [t.data_ptr() for layer in layers for t in layer.held.values()]
    rows.add_row(fourth)
    assert of_rows(layers, third, second, fourth)
    # where the one was that left
    assert places == [t.data_ptr() for layer in layers for t in layer.held.values()]
    for state in (t for layer in layers for t in layer.held.values()):
        state[0] += 1
        assert torch.equal(state[2], state[2].clone())
    assert not of_rows(layers, third, second, fourth)
    rows.remove_row(2)
    rows.remove_row(0)
    assert of_rows(layers, second)
    rows.remove_row(0)
    assert [layer.held for layer in layers] == [{}, {}]


def test_room_that_rows_left_is_given_back(rows: RowStates, layers: list[Layer]) -> None:
    held, per_row = [stored() for _ in range(3)], 4 * (24 + 30 + 8)
    for row in held:
        rows.add_row(row)
    assert rows.num_bytes == 3 * per_row
    rows.remove_row(2)
    assert rows.num_bytes == 3 * per_row
    rows.trim()
    assert rows.num_bytes == 2 * per_row
    rows.reserve(5)
    rows.reserve(4)
    assert rows.num_bytes == 5 * per_row
    assert of_rows(layers, *held[:2])
    rows.add_row(held[2])
    assert rows.num_bytes == 5 * per_row
    rows.trim()
    assert rows.num_bytes == 3 * per_row
    assert of_rows(layers, *held)


def test_a_lent_row_is_read_where_it_is(rows: RowStates, layers: list[Layer]) -> None:
    rows.begin(stored(), 2)
    lent, taken = rows.lend_row(1), rows.take_row(1)
    layers[1].held[CONV][1] = 7.0
    assert len(lent) == 2
    assert lent[1][CONV].shape == (1, 2, 4)
    assert lent[1][CONV].eq(7.0).all()
    assert taken[1][CONV].eq(1.0).all()
    other_layers = [Layer(), Layer()]
    other = RowStates(other_layers)
    other.add_row(lent)
    layers[1].held[CONV][1] = 8.0
    assert other_layers[1].held[CONV].eq(7.0).all()


@pytest.mark.parametrize("num_copies", range(1, 7))
def test_a_row_that_cannot_join_changes_no_row(
    rows: RowStates, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, num_copies: int
) -> None:
    """Memory is short while one of three states moves, or one of three rows is copied."""
    held = stored()
    rows.add_row(held)
    copies, copy = [], Tensor.copy_

    def full(state: Tensor, its: Tensor) -> Tensor:
        copies.append(its)
        if len(copies) == num_copies:
            raise MemoryError("no room")
        return copy(state, its)

    monkeypatch.setattr(Tensor, "copy_", full)
    with pytest.raises(MemoryError):
        rows.add_row(stored())
    monkeypatch.undo()
    assert of_rows(layers, held)
    rows.check_integrity(1)
    rows.add_row(other := stored())
    assert of_rows(layers, held, other)
    rows.trim()
    assert rows.num_bytes == 2 * 4 * (24 + 30 + 8)


def test_a_row_chosen_twice_is_two_rows(rows: RowStates, layers: list[Layer]) -> None:
    rows.begin(stored(), 3)
    layers[1].held[CONV][2] = 7.0
    rows.select(np.array([2, 2, 0]))
    state = layers[1].held[CONV]
    assert state[:, 0, 0].tolist() == [7.0, 7.0, 1.0]
    state[0] = 0.0
    assert state[:, 0, 0].tolist() == [0.0, 7.0, 1.0]
    rows.check_integrity(3)


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_failure_tears_rows_only_if_a_state_was_written(
    rows: RowStates, layers: list[Layer], is_inference: bool
) -> None:
    with torch.inference_mode(is_inference):
        rows.begin(stored(), 2)
        rows.open_step()
        rows.close_step(has_failed=True)
        rows.check_whole()
        rows.open_step()
        layers[0].held[RECURRENT].add_(1)
        rows.close_step(has_failed=False)
        rows.check_whole()
        rows.open_step()
        layers[0].held[RECURRENT].add_(1)
        rows.close_step(has_failed=True)
    with pytest.raises(TornStateError):
        rows.open_step()
    rows.begin(stored(), 2)
    rows.open_step()


def test_states_made_in_inference_mode_can_be_written_to_outside(
    rows: RowStates, layers: list[Layer]
) -> None:
    with torch.inference_mode():
        rows.begin(stored(), 2)
        rows.select(np.array([0, 0]))
        rows.add_row(stored())
        rows.remove_row(0)
        rows.trim()
    layers[0].held[CONV].add_(1)


def test_without_stateful_layers_nothing_is_ever_torn() -> None:
    none = RowStates()
    none.begin((), 3)
    none.open_step()
    assert not none.is_open
    none.tear()
    none.check_whole()


def test_integrity_names_a_state_of_other_rows(rows: RowStates) -> None:
    rows.begin(stored(), 2)
    rows.check_integrity(2)
    with pytest.raises(IntegrityError, match="has 2 rows, the batch 3"):
        rows.check_integrity(3)
