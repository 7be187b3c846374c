"""Random trees of prefixes, tenants and rows: every row reads its own tokens and nobody else's.

Keys tell which token at which position they belong to, so a key of a stranger would show.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planted import CONFIG, NUM_LAYERS, PlantedError, PlantedModel, plant
from prompts import as_generate, cached, left_padded, prefix_ids, tokens

from hf_granikv import AsymmetricPagedCache
from hf_granikv.pools import Prefix

MODEL = PlantedModel()
SALTS = (None, "acme", "bolt")
# few ids, so that prefixes of different tenants are often the same, and heads of each other
IDS = st.lists(st.integers(2, 3), min_size=1, max_size=4)


class TreeWalk(RuleBasedStateMachine):
    """What may happen to a tree and a batch over it."""

    @initialize(dispatch=st.sampled_from(["auto", "per_row"]))
    def begin(self, dispatch: str) -> None:
        self.cache = AsymmetricPagedCache(CONFIG, dispatch=dispatch)
        self.held: list[Prefix] = []
        self.seals: dict[Prefix, list[tuple[int, int]]] = {}
        self.rows: list[tuple[Prefix | None, list[int]]] = []
        for ids in ([2, 3, 2], [3]):
            self.prefill_under(None, ids, None)

    @property
    def alive(self) -> set[Prefix]:
        return {level for prefix in self.held for level in prefix.chain}

    @rule(data=st.data(), ids=IDS, salt=st.sampled_from(SALTS))
    def prefill(self, data: st.DataObject, ids: list[int], salt: str | None) -> None:
        same = [p for p in self.alive if p.salt == salt]
        same.sort(key=lambda prefix: (prefix.chain_ids.tolist(), len(prefix.chain)))
        self.prefill_under(data.draw(st.sampled_from([None, *same])), ids, salt)

    def prefill_under(self, parent: Prefix | None, ids: list[int], salt: str | None) -> None:
        prefix = self.cache.prefill(MODEL, prefix_ids(ids), parent=parent, salt=salt)
        known = [p for p in self.alive if (p.parent, p.token_ids.tolist()) == (parent, ids)]
        known = [p for p in known if p.salt == salt]
        assert known in ([], [prefix]), "the same ids are stored once for a tenant"
        self.held.append(prefix)
        self.seals[prefix] = [(t.data_ptr(), t._version) for t in prefix.tensors()]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        prefix = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.release(prefix)
        if not self.held or any(leaf and leaf not in self.alive for leaf, _ in self.rows):
            self.rows = []

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        num_rows=st.integers(1, 5),
        fails_at=st.sampled_from([None, None, None, None, 0, 1, NUM_LAYERS]),
    )
    def generate(self, data: st.DataObject, num_rows: int, fails_at: int | None) -> None:
        prompts = [self.prompt(data) for _ in range(num_rows)]
        inputs: dict[str, Any] = left_padded([ids for _, ids in prompts])
        self.cache.bind(**inputs, salt=[salt for salt, _ in prompts])
        mask = inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        with as_generate(self.cache):
            is_done = self.run(inputs, fails_at)
        if is_done:
            leaves = self.cache.rows.reads.leaves
            for leaf, (salt, ids) in zip(leaves, prompts, strict=True):
                assert self.is_longest(leaf, ids, salt)
            self.rows = [(leaf, ids) for leaf, (_, ids) in zip(leaves, prompts, strict=True)]
            self.check_returned()
        elif fails_at:
            self.rows = []

    def prompt(self, data: st.DataObject) -> tuple[str | None, list[int]]:
        """Mostly what goes on from some prefix, of its tenant or of another."""
        salt, own = data.draw(st.sampled_from(SALTS)), data.draw(IDS)
        known = sorted(self.alive, key=lambda p: (p.chain_ids.tolist(), p.salt or ""))
        read = data.draw(st.sampled_from([None, *known, *known]))
        if read is None:
            return salt, own
        is_exact = data.draw(st.integers(0, 3)) == 0
        ids = [*read.chain_ids.tolist(), *([] if is_exact else own)]
        return data.draw(st.sampled_from([salt, read.salt, read.salt])), ids

    def is_longest(self, leaf: Prefix | None, ids: list[int], salt: str | None) -> bool:
        """Compares every chain, token by token; of equal ones, those of the fewest levels go."""
        fitting = [
            prefix
            for prefix in self.alive
            if prefix.salt == salt and ids[: prefix.stop] == prefix.chain_ids.tolist()
        ]
        best = max(((p.stop, -len(p.chain)) for p in fitting), default=None)
        if leaf is None or best is None:
            return leaf is best
        return leaf in fitting and (leaf.stop, -len(leaf.chain)) == best

    @precondition(lambda self: self.rows)
    @rule(
        seed=st.integers(0, 99),
        q_len=st.sampled_from([1, 2]),
        fails_at=st.sampled_from([None, None, 1]),
    )
    def forward(self, seed: int, q_len: int, fails_at: int | None) -> None:
        new = [tokens(q_len, seed=seed + i) for i in range(len(self.rows))]
        if self.run({"input_ids": torch.tensor(new)}, fails_at):
            self.rows = [(p, [*ids, *its]) for (p, ids), its in zip(self.rows, new, strict=True)]
            self.check_returned()

    def run(self, inputs: dict[str, Any], fails_at: int | None) -> bool:
        MODEL.fails_at = fails_at
        try:
            MODEL(**inputs, **cached(self.cache))
        except PlantedError:
            return False
        finally:
            MODEL.fails_at = None
        return True

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=5))
        self.cache.reorder_cache(torch.tensor(order))
        self.rows = [self.rows[i] for i in order]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def park_and_join(self, data: st.DataObject) -> None:
        row, state = data.draw(st.integers(0, len(self.rows) - 1)), self.cache.rows
        if state.num_rows > 1:
            parked = state.park(row)
            state.leave(row)
            state.join(parked)
            held = self.rows[row]
            self.rows[row] = self.rows[-1]
            self.rows[-1] = held

    def check_returned(self) -> None:
        """Every row's dense keys are its own ids at their positions, in each layer."""
        for layer_idx, (keys, values) in enumerate(MODEL.returned):
            dense, negative = keys.clone(), values.clone()
            assert torch.equal(negative, -dense)
            for row, (_, ids) in enumerate(self.rows):
                want = plant(torch.tensor(ids), torch.arange(len(ids)), layer_idx).transpose(0, 1)
                lengths = self.cache.rows.reads.lengths
                longest = int(lengths.max())
                is_prefix = np.arange(longest) >= longest - lengths[row]
                is_own = self.cache.rows.owned_columns()[row]
                columns = torch.from_numpy(np.concatenate([is_prefix, is_own]))
                assert torch.equal(dense[row][:, columns], want)

    @invariant()
    def nothing_is_lost_or_written_to(self) -> None:
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.hot_tokens == sum(prefix.num_tokens for prefix in self.alive)
        for prefix in self.alive:
            assert self.seals.get(prefix) in (
                None,
                [(t.data_ptr(), t._version) for t in prefix.tensors()],
            )
        for (leaf, ids), its, length in zip(
            self.rows, self.cache.rows.reads.leaves, self.cache.rows.reads.lengths, strict=True
        ):
            assert its is leaf
            assert length <= len(ids)


TestTreeWalk = TreeWalk.TestCase


def test_a_batch_that_is_not_the_one_bound_is_refused() -> None:
    cache = AsymmetricPagedCache(CONFIG)
    for seed in (1, 2):
        cache.prefill(MODEL, prefix_ids(tokens(4, seed=seed)))
    ids = torch.tensor([tokens(6, seed=1), tokens(6, seed=2)])
    with pytest.raises(ValueError, match=r"holds 2 prefixes and no batch is bound.*cache\.bind"):
        MODEL(input_ids=ids, **cached(cache))
    cache.bind(ids)
    with pytest.raises(ValueError, match=r"has 3 rows, cache\.bind was called with 2"):
        MODEL(input_ids=torch.tensor([[5]] * 3), **cached(cache))
    MODEL(input_ids=torch.tensor([[5]] * 4), **cached(cache))
    assert cache.batch_size == 4, "two samples of each"


def test_rows_that_contradict_what_they_are_bound_to_are_refused() -> None:
    cache = AsymmetricPagedCache(CONFIG)
    for seed in (1, 2):
        cache.prefill(MODEL, prefix_ids(tokens(4, seed=seed)))
    cache.bind(torch.tensor([tokens(6, seed=1)]))
    other = torch.tensor([tokens(6, seed=2)])
    with as_generate(cache), pytest.raises(ValueError, match="row 0 has token"):
        MODEL(input_ids=other, position_ids=torch.arange(6)[None], **cached(cache))
    assert cache.batch_size == -1


BAD_BINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a_row": ({"input_ids": torch.tensor([1, 2])}, "give token ids and a mask of whole prompts"),
    "floats": ({"input_ids": torch.ones(1, 2)}, "give token ids and a mask of whole prompts"),
    "another_mask": (
        {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)},
        "give token ids and a mask of whole prompts",
    ),
    "salts": ({"input_ids": torch.tensor([[1, 2]]), "salt": ["a", "b"]}, "for 1 row"),
    "a_number": ({"input_ids": torch.tensor([[1, 2]]), "salt": [3]}, "one str or None"),
}


@pytest.mark.parametrize("case", BAD_BINDS)
def test_what_cannot_be_bound_is_refused(case: str) -> None:
    cache = AsymmetricPagedCache(CONFIG)
    kwargs, message = BAD_BINDS[case]
    with pytest.raises(ValueError, match=message):
        cache.bind(**kwargs)


def test_a_salt_is_that_of_the_whole_chain() -> None:
    cache = AsymmetricPagedCache(CONFIG)
    root = cache.prefill(MODEL, prefix_ids([5, 6]), salt="acme")
    assert cache.prefill(MODEL, prefix_ids([7]), parent=root).salt == "acme"
    with pytest.raises(ValueError, match=r"salt is 'bolt', the parent's is 'acme'"):
        cache.prefill(MODEL, prefix_ids([7]), parent=root, salt="bolt")
    with pytest.raises(ValueError, match="give a str"):
        cache.prefill(MODEL, prefix_ids([7]), salt=5)
    other = AsymmetricPagedCache(CONFIG).prefill(MODEL, prefix_ids([5, 6]))
    with pytest.raises(ValueError, match="this cache does not hold"):
        cache.prefill(MODEL, prefix_ids([7]), parent=other)
    assert other.digest != root.digest


def test_where_ids_are_cut_matters_to_a_digest() -> None:
    cache = AsymmetricPagedCache(CONFIG)
    whole = cache.prefill(MODEL, prefix_ids([5, 6, 7]))
    head = cache.prefill(MODEL, prefix_ids([5, 6]))
    tail = cache.prefill(MODEL, prefix_ids([7]), parent=head)
    assert len({whole.digest, head.digest, tail.digest}) == 3
    assert cache.prefill(MODEL, torch.tensor([[5, 6]], dtype=torch.int32)) is head
