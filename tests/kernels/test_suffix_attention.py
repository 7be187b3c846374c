import pytest
import torch
from oracle import assert_close, reference
from torch import Tensor

from hf_granikv.kernels.suffix_attention import prepare_mask, suffix_attention
from hf_granikv.kernels.suffix_attention.reference import matmul_attention

SCALE = 0.1
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(rows, num_kv_heads, gqa_ratio, q_len, kv_len, head_dim, dtype) -> list[Tensor]:
    """Draws query, keys and values as the model and the pool lay them: tokens before heads."""
    generator = torch.Generator().manual_seed(rows * 10_007 + kv_len)
    sizes = [(q_len, num_kv_heads * gqa_ratio), (kv_len, num_kv_heads), (kv_len, num_kv_heads)]
    return [
        torch.randn(rows, *size, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for size in sizes
    ]


def draw_mask(rows: int, q_len: int, kv_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + kv_len)
    mask = torch.rand(rows, 1, q_len, kv_len, generator=generator) < 0.6
    mask[..., 0] = True
    return mask


SHAPES = [
    pytest.param(1, 1, 1, 1, 1, 16, id="one_of_all"),
    pytest.param(5, 3, 3, 1, 63, 64, id="decode_gqa3"),
    pytest.param(3, 2, 1, 1, 100, 80, id="decode_mha"),
    pytest.param(2, 2, 8, 1, 127, 128, id="decode_gqa8"),
    pytest.param(4, 1, 6, 1, 64, 96, id="decode_gqa6"),
    pytest.param(3, 2, 4, 5, 33, 64, id="several_queries"),
    pytest.param(2, 2, 1, 2, 33, 64, id="several_queries_mha"),
    pytest.param(2, 3, 3, 40, 70, 80, id="many_queries"),
]


@pytest.mark.parametrize("is_blocked", [False, True], ids=["at_once", "in_blocks"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("q_len", [1, 7])
def test_scores_are_soft_capped_whatever_the_blocks(q_len, is_masked, is_blocked, monkeypatch):
    if is_blocked:
        monkeypatch.setattr("hf_granikv.kernels.suffix_attention.reference._MAX_SCORES", 2000)
    query, keys, values = draw(3, 2, 3, q_len, 70, 64, torch.float32)
    mask = draw_mask(3, q_len, 70) if is_masked else None

    state = suffix_attention(query * 4, keys, values, scale=0.5, mask=mask, softcap=3.0)

    ref = reference(query * 4, keys, values, scale=0.5, mask=mask, softcap=3.0)
    assert_close("out", state.out, ref.out, ref.out_budget)
    assert_close("lse", state.lse, ref.lse, ref.lse_budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize(
    ("rows", "num_kv_heads", "gqa_ratio", "q_len", "kv_len", "head_dim"), SHAPES
)
def test_equals_dense_attention(
    rows, num_kv_heads, gqa_ratio, q_len, kv_len, head_dim, is_masked, dtype
):
    query, keys, values = draw(rows, num_kv_heads, gqa_ratio, q_len, kv_len, head_dim, dtype)
    mask = draw_mask(rows, q_len, kv_len) if is_masked else None

    state = suffix_attention(query, keys, values, scale=SCALE, mask=mask)

    ref = reference(query, keys, values, scale=SCALE, mask=mask)
    assert state.lse.dtype == torch.float32
    assert_close("out", state.out, ref.out, ref.out_budget)
    assert_close("lse", state.lse, ref.lse, ref.lse_budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_masked", [False, True], ids=["open", "masked"])
def test_plain_products_equal_dense_attention(dtype, is_masked):
    query, keys, values = draw(3, 4, 1, 5, 33, 80, dtype)
    mask = draw_mask(3, 5, 33) if is_masked else None
    bias = prepare_mask(mask, dtype).bias if is_masked else None

    out, lse = matmul_attention(query, keys, values, scale=SCALE, bias=bias)

    ref = reference(query, keys, values, scale=SCALE, mask=mask)
    assert_close("out", out, ref.out, ref.out_budget)
    assert_close("lse", lse, ref.lse, ref.lse_budget)


def test_plain_products_give_an_empty_state_where_all_is_hidden():
    query, keys, values = draw(2, 3, 1, 1, 9, 16, torch.float32)

    out, lse = matmul_attention(query, keys, values, scale=SCALE, bias=torch.full((9,), -torch.inf))

    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("gqa_ratio", [1, 3, 8])
def test_a_query_that_sees_nothing_gets_an_empty_state(q_len, gqa_ratio, dtype):
    query, keys, values = draw(4, 2, gqa_ratio, q_len, 33, 64, dtype)
    mask = draw_mask(4, q_len, 33)
    mask[1] = False
    mask[3, :, q_len - 1] = False
    hidden = ~mask.any(-1).expand(4, 2 * gqa_ratio, q_len)

    state = suffix_attention(query, keys, values, scale=SCALE, mask=mask)

    assert torch.equal(state.lse.isneginf(), hidden)
    assert (state.out[hidden] == 0).all()
    assert state.out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("garbage", [6e4, torch.nan, torch.inf])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_hidden_keys_may_hold_garbage(softcap, garbage, q_len, dtype):
    query, keys, values = draw(3, 2, 3, q_len, 33, 64, dtype)
    mask = draw_mask(3, q_len, 33)
    mask[..., 10:20] = False
    mask[2] = False
    clean = suffix_attention(query, keys, values, scale=SCALE, mask=mask, softcap=softcap)

    keys[:, :, 10:20] = garbage
    values[:, :, 10:20] = -garbage
    keys[2] = -garbage
    values[2] = garbage
    dirty = suffix_attention(query, keys, values, scale=SCALE, mask=mask, softcap=softcap)

    if garbage == 6e4:
        assert torch.equal(clean.out, dirty.out)
        assert torch.equal(clean.lse, dirty.lse)
    # what is no number is left out in a copy, whose products may sum in another order
    torch.testing.assert_close(clean.out.to(dtype), dirty.out.to(dtype))
    torch.testing.assert_close(clean.lse, dirty.lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_keys_give_an_empty_state(dtype):
    query, keys, values = draw(3, 2, 3, 2, 0, 64, dtype)

    state = suffix_attention(query, keys, values, scale=SCALE, mask=None)

    assert torch.equal(state.out, torch.zeros(query.shape))
    assert torch.equal(state.lse, torch.full(query.shape[:3], -torch.inf))


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_prepared_mask_gives_the_same_result(q_len):
    query, keys, values = draw(3, 2, 3, q_len, 33, 64, torch.float32)
    mask = draw_mask(3, q_len, 33)
    mask[0] = False

    from_bool = suffix_attention(query, keys, values, scale=SCALE, mask=mask)
    prepared = prepare_mask(mask, query.dtype)
    from_prepared = suffix_attention(query, keys, values, scale=SCALE, mask=prepared)

    assert all(map(torch.equal, from_bool, from_prepared))


def test_keys_expanded_over_rows_equal_repeated_keys():
    query, keys, values = draw(4, 2, 3, 1, 50, 64, torch.float32)
    expanded = suffix_attention(
        query, keys[:1].expand(4, -1, -1, -1), values[:1].expand(4, -1, -1, -1), scale=1, mask=None
    )
    repeated = suffix_attention(
        query, keys[:1].repeat(4, 1, 1, 1), values[:1].repeat(4, 1, 1, 1), scale=1, mask=None
    )

    assert all(map(torch.equal, expanded, repeated))
