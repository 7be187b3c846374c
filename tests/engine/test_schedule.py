"""The schedule by itself: random arrivals, budgets and cancellations, with a made-up engine."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.engine.schedule import IdleTokens, Limits, Seat, next_moves, step_feeds
from hf_granikv.errors import ColdPoolFullError


@dataclass
class Life:
    """A turn: its prompt, how many tokens its answer gets, and when it comes and goes."""

    order: int
    prompt: int
    answer: int
    arrives: int
    cancelled: int | None = None
    keeps: bool = False
    generated: int = 0
    held: int = 0
    idle_before: int = 0

    @property
    def num_ids(self):
        return self.prompt + self.generated

    @property
    def seat(self):
        return Seat(self.order, self.num_ids, self.held, self.answer - self.generated)


@dataclass
class World:
    """What the batch would do, without a model."""

    limits: Limits
    running: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)
    idle: dict = field(default_factory=dict)
    finished: list = field(default_factory=list)
    first_admissions: list = field(default_factory=list)

    def step(self):
        idle = [
            IdleTokens(key, count, key if key in self.waiting else None)
            for key, count in self.idle.items()
        ]
        seats = [[life.seat for life in group.values()] for group in (self.running, self.waiting)]
        moves = next_moves(self.limits, *seats, idle)
        for key in moves.evicted:
            del self.idle[key]
        for order in moves.preempted:
            life = self.waiting[order] = self.running.pop(order)
            life.held = 0
        for order in moves.admitted:
            life = self.running[order] = self.waiting.pop(order)
            life.held = min(self.idle.pop(order, 0), life.num_ids - 1)
            if order not in self.first_admissions:
                self.first_admissions.append(order)
        if self.waiting and self.running:
            assert max(self.running) < min(self.waiting), "somebody was overtaken"
        feeds = step_feeds(self.limits, [life.seat for life in self.running.values()])
        self.check(feeds)
        for order, count in feeds.items():
            life = self.running[order]
            life.held += count
            if life.held == life.num_ids:
                life.generated += 1
                if life.generated == life.answer:
                    self.leave(order)
        return bool(feeds)

    def check(self, feeds):
        limits = self.limits
        held = sum(life.held for life in self.running.values()) + sum(feeds.values())
        held += limits.tokens_per_row * len(self.running)
        if limits.max_tokens is not None:
            assert held + self.num_idle <= limits.max_tokens
        assert len(self.running) <= limits.max_rows
        decoding = [o for o, life in self.running.items() if life.num_ids - life.held == 1]
        assert all(feeds.get(order) == 1 for order in decoding)
        assert sum(feeds.values()) <= max(limits.max_step_tokens, len(decoding) + 1)

    @property
    def num_idle(self):
        return sum(self.idle.values()) + self.limits.tokens_per_row * len(self.idle)

    def leave(self, order):
        life = self.running.pop(order)
        self.finished.append(order)
        if life.keeps:
            self.idle[order + 1000] = life.held


@st.composite
def worlds(draw):
    limit, per_row = draw(st.none() | st.integers(13, 30)), draw(st.sampled_from([0, 0, 3]))
    limits = Limits(
        None if limit is None else limit + per_row,
        max_rows=draw(st.integers(1, 5)),
        max_step_tokens=draw(st.integers(1, 12)),
        lookahead=draw(st.sampled_from([0, 1, 8])),
        tokens_per_row=per_row,
        moves_rows=draw(st.booleans()),
    )
    lives = []
    for order in range(draw(st.integers(1, 9))):
        prompt, answer = draw(st.integers(1, 6)), draw(st.integers(1, 8))
        arrives = draw(st.integers(0, 8))
        cancelled = draw(st.none() | st.integers(0, 20))
        life = Life(order, prompt, answer, arrives, keeps=draw(st.booleans()))
        life.cancelled = None if cancelled is None else arrives + cancelled
        life.idle_before = draw(st.integers(0, 6))
        lives.append(life)
    lives.sort(key=lambda life: life.arrives)
    for order, life in enumerate(lives):
        life.order = order
    return World(limits), lives


@given(worlds())
def test_all_finish_in_order_and_within_the_budget(drawn):
    world, lives = drawn
    cancelled = set()
    for now in range(600):
        for life in lives:
            if life.arrives == now:
                # tokens of its earlier turns, as far as there is room for anything idle
                room = world.limits.max_tokens is None or not world.running
                idle = world.num_idle + life.idle_before + world.limits.tokens_per_row
                if life.idle_before and room and idle <= (world.limits.max_tokens or idle):
                    world.idle[life.order] = life.idle_before
                world.waiting[life.order] = life
            if life.cancelled == now:
                for group in (world.waiting, world.running):
                    if group.pop(life.order, None):
                        cancelled.add(life.order)
        went_on = world.step()
        if not world.waiting and not world.running and now > 20:
            break
        # whatever happens, somebody computes as long as somebody is there
        assert went_on or not (world.waiting or world.running)
    assert sorted([*world.finished, *cancelled]) == list(range(len(lives)))
    assert world.first_admissions == sorted(world.first_admissions)


def test_running_answers_get_their_token_before_prompts_do():
    seats = [Seat(0, 10, 9), Seat(1, 100, 0), Seat(2, 8, 7), Seat(3, 50, 0)]
    assert step_feeds(Limits(max_step_tokens=110), seats) == {0: 1, 2: 1, 1: 100, 3: 8}
    assert step_feeds(Limits(max_step_tokens=2), seats) == {0: 1, 2: 1, 1: 1}


def test_the_youngest_gives_way_after_everything_idle():
    limits = Limits(max_tokens=30)
    running = [Seat(0, 12, 11), Seat(1, 12, 11), Seat(2, 8, 7)]
    moves = next_moves(limits, running, [], [IdleTokens("a", 4), IdleTokens("b", 4)])
    assert (moves.evicted, moves.preempted) == (("a", "b"), (2,))
    moves = next_moves(limits, running[:2], [], [IdleTokens("a", 4), IdleTokens("b", 4)])
    assert (moves.evicted, moves.preempted) == (("a",), ())


def test_what_a_waiting_turn_reads_is_evicted_last():
    limits, idle = Limits(max_tokens=20), [IdleTokens("own", 5, wanted_by=1), IdleTokens("else", 5)]
    moves = next_moves(limits, [Seat(0, 10, 9)], [Seat(1, 8, 0, 1)], idle)
    assert (moves.evicted, moves.admitted) == (("else",), (1,))


def test_a_turn_enters_only_with_room_to_go_on():
    waiting = [Seat(1, 8, 0, 20)]
    assert next_moves(Limits(30, lookahead=6), [Seat(0, 10, 9, 20)], waiting, []).admitted == (1,)
    assert next_moves(Limits(30, lookahead=7), [Seat(0, 10, 9, 20)], waiting, []).admitted == ()
    # alone it needs no more than itself
    assert next_moves(Limits(8, lookahead=7), [], waiting, []).admitted == (1,)


def test_a_turn_enters_with_room_for_the_longest_to_be_there_twice():
    running, waiting = [Seat(0, 10, 9, 20)], [Seat(1, 8, 0, 20)]
    # with what the longest holds beside its tokens
    for limit, per_row, admitted in ((39, 4, ()), (40, 4, (1,)), (27, 0, ()), (28, 0, (1,))):
        limits = Limits(limit, lookahead=0, tokens_per_row=per_row, moves_rows=True)
        assert next_moves(limits, running, waiting, []).admitted == admitted
    # to go on it may be used up
    assert not next_moves(limits, [*running, Seat(1, 18, 17)], [], []).preempted


def test_what_a_row_takes_beside_its_tokens_counts():
    limits = Limits(20, lookahead=0, tokens_per_row=4)
    running, idle = [Seat(0, 5, 4)], [IdleTokens("a", 3)]
    assert next_moves(limits, running, [Seat(1, 3)], []).admitted == (1,)
    moves = next_moves(limits, running, [Seat(1, 3)], idle)
    assert (moves.evicted, moves.admitted) == (("a",), (1,))
    assert next_moves(limits, running, [Seat(1, 8)], []).admitted == ()
    limits.check_fits(16)
    with pytest.raises(ColdPoolFullError, match="17 private tokens and 4 for its states was asked"):
        limits.check_fits(17)


def test_nobody_passes_a_large_turn_that_waits():
    limits = Limits(max_tokens=20, lookahead=0)
    waiting = [Seat(1, 15), Seat(2, 2)]
    assert next_moves(limits, [Seat(0, 10, 9)], waiting, []).admitted == ()


def test_what_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(ColdPoolFullError, match="up to 21 private tokens was asked, the budget is"):
        Limits(20).check_fits(21)
    Limits(20).check_fits(20)
    Limits().check_fits(10**9)


def test_tokens_are_kept_where_moving_them_is_faster():
    cost = PreemptionCost(frees_budget=True, bytes_per_s=1e9, tokens_per_s=1e3)
    assert cost.keeps(1000, 10**8)
    assert not cost.keeps(1000, 10**9)
    assert not PreemptionCost(frees_budget=False).keeps(1000, 1)
