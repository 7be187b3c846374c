"""What attention plans for a decode step goes on for the next ones, until something has changed."""

from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import PREFIX, logits_alone, prefilled, prefix_ids, step, suffixes, tokens, whole
from transformers import PreTrainedModel

from hf_granikv import layer, step_work
from hf_granikv.config import CacheOptions
from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention.attention import _SPARE, MODULE

pytestmark = pytest.mark.skipif(
    isinstance(compiled.load(MODULE), str), reason="there are no compiled kernels"
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return SHARED_PATH["llama"].model(attn_implementation="granikv", num_hidden_layers=3)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every pass that is planned anew."""
    made: list[Any] = []

    class Planned(step_work.DecodeAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(step_work, "DecodeAttention", Planned)
    return made


class Batch:
    """Rows of one cache, and what each holds."""

    def __init__(self, model: PreTrainedModel, rows: list[list[int]], **options: Any) -> None:
        self.model, self.rows = model, [list(row) for row in rows]
        self.cache, self.seed = prefilled(model, **options), 0
        width = len(rows[0])
        mask = torch.ones(len(rows), len(PREFIX) + width, dtype=torch.int64)
        step(model, self.cache, rows, attention_mask=mask)

    def decode(self, num_steps: int = 1) -> None:
        """Steps of one token for each row, the last of which is compared."""
        for _ in range(num_steps):
            self.seed += 1
            new = tokens(len(self.rows), seed=self.seed)
            self.rows = [[*row, token] for row, token in zip(self.rows, new, strict=True)]
            logits = step(self.model, self.cache, [[token] for token in new])
        for row, ids in enumerate(whole(self.rows)):
            want = logits_alone(self.model, ids, 1)
            torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dispatch", ["cascade", "batched_gemm", "per_row"])
def test_one_plan_serves_until_there_is_no_room(model, plans, dispatch) -> None:
    batch = Batch(model, suffixes(4, 4, 4), dispatch=dispatch)
    for _ in range(_SPARE // 4):
        batch.decode(4)
    assert len(plans) == 1
    batch.decode(2)
    assert len(plans) == 2
    counted = batch.cache.stats().backend_steps
    assert counted[dispatch] == _SPARE + 2 + 1
    assert "measured" in batch.cache.explain()


def test_the_pool_may_move_meanwhile(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4))
    batch.decode()
    held = batch.cache.rows.cold.storage(1)[0].data_ptr()
    while batch.cache.rows.cold.storage(1)[0].data_ptr() == held:
        batch.decode()
    assert len(plans) == 1


def test_rows_may_change_places(model, plans) -> None:
    """As beams do: the same prefixes are read, and tokens lie elsewhere."""
    batch = Batch(model, suffixes(4, 4, 4))
    batch.decode()
    batch.cache.reorder_cache(torch.tensor([2, 2, 0]))
    batch.rows = [batch.rows[row] for row in (2, 2, 0)]
    batch.decode(2)
    assert len(plans) == 1


def test_rows_of_different_lengths_see_their_own(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4))
    mask = torch.ones(2, len(PREFIX) + 8, dtype=torch.int64)
    mask[1, -4:-1] = 0
    new = suffixes(4, 4, seed=7)
    step(model, batch.cache, new, attention_mask=mask)
    batch.rows = [batch.rows[0] + new[0], batch.rows[1] + new[1][-1:]]
    batch.decode(3)
    assert len(plans) == 1


def test_forks_do_not_share_one(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4))
    batch.decode()
    other = Batch.__new__(Batch)
    other.model, other.rows, other.seed = model, [list(row) for row in batch.rows], 50
    other.cache = batch.cache.fork()
    for _ in range(3):
        batch.decode()
        other.decode()
    assert len(plans) == 2


def test_another_number_of_threads_is_planned_for(model, plans, same_threads_after) -> None:
    batch = Batch(model, suffixes(4, 4))
    for num_threads in (1, 3, 3, 2):
        torch.set_num_threads(num_threads)
        batch.decode(2)
    assert len(plans) == 3


def test_so_is_another_choice_of_the_backend(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4), dispatch="cascade")
    batch.decode(2)
    batch.cache.rows.options = CacheOptions(dispatch="per_row")
    batch.decode(2)
    assert len(plans) == 2
    assert batch.cache.stats().backend_steps["per_row"] == 2


def test_so_are_other_rows(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4))
    batch.decode(2)
    batch.cache.batch_select_indices(torch.tensor([1]))
    batch.rows = batch.rows[1:]
    batch.decode(2)
    assert len(plans) == 2


def test_it_keeps_no_prefix_alive(model) -> None:
    batch = Batch(model, suffixes(4, 4))
    batch.decode(2)
    cache = batch.cache
    assert cache.rows.kept
    cache.reset()
    assert not cache.rows.kept
    (prefix,) = cache.rows.prefixes.all
    cache.release(prefix)
    assert cache.stats().hot_bytes == 0


def test_a_step_that_fails_leaves_it_right(model, plans) -> None:
    batch = Batch(model, suffixes(4, 4))
    batch.decode(2)
    hook = model.model.layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, batch.cache, [[5], [6]])
    hook.remove()
    batch.decode(2)
    assert len(plans) == 1


def _fail(*args: Any) -> None:
    raise RuntimeError("on purpose")


def test_a_second_prefix_is_another_matter(model, plans) -> None:
    cache = prefilled(model)
    cache.prefill(model, prefix_ids(tokens(31, seed=9)))
    rows = [[*PREFIX, *tokens(3, seed=5)], [*tokens(31, seed=9), *tokens(3, seed=6)]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    cache.bind(ids, mask)
    step(model, cache, [row[-3:] for row in rows])
    for seed in range(4):
        new = tokens(2, seed=seed)
        rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
        logits = step(model, cache, [[token] for token in new])
        for row, its in enumerate(rows):
            want = logits_alone(model, its, 1)
            torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)
    assert len(plans) == 1


def test_layers_that_are_not_known_to_come_are_forgotten(model, monkeypatch) -> None:
    """Their tokens may have moved."""
    batch = Batch(model, suffixes(4, 4))
    batch.decode(2)
    (work,) = batch.cache.rows.kept.values()
    assert work.places.keys() == {0, 1, 2}
    with monkeypatch.context() as patch:
        patch.setattr(layer, "make_ready", lambda *args: None)
        batch.decode()
        assert work.places.keys() == {0}
    batch.decode()
    assert work.places.keys() == {0, 1, 2}
