"""A random life of a cache, on a model whose keys tell token, position and layer."""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planted import CONFIG, NUM_LAYERS, PlantedError, PlantedModel, plant
from prompts import (
    as_generate,
    cached,
    left_padded,
    middle_padded,
    prefix_ids,
    right_padded,
    suffix_only,
    tokens,
)

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import ColdPoolFullError

MODEL = PlantedModel()
Token = tuple[int, int]  # id and a number that only copies of one stored token share
new_number = itertools.count().__next__


def numbered(ids: list[int]) -> list[Token]:
    return [(token_id, new_number()) for token_id in ids]


@dataclass
class Held:
    """A cache beside what it must hold: rows, and which columns since the prefix are tokens."""

    cache: AsymmetricPagedCache
    prefix: list[int] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    shared_len: int = 0
    rows: list[list[Token]] = field(default_factory=list)
    owned: np.ndarray = field(default_factory=lambda: np.ones((0, 0), dtype=bool))

    @property
    def num_columns(self) -> int:
        return self.shared_len + self.owned.shape[1]

    @property
    def num_live(self) -> int:
        return len({number for row in self.rows for _, number in row})

    def prefill(self, length: int, seed: int) -> None:
        self.prefix = tokens(length, seed=seed)
        stored = self.cache.prefill(MODEL, prefix_ids(self.prefix))
        self.marks = [(t.data_ptr(), t._version) for t in (*stored.keys, *stored.values)]
        self.start([], 0)

    def start(self, rows: list[list[int]], q_len: int) -> None:
        """Rows start from the prefix; `rows` are whole."""
        self.shared_len = min([len(self.prefix), *(len(row) - 1 for row in rows)])
        self.rows = [numbered(row[self.shared_len :]) for row in rows]
        width = max(map(len, self.rows), default=0) if self.prefix else q_len
        lengths = np.array([len(row) for row in self.rows], dtype=int)
        self.owned = np.arange(width) >= width - lengths[:, None]

    def select(self, order: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in order]
        self.owned = self.owned[order] if order else np.ones((0, 0), dtype=bool)

    def crop(self, num_columns: int) -> None:
        kept = max(0, self.owned.shape[1] - num_columns)
        self.shared_len -= max(0, num_columns - self.owned.shape[1])
        dropped = self.owned[:, kept:].sum(1)
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, dropped, strict=True)]
        self.owned = self.owned[:, :kept]

    def fork(self, twin: AsymmetricPagedCache) -> "Held":
        rows = [list(row) for row in self.rows]
        return Held(twin, self.prefix, self.marks, self.shared_len, rows, self.owned.copy())

    def check(self) -> None:
        cache, state = self.cache, self.cache._state
        cache.check_integrity()
        assert cache.get_seq_length() == self.num_columns
        assert {layer.get_seq_length() for layer in cache.layers} == {self.num_columns}
        assert cache.batch_size == (len(self.rows) or -1)
        stats = cache.stats()
        assert stats.cold_tokens == self.num_live
        assert (state.prefixes.only is None) == (not self.prefix)
        if state.prefixes.only is not None:
            stored = (*state.prefixes.only.keys, *state.prefixes.only.values)
            assert [(t.data_ptr(), t._version) for t in stored] == self.marks
        if any(self.rows):
            for layer_idx in range(NUM_LAYERS):
                self.check_layer(layer_idx, *state.cold.read(layer_idx))

    def check_layer(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for row, expected in enumerate(self.rows):
            want = self.planted(expected, layer_idx)
            assert torch.equal(keys[row, :, : len(expected)], want)
            assert torch.equal(values[row, :, : len(expected)], -want)

    def planted(self, row: list[Token], layer_idx: int) -> torch.Tensor:
        ids = torch.tensor([token_id for token_id, _ in row], dtype=torch.int64)
        positions = torch.arange(len(row)) + self.shared_len
        return plant(ids, positions, layer_idx).transpose(0, 1)

    def check_returned(self, q_len: int) -> None:
        """Checks what attention was handed: dense columns, and the mask over private tokens."""
        prefix = torch.tensor(self.prefix[: self.shared_len], dtype=torch.int64)
        for layer_idx, (keys, values) in enumerate(MODEL.returned):
            lazy_step = getattr(keys, "layer_step", None)
            dense = keys.clone()
            shared = plant(prefix, torch.arange(self.shared_len), layer_idx).transpose(0, 1)
            assert dense.shape[2] == self.num_columns
            assert torch.equal(values.clone(), -dense)
            for row, expected in enumerate(self.rows):
                assert torch.equal(dense[row, :, : self.shared_len], shared)
                is_token = torch.from_numpy(self.owned[row])
                got = dense[row, :, self.shared_len :][:, is_token]
                assert torch.equal(got, self.planted(expected, layer_idx))
            if lazy_step is not None:
                self.check_mask(lazy_step, q_len)
        if self.prefix:
            # the mask of attentions that read the dense columns
            visible = np.concatenate([np.ones((len(self.rows), self.shared_len)), self.owned], 1)
            given = np.ones_like(visible) if MODEL.mask is None else MODEL.mask.numpy()
            assert np.array_equal(given, visible)

    def check_mask(self, step: Any, q_len: int) -> None:
        width = max(map(len, self.rows))
        mask = step.plan.suffix_mask
        if mask is None:
            mask = torch.ones(len(self.rows), 1, q_len, width, dtype=torch.bool)
        mask = mask.expand(len(self.rows), -1, -1, -1)
        assert step.private.max_length == mask.shape[3] == width
        before = self.owned.shape[1] - q_len
        for row, column in itertools.product(range(len(self.rows)), range(q_len)):
            if self.owned[row, before + column]:
                num_seen = int(self.owned[row, : before + column + 1].sum())
                assert mask[row, 0, column].tolist() == [i < num_seen for i in range(width)]


LAYOUTS = {
    "left": lambda prefix, rows: left_padded([[*prefix, *row] for row in rows]),
    "left_more": lambda prefix, rows: left_padded([[*prefix, *row] for row in rows], extra=2),
    "right": lambda prefix, rows: right_padded([[*prefix, *row] for row in rows]),
    "middle": lambda prefix, rows: middle_padded(rows, prefix),
    "suffix": lambda prefix, rows: suffix_only(rows, prefix),
}


class CacheWalk(RuleBasedStateMachine):
    """What may happen to a cache, in any order."""

    @initialize(limit=st.one_of(st.none(), st.integers(8, 90)), prefix_len=st.integers(0, 7))
    def begin(self, limit: int | None, prefix_len: int) -> None:
        self.held = Held(AsymmetricPagedCache(CONFIG, cold_slots=limit))
        self.others: list[Held] = []
        if prefix_len:
            self.held.prefill(prefix_len, seed=prefix_len)

    def run(self, inputs: dict[str, Any], num_new: int, num_kept: int, fails_at: int | None) -> str:
        """Runs a forward; tells whether it was done, changed nothing, or broke off half stored."""
        limit = self.held.cache._state.cold.limit
        is_full = limit is not None and num_kept + num_new > limit
        failure = PlantedError if fails_at == 0 or not is_full else ColdPoolFullError
        is_good = fails_at is None and not is_full
        MODEL.fails_at = fails_at
        try:
            with nullcontext() if is_good else pytest.raises(failure):
                MODEL(**inputs, **cached(self.held.cache))
        finally:
            MODEL.fails_at = None
        if is_good:
            return "done"
        return "broke off" if fails_at and not is_full else "untouched"

    @precondition(lambda self: self.held.prefix)
    @rule(
        lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        layout=st.sampled_from(sorted(LAYOUTS)),
        seed=st.integers(0, 99),
        fails_at=st.sampled_from([None, None, None, *range(NUM_LAYERS + 1)]),
    )
    def generate(self, lengths: list[int], layout: str, seed: int, fails_at: int | None) -> None:
        held = self.held
        if layout == "suffix" and not any(lengths):
            lengths = [1, *lengths]
        rows = [tokens(length, seed=seed + i) for i, length in enumerate(lengths)]
        whole = [[*held.prefix, *row] for row in rows]
        shared_len = min([len(held.prefix), *(len(row) - 1 for row in whole)])
        num_new = sum(len(row) - shared_len for row in whole)
        # what generate hands to its first forward
        inputs = LAYOUTS[layout](held.prefix, rows)
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        inputs["position_ids"] = positions[:, -inputs["input_ids"].shape[1] :]
        with as_generate(held.cache):
            outcome = self.run(inputs, num_new, 0, fails_at)
        if outcome == "done":
            held.start(whole, 0)
            held.check_returned(held.owned.shape[1])
        elif outcome == "broke off":
            # the rows of the call before are gone once a layer has stored; a crop into the prefix
            # that came before any rows stays
            shared_len = len(held.prefix) if held.rows else held.shared_len
            held.start([], 0)
            held.shared_len = shared_len

    @rule(data=st.data(), q_len=st.sampled_from([1, 1, 2, 3]), seed=st.integers(0, 99))
    def forward(self, data: st.DataObject, q_len: int, seed: int) -> None:
        held = self.held
        num_rows = len(held.rows) or data.draw(st.integers(1, 4))
        owned = np.ones((num_rows, q_len), dtype=bool)
        if held.prefix and data.draw(st.booleans()):
            bits = data.draw(st.lists(st.booleans(), min_size=owned.size, max_size=owned.size))
            owned = np.array(bits).reshape(owned.shape)
        ids = np.array(tokens(owned.size, seed=seed)).reshape(owned.shape)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids)}
        before = held.owned if held.rows else np.ones((num_rows, 0), dtype=bool)
        if not owned.all() or (held.prefix and data.draw(st.booleans())):
            shared = np.ones((num_rows, held.shared_len), dtype=bool)
            columns = np.concatenate([shared, before, owned], 1)
            inputs["attention_mask"] = torch.from_numpy(columns.astype(np.int64))
        # without a prefix nobody has to announce a forward, so nobody tells that one broke off
        failing = [None] * 4 + ([0, 1, NUM_LAYERS] if held.prefix else [0])
        fails_at = data.draw(st.sampled_from(failing))
        if self.run(inputs, int(owned.sum()), held.num_live, fails_at) == "done":
            rows = held.rows or [[] for _ in range(num_rows)]
            kept = [ids_row[own].tolist() for ids_row, own in zip(ids, owned, strict=True)]
            held.rows = [[*row, *numbered(new)] for row, new in zip(rows, kept, strict=True)]
            held.owned = np.concatenate([before, owned], 1)
            held.check_returned(q_len)

    @rule(data=st.data(), way=st.sampled_from(["reorder", "select", "select_bool", "repeat"]))
    def select(self, data: st.DataObject, way: str) -> None:
        held, num_rows = self.held, len(self.held.rows)
        if way == "repeat":
            times = data.draw(st.integers(1, 3))
            order = np.repeat(np.arange(num_rows), times).tolist()
            held.cache.batch_repeat_interleave(times)
        elif way == "select_bool":
            is_kept = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
            is_kept = is_kept if any(is_kept) else [True] * num_rows
            order = np.flatnonzero(is_kept).tolist()
            held.cache.batch_select_indices(torch.tensor(is_kept, dtype=torch.bool))
        else:
            rows = range(num_rows)
            order = (
                data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=5)) if rows else []
            )
            verb = held.cache.reorder_cache if way == "reorder" else held.cache.batch_select_indices
            verb(torch.tensor(order, dtype=torch.int64))
        if num_rows:
            held.select(order)

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        num_columns = data.draw(st.integers(0, self.held.num_columns))
        self.held.cache.crop(-num_columns)
        self.held.crop(num_columns)

    @rule()
    def reset(self) -> None:
        self.held.cache.reset()
        self.held.start([], 0)
        assert self.held.cache.stats().cold_bytes == 0

    @rule(is_deepcopy=st.booleans())
    def fork(self, is_deepcopy: bool) -> None:
        cache = self.held.cache
        twin = self.held.fork(copy.deepcopy(cache) if is_deepcopy else cache.fork())
        self.others = [*self.others[-1:], twin]

    @precondition(lambda self: self.others)
    @rule()
    def go_on_with_another(self) -> None:
        self.held, *self.others = [*self.others, self.held]

    @rule(prefix_len=st.integers(0, 7), seed=st.integers(0, 99))
    def replace_the_prefix(self, prefix_len: int, seed: int) -> None:
        held, state = self.held, self.held.cache._state
        if state.prefixes.only is not None:
            held.cache.release(state.prefixes.only)
        held.cache.reset()
        held.prefix, held.marks = [], []
        held.start([], 0)
        if prefix_len:
            held.prefill(prefix_len, seed=seed)

    @invariant()
    def every_row_holds_its_own_tokens_and_no_others(self) -> None:
        self.held.check()

    @invariant()
    def forks_are_untouched(self) -> None:
        for other in self.others:
            other.check()


TestCacheWalk = CacheWalk.TestCase
TestCacheWalk.settings = settings(settings.get_profile("hf_granikv"), max_examples=150)
