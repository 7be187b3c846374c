import pytest
import torch
from oracle import assert_close, dense_attention, reference
from torch import Tensor

from hf_granikv.kernels.merge_states import merge_states, merged_out
from hf_granikv.views import AttentionState

SHAPE = (3, 6, 2, 80)  # [rows, num_q_heads, q_len, head_dim]


def part(query: Tensor, keys: Tensor, values: Tensor) -> AttentionState:
    out, lse = dense_attention(query, keys, values, scale=0.1)
    return AttentionState(out.float(), lse.float())


def state(lse: float, fill: float) -> AttentionState:
    return AttentionState(torch.full(SHAPE, fill), torch.full(SHAPE[:3], lse))


EMPTY = state(-torch.inf, 0.0)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(SHAPE), torch.randn(3, 2, 127, 80), torch.randn(3, 2, 127, 80)


@pytest.mark.parametrize("bounds", [[127], [0, 127], [1, 127], [63, 64, 127], [10, 40, 41, 127]])
def test_parts_merge_to_the_attention_over_all_keys(inputs, bounds):
    query, keys, values = inputs
    starts = [0, *bounds[:-1]]
    cuts = [slice(start, stop) for start, stop in zip(starts, bounds, strict=True)]
    parts = [part(query, keys[:, :, cut], values[:, :, cut]) for cut in cuts]

    merged = merge_states(parts)

    ref = reference(query, keys, values, scale=0.1)
    assert_close("out", merged.out, ref.out, ref.out_budget)
    assert_close("lse", merged.lse, ref.lse, ref.lse_budget)
    assert torch.equal(merged_out(parts), merged.out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parts_are_merged_in_float32(dtype):
    a = AttentionState(torch.full(SHAPE, 1.0, dtype=dtype), torch.zeros(SHAPE[:3]))
    b = AttentionState(torch.full(SHAPE, 1.0, dtype=dtype) * 1.0078125, torch.zeros(SHAPE[:3]))

    merged = merge_states([a, b])

    assert merged.out.dtype == torch.float32
    assert_close("out", merged.out, torch.full(SHAPE, (1 + b.out[0, 0, 0, 0].item()) / 2), 1e-7)


@pytest.mark.parametrize("is_empty_first", [True, False])
def test_an_empty_part_changes_nothing(inputs, is_empty_first):
    full = part(*inputs)

    merged = merge_states([EMPTY, full] if is_empty_first else [full, EMPTY])

    assert torch.equal(merged.out, full.out)
    assert torch.equal(merged.lse, full.lse)


@pytest.mark.parametrize("count", [2, 3])
def test_empty_parts_merge_to_an_empty_part(count):
    merged = merge_states([EMPTY] * count)

    assert torch.equal(merged.out, EMPTY.out)
    assert torch.equal(merged.lse, EMPTY.lse)


def test_emptiness_is_decided_per_query(inputs):
    full = part(*inputs)
    lse = full.lse.clone()
    lse[1, :, 0] = -torch.inf
    out = full.out.clone()
    out[1, :, 0] = 0.0

    merged = merge_states([AttentionState(out, lse), EMPTY])

    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


@pytest.mark.parametrize("low", [-1e4, -3e38])
@pytest.mark.parametrize("is_high_first", [True, False])
def test_a_huge_score_gap_leaves_the_larger_part(low, is_high_first):
    high, negligible = state(1e4, 2.0), state(low, -5.0)

    merged = merge_states([high, negligible] if is_high_first else [negligible, high])

    assert torch.equal(merged.out, high.out)
    assert torch.equal(merged.lse, high.lse)


def test_equal_parts_with_huge_scores_average():
    merged = merge_states([state(1e4, 1.0), state(1e4, 3.0)])

    assert_close("out", merged.out, torch.full(SHAPE, 2.0), 1e-6)


def test_permuted_strides_give_the_same_result(inputs):
    """vllm-project/vllm #22003: sums in another memory order were read as if in this one."""
    query, keys, values = inputs
    a = part(query, keys[:, :, :60], values[:, :, :60])
    b = part(query, keys[:, :, 60:], values[:, :, 60:])
    permuted = AttentionState(
        b.out.transpose(1, 2).contiguous().transpose(1, 2),
        b.lse.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    assert not permuted.out.is_contiguous()

    # not equal to the bit: torch's vector and scalar loops round exponentials apart
    merged, plain = merge_states([a, permuted]), merge_states([a, b])
    assert_close("out", merged.out, plain.out, 1e-6)
    assert_close("lse", merged.lse, plain.lse, 1e-6)


def test_inputs_are_left_alone(inputs):
    a, b = part(*inputs), state(0.5, 1.0)
    before = [t.clone() for t in (*a, *b)]

    merge_states([a, b])

    assert all(map(torch.equal, before, (*a, *b)))


def test_a_nan_is_not_hidden():
    assert merge_states([state(torch.nan, 0.0), state(0.0, 1.0)]).out.isnan().all()


def test_no_states_is_an_error():
    with pytest.raises(ValueError, match="no states"):
        merge_states([])
