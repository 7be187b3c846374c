"""Rows that come and go: the logits of each row alone, after every step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from prompts import logits_alone, tokens
from row_walk import RowWalk
from transformers import PreTrainedModel
from trees import CHAINS, planted

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import ColdPoolFullError
from hf_granikv.hybrids import EXACT_HYBRIDS
from hf_granikv.live_rows import LiveRows, Row
from hf_granikv.row_budget import RowBudget

FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "qwen3_moe", "llama4", "opt")


class Watched:
    """Live rows beside the ids that each row has taken."""

    def __init__(
        self, model: PreTrainedModel, *, budget: RowBudget | None = None, **options: Any
    ) -> None:
        self.model = model
        # states sum over all tokens, in another order where they are read one by one
        self.atol = 1e-3 if model.config.model_type in EXACT_HYBRIDS else 1e-4
        self.cache, self.prefixes = planted(model, **options)
        self.live = LiveRows(model, self.cache, budget=budget)
        self.taken: dict[Row, tuple[str, list[int]]] = {}

    def start(self, read: str, parked: Any = None, own: tuple[int, ...] = ()) -> Row:
        row = self.live.start(self.prefixes.get(read), parked)
        self.taken[row] = read, list(own)
        return row

    def step(self, feeds: dict[Row, list[int]]) -> None:
        logits = self.live.forward(feeds)
        assert logits.keys() == feeds.keys()
        for row, ids in feeds.items():
            read, own = self.taken[row]
            own += ids
            want = logits_alone(self.model, [*CHAINS[read], *own], 1)[0]
            torch.testing.assert_close(logits[row], want, atol=self.atol, rtol=0)

    def check(self) -> None:
        self.live.check_integrity()
        for row, (_, own) in self.taken.items():
            assert self.live.num_tokens(row) == len(own)
        assert self.live.num_slots_used == sum(len(own) for _, own in self.taken.values())

    def leave(self, row: Row) -> tuple[str, list[int]]:
        return self.taken.pop(row)


def live_a_little(held: Watched) -> None:
    first, second = held.start("tip"), held.start("left")
    held.step({first: tokens(5, seed=1), second: tokens(3, seed=2)})
    held.step({first: [5], second: [6]})
    third = held.start("none")
    held.step({first: [7], second: [8], third: tokens(4, seed=3)})
    held.step({second: [9], third: tokens(6, seed=4)})
    held.check()
    fourth = held.start("tip")
    held.step({first: tokens(3, seed=5), second: [4], third: [5], fourth: [6]})
    held.step({row: [11] for row in (first, second, third, fourth)})
    read, own = held.leave(second)
    parked = held.live.park(second)
    held.step({first: [12], third: [13], fourth: [14]})
    held.live.drop(fourth)
    held.leave(fourth)
    back, twin = (held.start(read, parked, tuple(own)) for _ in range(2))
    held.step({back: [3], twin: tokens(4, seed=6), third: [2]})
    held.step({row: [12] for row in held.taken})
    held.check()


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_goes_on_as_if_it_were_alone(
    tiny_model: Callable[..., PreTrainedModel], name: str, attention: str
) -> None:
    if attention == "sdpa" and name in ("gemma2", "gpt_oss"):
        pytest.skip("transformers has no sdpa for it")
    live_a_little(Watched(tiny_model(name, attention)))


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("name", ["qwen3_next", "zamba2", "lfm2"])
def test_layers_with_states(
    tiny_model: Callable[..., PreTrainedModel], name: str, attention: str
) -> None:
    live_a_little(Watched(tiny_model(name, attention)))


def test_new_tokens_are_packed(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, shapes = tiny_model("llama"), []
    held = Watched(model)
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    try:
        live_a_little(held)
    finally:
        handle.remove()
    assert held.live.why_not_packed is None
    # every other call is the row alone
    assert [shape for shape in shapes if shape[0] == 1 and shape[1] == 8] == [(1, 8)]
    assert not held.live._common.rows.journal.dense_reads


def test_without_any_prefix(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama")
    live = LiveRows(model, AsymmetricPagedCache(model.config))
    rows = [live.start(None), live.start(None)]
    own = [tokens(4, seed=1), tokens(7, seed=2)]
    for ids in (own, [[3], [4]], [[5], [6]]):
        logits = live.forward(dict(zip(rows, ids, strict=True)))
        if ids is not own:
            own = [[*a, *b] for a, b in zip(own, ids, strict=True)]
        for row, its in zip(rows, own, strict=True):
            want = logits_alone(model, its, 1)[0]
            torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_a_forward_that_fails_leaves_every_row_as_it_was(
    tiny_model: Callable[..., PreTrainedModel], attention: str
) -> None:
    model = tiny_model("llama", attention)
    held = Watched(model)
    first, second = held.start("tip"), held.start("left")
    held.step({first: tokens(5, seed=1), second: tokens(3, seed=2)})
    held.step({first: [5], second: [6]})
    third = held.start("root")
    calls: list[int] = []

    def fail(module: Any, args: Any, out: Any) -> None:
        calls.append(1)
        if len(calls) == (1 if attention == "granikv" else 2):
            raise RuntimeError("a layer broke")

    handle = model.model.layers[1].self_attn.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a layer broke"):
        held.live.forward({first: [1], second: [2], third: [3, 4]})
    handle.remove()
    held.check()
    held.step({first: [1], second: [2], third: [3, 4]})


def test_a_full_pool_says_so_before_anything_changes(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    held = Watched(tiny_model("llama"), cold_slots=10)
    row, other = held.start("left"), held.start("tip")
    held.step({row: tokens(6, seed=1), other: [3, 4]})
    with pytest.raises(ColdPoolFullError, match="2 free slots of cold_slots=10, 3 needed"):
        held.live.forward({row: [1, 2], other: [3]})
    held.check()
    held.step({row: [1], other: [3]})
    assert held.live.num_slots_used == 10


def test_tokens_can_be_taken_away(tiny_model: Callable[..., PreTrainedModel]) -> None:
    held = Watched(tiny_model("llama"))
    row, other = held.start("left"), held.start("tip")
    held.step({row: tokens(6, seed=1), other: [3, 4]})
    held.step({row: [1], other: [2]})
    held.live.crop(row, 3)
    held.taken[row] = "left", held.taken[row][1][:-3]
    held.check()
    held.step({row: [9], other: [8]})
    with pytest.raises(ValueError, match="6 tokens to take away, 5 are held"):
        held.live.crop(row, 6)


def test_what_cannot_be_is_refused(tiny_model: Callable[..., PreTrainedModel]) -> None:
    held, other = (Watched(tiny_model("llama")) for _ in range(2))
    with pytest.raises(ValueError, match="is not held"):
        held.live.start(other.prefixes["tip"])
    row = held.start("tip")
    held.step({row: [4, 5]})
    parked = held.live.park(row)
    with pytest.raises(ValueError, match="reads"):
        held.live.start(held.prefixes["left"], parked)
    with pytest.raises(ValueError, match="has left"):
        held.live.num_tokens(row)
    with pytest.raises(ValueError, match="no token"):
        held.live.forward({held.live.start(None): []})


class LiveWalk(RowWalk):
    """Random lives: rows start, are fed, cropped, parked, come back twice, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Watched(MODEL)
        self.parked: list[tuple[str, list[int], Any]] = []

    @rule(read=st.sampled_from(sorted(CHAINS)))
    def start(self, read: str) -> None:
        if len(self.rows) < 6:
            self.held.start(read)

    @precondition(lambda self: self.held.taken)
    @rule(data=st.data(), seed=st.integers(0, 10**6))
    def feed(self, data: st.DataObject, seed: int) -> None:
        counts = [data.draw(st.sampled_from([0, 1, 1, 1, 4])) for _ in self.rows]
        feeds = {
            row: tokens(count, seed=seed + i)
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True))
            if count
        }
        if feeds:
            self.held.step(feeds)

    @precondition(lambda self: self.held.taken)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        read, own = self.held.taken[row]
        count = data.draw(st.integers(0, len(own)))
        self.held.live.crop(row, count)
        self.held.taken[row] = read, own[: len(own) - count]

    @precondition(lambda self: self.held.taken)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        read, own = self.held.leave(row)
        self.parked.append((read, own, self.held.live.park(row)))

    @precondition(lambda self: self.parked)
    @rule(stays=st.booleans())
    def come_back(self, stays: bool) -> None:
        read, own, parked = self.parked[-1] if stays else self.parked.pop()
        if len(self.rows) < 6:
            self.held.start(read, parked, tuple(own))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.held.check()


MODEL = SHARED_PATH["llama"].model(attn_implementation="granikv")
TestLiveWalk = LiveWalk.TestCase


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_interrupted_first_token_leaves_nothing(
    tiny_model: Callable[..., PreTrainedModel], num_rows: int
) -> None:
    """Torch shows an interrupt to no hook; the rows were thought to hold what nobody has written."""
    model: Any = tiny_model("llama")
    held = Watched(model)
    rows = [held.start("tip") for _ in range(num_rows)]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            held.live.forward({row: [5] for row in rows})
    finally:
        handle.remove()
    for token in (5, 6):
        held.step({row: [token] for row in rows})
    held.check()
