"""Random lives of rows with states, under a budget or none, some of whose forwards fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from prompts import tokens
from row_walk import RowWalk
from test_live_rows import Watched
from test_live_states import FAMILIES, budget_for
from test_stateful_rows import Broken
from transformers import PreTrainedModel
from trees import CHAINS

from hf_granikv.errors import ColdPoolFullError, TornStateError
from hf_granikv.live_rows import Row


class StatesWalk(RowWalk):
    """Random lives of rows with states, under a budget or none, some of whose forwards fail."""

    model: PreTrainedModel

    def __init__(self) -> None:
        super().__init__()
        self.parked: list[tuple[str, list[int], Any]] = []

    @initialize(num_rows=st.sampled_from([None, 3, 6]))
    def begin(self, num_rows: int | None) -> None:
        self.budget = None
        if num_rows is not None:
            self.budget = budget_for(self.model, num_rows, 20, lambda: self.idle_bytes)
        self.held = Watched(self.model, budget=self.budget)

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


@pytest.mark.parametrize("name", FAMILIES)
def test_random_lives(tiny_model: Callable[..., PreTrainedModel], name: str) -> None:
    StatesWalk.model = tiny_model(name)
    StatesWalk.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
    StatesWalk.TestCase("runTest").runTest()
