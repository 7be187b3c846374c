"""The compiled last act of a decode step, against the oracle over all keys of each row."""

import pytest
import torch
from decode_rows import NUM_SLOTS, Rows
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention import GroupStates, unsupported_reasons
from hf_granikv.kernels.decode_attention.reference import decode_attention
from hf_granikv.views import PrivateTokens

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@dtypes
@pytest.mark.parametrize(
    ("kv", "gqa", "dim", "value_dim"),
    [(2, 3, 64, None), (1, 1, 16, None), (3, 4, 80, None), (1, 8, 128, None), (2, 2, 48, 20)],
)
def test_equals_attention_over_prefix_and_own_tokens(dtype, kv, gqa, dim, value_dim):
    rows = Rows(dtype, kv=kv, gqa=gqa, dim=dim)
    states = [rows.add_prefix([0, 1, 2, 3, 4], 130)]

    out = rows.attend(*states)

    assert out.dtype == dtype
    assert out.shape == (5, 1, kv * gqa, dim)
    for row in range(5):
        rows.check(out, row)


@dtypes
def test_values_may_be_of_another_width(dtype):
    rows = Rows(dtype, dim=48, value_dim=20)

    out = rows.attend()

    for row in (0, 1, 2, 4):
        rows.check(out, row)


@dtypes
def test_each_row_merges_the_prefixes_that_it_reads(dtype):
    rows = Rows(dtype)
    states = [
        rows.add_prefix([0, 1, 2, 3, 4], 40),
        rows.add_prefix([4, 0], 200, num_pieces=3),
        rows.add_prefix([1, 3], 1),
    ]

    out = rows.attend(*states)

    for row in range(5):
        rows.check(out, row)


@dtypes
@pytest.mark.parametrize(
    ("kv", "gqa", "dim", "value_dim"), [(2, 3, 64, None), (1, 4, 80, None), (2, 2, 48, 20)]
)
def test_tokens_of_segments_are_seen_as_ones_own(dtype, kv, gqa, dim, value_dim):
    rows = Rows(dtype, kv=kv, gqa=gqa, dim=dim, value_dim=value_dim)
    states = [] if value_dim else [rows.add_prefix([1, 4], 40)]
    segments = [rows.add_segment([0, 1, 2, 3, 4], 35), rows.add_segment([3, 0], 100)]
    segments.append(rows.add_segment([2], 1))

    out = rows.attend(*states, segments=segments)

    for row in range(5):
        rows.check(out, row)


@dtypes
def test_rows_see_only_their_span(dtype):
    rows = Rows(dtype)
    rows.spans[0], rows.spans[2] = (2, 4), (30, 33)
    states = [rows.add_prefix([0, 1, 2, 3, 4], 9)]

    out = rows.attend(*states)

    for row in range(5):
        rows.check(out, row)


@dtypes
def test_sinks_take_their_share_once(dtype):
    rows = Rows(dtype)
    sinks = torch.linspace(-3, 4, 6)
    states = [rows.add_prefix([0, 1, 2, 3, 4], 70, num_pieces=2)]

    out = rows.attend(*states, sinks=sinks)

    for row in range(5):
        rows.check(out, row, sinks)


@dtypes
def test_a_row_that_sees_nothing_gets_zeros(dtype):
    rows = Rows(dtype)
    empty = torch.full((1, 5, 2, 3), -torch.inf)

    assert torch.equal(rows.attend()[3], torch.zeros(1, 6, 64, dtype=dtype))
    out = rows.attend(GroupStates(torch.zeros(1, 5, 2, 3, 64), empty, None))

    assert torch.equal(out[3], torch.zeros(1, 6, 64, dtype=dtype))
    for row in (0, 1, 2, 4):
        rows.check(out, row)


@dtypes
@pytest.mark.parametrize("where", ["query", "key", "value", "prefix", "only the prefix"])
def test_what_is_no_number_stays_none(dtype, where):
    """As in stock attention, and in no other row; row 2 has own tokens, row 3 has none."""
    rows = Rows(dtype)
    state, row = rows.add_prefix([0, 1, 2, 3, 4], 60), 3 if where == "only the prefix" else 2
    if where == "query":
        rows.query[row] = torch.nan
        state.out[:, row] = state.lse[:, row] = torch.nan
    elif "prefix" in where:
        state.out[:, row] = state.lse[:, row] = torch.nan
    else:
        rows.storages[where == "value"][:, rows.slots[row, 20]] = torch.nan

    out = rows.attend(state)

    assert out[row].isnan().all()
    for other in {0, 1, 2, 3, 4} - {row}:
        rows.check(out, other)


@dtypes
@pytest.mark.parametrize("dim", [20, 64])
def test_nothing_beside_a_rows_own_tokens_counts(dtype, dim):
    rows = Rows(dtype, dim=dim)
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[torch.from_numpy(rows.slots[rows.slots >= 0])] = False
    for storage in rows.storages:
        storage[:, others] = torch.nan

    out = rows.attend()

    for row in (0, 1, 2, 4):
        rows.check(out, row)


@dtypes
def test_a_query_that_is_no_number_and_has_no_prefix_stays_none(dtype):
    rows = Rows(dtype)
    rows.query[2] = torch.nan

    out = rows.attend()

    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


@dtypes
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_huge_and_tiny_scores_stay_finite(dtype, size):
    rows = Rows(dtype)
    rows.query = rows.query * size
    states = [rows.add_prefix([0, 1, 2, 3, 4], 60)]

    out = rows.attend(*states)

    assert out.isfinite().all()
    if dtype == torch.float32:
        for row in range(5):
            rows.check(out, row)


@dtypes
def test_the_memory_order_of_the_query_does_not_matter(dtype):
    rows = Rows(dtype)
    states = [rows.add_prefix([0, 1, 2, 3, 4], 40)]
    expected = rows.attend(*states)

    rows.query = rows.query.transpose(1, 3).contiguous().transpose(1, 3)

    assert rows.query.stride(3) != 1
    assert torch.equal(rows.attend(*states), expected)


@dtypes
def test_agrees_with_its_reference(dtype):
    rows = Rows(dtype)
    rows.spans[2] = (4, 20)
    sinks = torch.linspace(-3, 4, 6)
    states = [rows.add_prefix([0, 1, 2, 3, 4], 70), rows.add_prefix([1, 4], 30, num_pieces=2)]

    segments = [rows.add_segment([0, 3, 4], 20)]

    out = rows.attend(*states, segments=segments, sinks=sinks)

    kwargs = {"scale": 0.1, "segments": segments, "sinks": sinks}
    want = decode_attention(rows.query, rows.storages, rows.slots, rows.spans, states, **kwargs)
    torch.testing.assert_close(out, want, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(num_threads, same_threads_after):
    rows = Rows(torch.float32)
    states = [rows.add_prefix([0, 2], 60)]
    expected = rows.attend(*states)
    torch.set_num_threads(num_threads)
    assert torch.equal(rows.attend(*states), expected)


def test_a_team_may_have_fewer_threads_than_were_asked_for(monkeypatch):
    """As under `OMP_THREAD_LIMIT`: the rows of the missing ones were left out."""
    rows, run = Rows(torch.float32), compiled.run
    expected = rows.attend()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(compiled, "run", lambda task, numbers, threads: run(task, numbers, 1))

    assert torch.equal(rows.attend(), expected)


def refusals(query: Tensor, rows: Rows) -> str:
    return "; ".join(unsupported_reasons(query, rows.private()))


def test_what_it_cannot_serve_is_refused():
    rows = Rows(torch.float32)

    assert "one query per row" in refusals(rows.query.expand(-1, -1, 2, -1), rows)
    assert "and some rows" in refusals(rows.query[:0], rows)
    assert "float16" in refusals(rows.query.half(), rows)
    assert "of one dtype" in refusals(rows.query.bfloat16(), rows)
    with torch.enable_grad():
        assert "no gradients" in refusals(rows.query, rows)
    given = PrivateTokens.of_tensors(*rows.storages)
    assert any("has changed keys" in why for why in unsupported_reasons(rows.query, given))


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(compiled.SWITCH, "0")
    compiled.load.cache_clear()
    try:
        rows = Rows(torch.float32)
        assert f"{compiled.SWITCH}=0 is set" in refusals(rows.query, rows)
    finally:
        compiled.load.cache_clear()


def test_a_numba_that_fails_is_reported_and_not_used(monkeypatch, caplog):
    def fails(name):
        raise ImportError("Numba needs NumPy 2.2 or less")

    monkeypatch.setattr(compiled, "import_module", fails)
    compiled.load.cache_clear()
    try:
        rows = Rows(torch.float32)
        assert "numba fails: Numba needs NumPy" in refusals(rows.query, rows)
        assert "Compiled kernels are not used" in caplog.text
    finally:
        compiled.load.cache_clear()
