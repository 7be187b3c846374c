"""Rows of hybrids that come and go: one forward for all that decode, and the logits of each row alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from families import HYBRIDS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prompts import tokens
from test_live_rows import Watched, live_a_little
from test_stateful_rows import Broken, failing, places
from transformers import PreTrainedModel
from trees import CHAINS

from hf_granikv.errors import ColdPoolFullError, TornStateError
from hf_granikv.live_rows import Row
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


# ---- walks


class StatesWalk(RuleBasedStateMachine):
    """Random lives of rows with states, under a budget or none, some of whose forwards fail."""

    model: PreTrainedModel

    def __init__(self) -> None:
        super().__init__()
        self.parked: list[tuple[str, list[int], Any]] = []

    @initialize(num_rows=st.sampled_from([None, 3, 6]))
    def begin(self, num_rows: int | None) -> None:
        self.budget = None if num_rows is None else self._budget(num_rows)
        self.held = Watched(self.model, budget=self.budget)

    def _budget(self, num_rows: int) -> RowBudget:
        held = Watched(self.model)
        held.live.forward({held.start("none"): [5]})
        pool = held.live.pools[-1]
        states = held.live.num_bytes - pool.num_bytes
        per_token, largest = pool.bytes_per_token, pool.largest_bytes_per_token
        sizes = PoolBudget(num_rows * (states + 20 * per_token), per_token, largest, states)
        return RowBudget(sizes, lambda: self.idle_bytes)

    @property
    def rows(self) -> list[Row]:
        return list(self.held.taken)

    @property
    def idle_bytes(self) -> int:
        return sum(row.num_bytes for row in {id(row): row for *_, row in self.parked}.values())

    @contextmanager
    def if_there_is_room(self) -> Iterator[None]:
        try:
            yield
        except ColdPoolFullError:
            assert self.budget is not None

    @precondition(lambda self: len(self.rows) < 6)
    @rule(read=st.sampled_from(sorted(CHAINS)))
    def start(self, read: str) -> None:
        self.held.start(read)

    def feeds(self, data: st.DataObject, seed: int, choices: list[int]) -> dict[Row, list[int]]:
        counts = [data.draw(st.sampled_from(choices)) for _ in self.rows]
        return {
            row: tokens(count, seed=seed + i)
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True))
            if count
        }

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), seed=st.integers(0, 10**6), is_decode=st.booleans())
    def feed(self, data: st.DataObject, seed: int, is_decode: bool) -> None:
        feeds = self.feeds(data, seed, [1] if is_decode else [0, 1, 1, 4])
        with self.if_there_is_room():
            self.held.step(feeds) if feeds else None

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), seed=st.integers(0, 10**6), after=st.integers(1, 8))
    def fail(self, data: st.DataObject, seed: int, after: int) -> None:
        """Whoever is not refused afterwards goes on exactly; whoever is starts again."""
        feeds, calls = self.feeds(data, seed, [0, 1, 1, 4]), []

        def breaks(*args: Any) -> None:
            calls.append(1)
            if len(calls) == after:
                raise Broken

        layers: Any = self.model.base_model.layers
        handles = [layer.register_forward_hook(breaks) for layer in layers]
        try:
            with self.if_there_is_room():
                self.held.live.forward(feeds) if feeds else None
        except Broken:
            for handle in handles:
                handle.remove()
            for row in feeds:
                self.go_on_or_leave(row)
        else:
            # there was room for them, and nothing failed
            for row, ids in feeds.items():
                read, own = self.held.taken[row]
                if self.held.live.num_tokens(row) > len(own):
                    self.held.taken[row] = read, [*own, *ids]
        finally:
            for handle in handles:
                handle.remove()

    def go_on_or_leave(self, row: Row) -> None:
        try:
            with self.if_there_is_room():
                self.held.step({row: [7]})
        except TornStateError:
            self.held.taken.pop(row, None)
            self.held.live.drop(row)

    @precondition(lambda self: any(self.held.live.num_tokens(row) for row in self.rows))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([r for r in self.rows if self.held.live.num_tokens(r)]))
        with self.if_there_is_room():
            parked = self.held.live.park(row)
            self.parked.append((*self.held.leave(row), parked))

    @precondition(lambda self: self.parked and len(self.rows) < 6)
    @rule(stays=st.booleans())
    def come_back(self, stays: bool) -> None:
        read, own, parked = self.parked[-1]
        with self.if_there_is_room():
            self.held.start(read, parked, tuple(own))
            del self.parked[len(self.parked) - (not stays) :]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.held.live.drop(row)
        self.held.leave(row)

    @invariant()
    def nothing_is_lost_and_the_budget_is_kept(self) -> None:
        if not hasattr(self, "held"):
            return
        self.held.check()
        if self.budget is not None:
            held = self.held.live.num_bytes + self.idle_bytes
            assert held <= self.budget.sizes.room_bytes
        if not self.rows:
            assert self.held.live.num_bytes == 0


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next"])
def test_random_lives(tiny_model: Model, name: str) -> None:
    StatesWalk.model = tiny_model(name)
    StatesWalk.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
    StatesWalk.TestCase("runTest").runTest()
