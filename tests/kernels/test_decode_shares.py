"""Threads share the tokens of a decode step, not its rows: a long row is read by several of them."""

import pytest
import torch
from decode_rows import Rows

from hf_granikv.kernels import compiled

THREADS = [1, 2, 3, 5, 16]


@pytest.fixture(autouse=True)
def _restored(same_threads_after):
    with torch.no_grad():
        yield


@pytest.fixture
def teams(monkeypatch):
    """How many threads each run asks for; fewer than there are where there is little to read."""
    asked, run = [], compiled.run

    def noted(task, numbers, threads):
        asked.append(threads)
        run(task, numbers, threads)

    monkeypatch.setattr(compiled, "run", noted)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "lengths", [(321,), (200, 0, 150, 1, 64), (5, 290), (1, 1, 1, 300), (64, 128, 129)], ids=str
)
def test_equals_attention_of_each_row(dtype, num_threads, lengths):
    torch.set_num_threads(num_threads)
    everyone = range(len(lengths))
    rows = Rows(dtype, lengths=lengths, kv=3, dim=40, value_dim=24)
    sinks = torch.linspace(-3, 4, 9)
    state = rows.add_prefix(everyone, 70, num_pieces=2)
    segments = [rows.add_segment(everyone[-1:], 133), rows.add_segment(everyone, 90)]

    out = rows.attend(state, segments=segments, sinks=sinks)

    for row in everyone:
        rows.check(out, row, sinks)


@pytest.mark.parametrize("num_threads", THREADS)
def test_without_anything_but_own_tokens(num_threads):
    torch.set_num_threads(num_threads)
    rows = Rows(torch.float32, lengths=(400, 130), kv=1, gqa=1)

    out = rows.attend()

    for row in (0, 1):
        rows.check(out, row)


@pytest.mark.parametrize("place", [0, 150, 299])
def test_what_is_no_number_in_one_piece_spoils_the_row_and_no_other(place):
    torch.set_num_threads(5)
    rows = Rows(torch.float32, lengths=(300, 200), kv=1)
    rows.storages[0][:, rows.slots[0, place]] = torch.nan

    out = rows.attend(rows.add_prefix([0, 1], 60))

    assert out[0].isnan().all()
    rows.check(out, 1)


@pytest.mark.parametrize("far", [0, 299])
def test_pieces_may_differ_by_any_score(far):
    torch.set_num_threads(3)
    rows = Rows(torch.float32, lengths=(300,), kv=1)
    rows.storages[0][:, rows.slots[0, far]] *= 1e4

    rows.check(rows.attend(), 0)


def test_a_team_may_have_any_size(monkeypatch):
    """Fewer threads than were asked for, as under `OMP_THREAD_LIMIT`, and more, as beside others."""
    rows, run = Rows(torch.float32, lengths=(300, 9, 170)), compiled.run
    torch.set_num_threads(8)
    for team in (1, 3, 8):
        monkeypatch.setattr(compiled, "run", lambda task, numbers, _, n=team: run(task, numbers, n))
        out = rows.attend()
        for row in range(3):
            rows.check(out, row)


def test_no_more_threads_are_woken_than_have_something_to_read(teams):
    torch.set_num_threads(16)

    Rows(torch.float32, lengths=(3,), kv=2).attend()
    Rows(torch.float32, lengths=(300,), kv=2).attend()

    assert max(teams[:2]) <= 2
    assert 4 <= teams[2] <= 12
