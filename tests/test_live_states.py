"""Rows of hybrids that come and go: one forward for all that decode, and the logits of each row alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from families import HYBRIDS
from prompts import tokens
from test_live_rows import Watched, live_a_little
from test_stateful_rows import Broken, failing, places
from transformers import PreTrainedModel

from hf_granikv.errors import TornStateError
from hf_granikv.pools.budget import PoolBudget
from hf_granikv.row_budget import RowBudget

# states in front of attention and behind it; convolution alone; states and attention in one layer
FAMILIES = ("qwen3_next", "lfm2", "falcon_h1")
Model = Callable[..., PreTrainedModel]


@contextmanager
def shapes_of(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    """Gives `(rows, q_len)` of every forward in the body of the statement."""
    seen: list[tuple[int, ...]] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(tuple(args[0].shape))
    )
    try:
        yield seen
    finally:
        handle.remove()


class Counted(Watched):
    """Live rows, and the forwards that their last step took."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.shapes: list[tuple[int, ...]] = []
        forward = self.live.forward

        def counted(feeds: Any) -> Any:
            with shapes_of(model) as self.shapes:
                return forward(feeds)

        self.live.forward = counted  # type: ignore[method-assign]

    def decode(self) -> None:
        self.step({row: [5 + i] for i, row in enumerate(self.taken)})
        assert self.shapes == [(len(self.taken), 1)]
        self.check()

    def leave_all(self) -> None:
        for row in list(self.taken):
            self.live.drop(row)
            self.leave(row)
        self.check()


def decoding(model: PreTrainedModel, **options: Any) -> Counted:
    """Rows of three lengths over three chains, and one over none, that have decoded together."""
    held = Counted(model, **options)
    reads = ("tip", "left", "none", "other")
    held.step(
        {
            held.start(read): tokens(count, seed=count)
            for read, count in zip(reads, (5, 3, 4, 1), strict=True)
        }
    )
    assert sorted(held.shapes) == [(1, 1), (1, 3), (1, 4), (1, 5)]
    held.decode()
    return held


@pytest.mark.smoke
@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_that_decode_are_one_forward(tiny_model: Model, name: str) -> None:
    held = decoding(tiny_model(name))
    begun = held.live.num_bytes
    held.decode()
    rows, newcomer = list(held.taken), held.start("tip")
    held.step({**{row: [6] for row in rows}, newcomer: tokens(6, seed=6)})
    assert held.shapes == [(1, 6), (4, 1)]
    held.decode()
    held.live.drop(rows[0])
    held.leave(rows[0])
    held.decode()
    read, own = held.leave(rows[2])
    parked = held.live.park(rows[2])
    held.decode()
    for _ in range(2):
        held.start(read, parked, tuple(own))
    held.decode()
    held.step({rows[1]: tokens(3, seed=7), rows[3]: [9]})
    held.decode()
    assert not held.live._common.rows.journal.dense_reads
    held.leave_all()
    assert held.live.num_bytes == 0 < begun


@pytest.mark.filterwarnings("ignore::hf_granikv.errors.NothingSharedWarning")
@pytest.mark.parametrize("name", HYBRIDS)
def test_attention_of_transformers_gets_masks(tiny_model: Model, name: str) -> None:
    held = decoding(tiny_model(name, "sdpa"))
    held.decode()
    live_a_little(held)


def test_no_mask_is_made_where_attention_needs_none(tiny_model: Model) -> None:
    model, masks = tiny_model("lfm2"), []
    held = decoding(model)
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        held.live.forward({row: [5] for row in held.taken})
    finally:
        handle.remove()
    assert masks == [None]


@pytest.mark.filterwarnings("ignore::hf_granikv.errors.NothingSharedWarning")
def test_a_dense_route_is_noticed_before_rows_lose_their_states() -> None:
    """Tokens in float64 are not attended to by parts, and need a mask where rows differ in length."""
    model = HYBRIDS["lfm2"].model(attn_implementation="granikv").double()
    held = decoding(model)
    held.decode()
    assert held.live._journal.dense_reads
    assert "in one piece" in str(held.live.why_not_packed)


def test_rows_that_are_set_apart_and_come_back_keep_their_states(tiny_model: Model) -> None:
    held = decoding(tiny_model("falcon_h1"))
    first, second, *_ = held.taken
    for row in (first, second, first):
        held.step({row: [7]})
        assert held.shapes == [(1, 1)]
        held.check()
    held.decode()


def test_a_crop_is_refused_and_moves_no_row(tiny_model: Model) -> None:
    held = decoding(tiny_model("lfm2"))
    row = next(iter(held.taken))
    with pytest.raises(ValueError, match="keeps a state that cannot give tokens back"):
        held.live.crop(row, 1)
    assert held.live._merged == list(held.taken)
    held.decode()


# ---- forwards that fail


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["second_layer", "last_layer", "head"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_decode_step_that_fails_costs_its_rows_their_states_and_no_other_one(
    tiny_model: Model, name: str, place: str, error: type[BaseException]
) -> None:
    model = tiny_model(name)
    held = decoding(model)
    torn = list(held.taken)
    other = held.start("right")
    held.step({other: tokens(4, seed=8)})
    with failing(places(model)[place], error), pytest.raises(error):
        held.live.forward({row: [5] for row in torn})
    # together, with one that is whole, and each by itself where it was set apart
    for feeds in ({row: [5] for row in held.taken}, {torn[0]: [5], other: [6]}):
        with pytest.raises(TornStateError, match="start the rows again"):
            held.live.forward(feeds)
    with pytest.raises(TornStateError, match="start the rows again"):
        held.live.park(torn[1])
    held.step({other: [6]})
    for row in torn:
        with pytest.raises(TornStateError, match="start the rows again"):
            held.live.forward({row: [5]})
    held.live.check_integrity()
    for row in torn:
        held.live.drop(row)
        read, own = held.leave(row)
        held.step({held.start(read): [*own, 5]})
    held.decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_fails_costs_those_that_decode_nothing(tiny_model: Model, name: str) -> None:
    model = tiny_model(name)
    held = decoding(model)
    rows, newcomer = list(held.taken), held.start("right")

    def breaks(module: Any, args: Any, out: Any) -> None:
        if args[0].shape[1] > 1:
            raise Broken

    takes = {**{row: [5] for row in rows}, newcomer: [6, 7, 8]}
    layers: Any = model.base_model.layers
    handle = layers[-1].register_forward_hook(breaks)
    with pytest.raises(Broken):
        held.live.forward(takes)
    handle.remove()
    held.step(takes)
    held.decode()


def test_a_failure_before_any_state_leaves_every_row_as_it_was(tiny_model: Model) -> None:
    model = tiny_model("qwen3_next")
    held = decoding(model)
    with failing(model.get_input_embeddings()), pytest.raises(Broken):
        held.live.forward({row: [5] for row in held.taken})
    held.check()
    held.decode()


# ---- under a budget


def budget_for(
    model: PreTrainedModel, num_rows: int, num_tokens: int, idle: Callable[[], int] = lambda: 0
) -> RowBudget:
    """Room for the states of so many rows and so many tokens of each, tables aside."""
    held = Watched(model)
    held.live.forward({held.start("none"): [5]})
    pool = held.live.pools[-1]
    states = held.live.num_bytes - pool.num_bytes
    per_token, largest = pool.bytes_per_token, pool.largest_bytes_per_token
    room = num_rows * (states + num_tokens * (per_token + 9))
    return RowBudget(
        PoolBudget(-(-room * (per_token + largest) // per_token), per_token, largest, states), idle
    )


@pytest.mark.parametrize(("num_rows", "shapes"), [(2, [(1, 1), (1, 1)]), (3, [(2, 1)])])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_a_row_moves_only_with_room_for_its_states_to_be_there_twice(
    tiny_model: Model, name: str, num_rows: int, shapes: list[tuple[int, ...]]
) -> None:
    held = Counted(tiny_model(name), budget=budget_for(tiny_model(name), num_rows, 8))
    first, second = held.start("tip"), held.start("left")
    held.step({first: tokens(4, seed=1), second: tokens(3, seed=2)})
    for _ in range(2):
        held.step({first: [5], second: [6]})
        assert held.shapes == shapes
        held.check()


def test_what_a_row_has_left_is_given_back_before_anything_grows(tiny_model: Model) -> None:
    model = tiny_model("falcon_h1")
    held = decoding(model, budget=(budget := budget_for(model, 8, 20)))
    first = next(iter(held.taken))
    before = held.live._common.rows.row_states.num_bytes
    held.live.drop(first)
    held.leave(first)
    assert held.live._common.rows.row_states.num_bytes == before == 4 * budget.sizes.bytes_per_row
    held.live.make_room([])
    assert held.live._common.rows.row_states.num_bytes == 3 * budget.sizes.bytes_per_row
    held.decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_row_of_a_batch_gives_back_what_the_others_have_left(
    tiny_model: Model, name: str
) -> None:
    model = tiny_model(name)
    held = decoding(model, budget=(budget := budget_for(model, 8, 20)))
    # all leave the common batch within one step; the last one takes its storages along
    held.step({row: tokens(2, seed=i) for i, row in enumerate(held.taken)})
    of_states = sum(rows.row_states.num_bytes for rows in held.live._states)
    assert of_states == len(held.taken) * budget.sizes.bytes_per_row
    held.check()
