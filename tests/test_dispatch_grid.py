"""The benchmark of the dispatcher's choices: what it times has been compared, what it sums up is right."""

from typing import Any

import pytest
import torch
from dispatch_grid import Cell, dense_bytes, report, sampled, timed
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.backends.base import Attend
from hf_granikv.dispatch import Dispatcher
from hf_granikv.dispatch.stopwatch import Stopwatch
from hf_granikv.views import GroupShape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_path_of_the_grid_computes_what_stock_attention_does(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = GroupShape(3, 1, 65, 2, 3, 16, 4 if dtype == "float32" else 2, dtype=dtype)
    store = torch.randn(1 << 16).to(getattr(torch, dtype))
    watch = Stopwatch(torch.device("cpu"))
    with torch.no_grad():
        # a path that differs would end the run
        cell = timed(shape, 5, watch, Dispatcher(backends=BACKENDS), store, 0.0)
    assert set(cell.seconds) == {*BACKENDS, "SDPA"}
    assert min(cell.seconds.values()) > 0
    assert cell.regret >= 1
    report([cell])
    assert f"{dtype}: most frequent winner, worst regret" in capsys.readouterr().out


def test_a_path_of_the_grid_that_computes_something_else_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, store = GroupShape(3, 1, 65, 2, 3, 16, 4), torch.randn(1 << 16)
    backend = BACKENDS["cascade"]

    def planned(self: object, *args: Tensor, **kwargs: Any) -> Attend:
        right = planned_right(*args, **kwargs)
        return Attend(lambda query, keys, values: right(query * 1.5, keys, values))

    planned_right = backend.planned
    monkeypatch.setattr(type(backend), "planned", planned)
    with pytest.raises(SystemExit, match="cascade differs from SDPA by"), torch.no_grad():
        timed(shape, 5, Stopwatch(torch.device("cpu")), Dispatcher(backends=BACKENDS), store, 0.0)


def test_the_grid_is_the_same_in_every_run_and_covers_rows_and_prefixes() -> None:
    cells = sampled(2)
    assert cells == sampled(2)
    assert len(set(cells)) == len(cells) > 200
    assert {s.num_rows for s, _ in cells} == {1, 2, 4, 8, 16, 32, 64}
    assert {s.prefix_len for s, _ in cells} >= {16, 8192}
    assert {s.gqa_ratio for s, _ in cells} == {1, 2, 3, 4, 8}
    assert {suffix_len for _, suffix_len in cells} == {1, 16, 64, 256, 1024}
    assert max(dense_bytes(*cell) for cell in cells) <= 1 << 29


def test_regret_is_what_the_choice_costs() -> None:
    seconds = {"cascade": 3.0, "batched_gemm": 2.0, "per_row": 4.0, "SDPA": 1.0}
    cell = Cell(GroupShape(1, 1, 1, 1, 1, 1, 4), 1, "cascade", 1.0, 1.0, seconds)
    assert (cell.winner, cell.regret, cell.over_stock) == ("batched_gemm", 1.5, 3.0)
