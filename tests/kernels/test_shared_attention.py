import pytest
import torch
from oracle import assert_close, reference
from torch import Tensor

from hf_granikv.kernels import cpu
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.shared_attention import (
    flash_shared_attention,
    gemm_shared_attention,
)
from hf_granikv.kernels.shared_attention import reference as implementation
from hf_granikv.views import AttentionState

OPS = [flash_shared_attention, gemm_shared_attention]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.1


def draw(num_queries: int, prefix_len: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_queries * 10_007 + prefix_len)
    sizes = (num_queries, prefix_len, prefix_len)
    return [torch.randn(2, size, head_dim, generator=generator).to(dtype) for size in sizes]


def check(op, query: Tensor, keys: Tensor, values: Tensor) -> None:
    out, lse = attend(op, query, keys, values)

    ref = reference(query[None], keys[None], values[None], scale=SCALE)
    assert lse.dtype == torch.float32
    assert_close("out", out[None], ref.out, ref.out_budget)
    assert_close("lse", lse[None], ref.lse, ref.lse_budget)


def attend(op, *tensors: Tensor) -> AttentionState:
    pieces = zip(*op(*tensors, scale=SCALE), strict=True)
    return merge_states([AttentionState(*piece) for piece in pieces])


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(implementation, "_MIN_TILE", 48)
    monkeypatch.setattr(implementation, "_CPU_TILE_BYTES", 0)
    monkeypatch.setattr(implementation, "_CPU_QUERY_BLOCK", 40)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_queries", "prefix_len", "head_dim"),
    [(1, 1, 16), (3, 63, 80), (1, 1000, 64), (65, 64, 128), (100, 127, 96), (600, 130, 64)],
)
def test_equals_dense_attention(op, dtype, num_queries, prefix_len, head_dim):
    check(op, *draw(num_queries, prefix_len, head_dim, dtype))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix_len", [1, 47, 48, 49, 96, 127, 1000])
@pytest.mark.parametrize("num_queries", [1, 40, 95])
def test_tiles_join_without_a_seam(dtype, prefix_len, num_queries):
    check(gemm_shared_attention, *draw(num_queries, prefix_len, 64, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("prefix_len", [5, 60, 61, 64, 1003])
def test_pieces_of_a_prefix_hold_every_token_once(monkeypatch, dtype, num_pieces, prefix_len):
    monkeypatch.setattr(cpu, "num_pieces", lambda num_heads, kv_len: num_pieces)
    query, keys, values = draw(12, prefix_len, 64, dtype)

    out, lse = flash_shared_attention(query, keys, values, scale=SCALE)

    assert out.shape[0] == lse.shape[0] == num_pieces
    check(flash_shared_attention, query, keys, values)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, keys, values)]
    check(flash_shared_attention, *strided)


@pytest.mark.parametrize(
    ("num_heads", "kv_len", "threads", "expected"),
    [
        (3, 4096, 1, 1),
        (3, 4096, 2, 2),
        (8, 4096, 2, 1),
        (3, 1500, 2, 1),
        (3, 9000, 64, 8),
        (3, 1, 2, 1),
    ],
)
def test_threads_get_as_many_keys_each(monkeypatch, num_heads, kv_len, threads, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    assert cpu.num_pieces(num_heads, kv_len) == expected


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("slope", [300.0, -300.0])
def test_a_running_maximum_survives_rising_and_falling_scores(slope):
    query, keys, values = draw(5, 400, 16, torch.float32)
    keys += torch.linspace(-slope, slope, 400)[:, None] * query.mean(1, keepdim=True).sign()

    check(gemm_shared_attention, query, keys, values)


@pytest.mark.usefixtures("small_tiles")
def test_products_in_half_precision_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr(implementation, "has_fast_matmul", lambda dtype: True)

    check(gemm_shared_attention, *draw(20, 200, 64, torch.bfloat16))


@pytest.mark.usefixtures("small_tiles")
def test_score_memory_is_bounded_by_the_tile(monkeypatch):
    widths = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: widths.append(b.shape[-1]) or bmm(a, b))

    gemm_shared_attention(*draw(30, 1000, 16, torch.float32), scale=SCALE)

    assert max(widths) == 48


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_prefix_gives_an_empty_state(op, dtype):
    out, lse = attend(op, *draw(7, 0, 16, dtype))

    assert torch.equal(out, torch.zeros(2, 7, 16))
    assert torch.equal(lse, torch.full((2, 7), -torch.inf))


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs_give_the_same_result(op):
    query, keys, values = draw(9, 130, 64, torch.float32)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, keys, values)]

    check(op, *strided)


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_left_alone(op):
    tensors = draw(9, 130, 64, torch.float32)
    before = [t.clone() for t in tensors]

    op(*tensors, scale=SCALE)

    assert all(map(torch.equal, before, tensors))


@pytest.mark.parametrize("op", OPS)
def test_large_scores_do_not_overflow(op):
    query, keys, values = draw(9, 130, 64, torch.float32)

    out, lse = attend(op, query * 300, keys * 300, values)

    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert lse.max() > 1000
