import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hf_granikv.attention import granikv_attention
from hf_granikv.journal import Journal
from hf_granikv.lazy import LazyKeyValue
from hf_granikv.views import LayerStep, PrefixGroup, PrefixPart, PrivateTokens, StepPlan

ROWS, HEADS, PREFIX_LEN, HEAD_DIM = 3, 2, 5, 4
# which columns since the prefix hold a token: pads to the left, in the middle, and nowhere
COLUMNS = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=torch.bool)
ALL_COLUMNS = torch.ones_like(COLUMNS)


def layer_step(
    owned: Tensor, *, q_len: int = 1, layer_idx: int = 1, width: int = HEAD_DIM
) -> LayerStep:
    lengths = owned.sum(1)
    is_even = bool(owned.all())
    suffix_shape = (ROWS, HEADS, int(lengths.max()))
    before = lengths[:, None] - owned[:, -q_len:].sum(1, keepdim=True)
    seen = before + owned[:, -q_len:].cumsum(1)
    mask = torch.arange(int(lengths.max())) < seen[:, None, :, None]
    plan = StepPlan(
        num_rows=ROWS,
        q_len=q_len,
        prefix_lens=np.full(ROWS, PREFIX_LEN),
        kv_len=PREFIX_LEN + owned.shape[1],
        suffix_mask=None if is_even and q_len == 1 else mask,
        positions=(PREFIX_LEN + seen - 1).numpy(),
        is_token=owned[:, -q_len:].numpy(),
        column_index=None if is_even else (owned.cumsum(1) - 1).clamp_min(0),
        dense_reason=None,
        dense_refusal=None,
        why_unmasked=None,
        dispatch="auto",
        journal=Journal(),
    )
    return LayerStep(
        layer_idx,
        plan,
        (
            PrefixPart(
                PrefixGroup(None, 0, 0, PREFIX_LEN),
                torch.randn(HEADS, PREFIX_LEN, HEAD_DIM),
                torch.randn(HEADS, PREFIX_LEN, width),
                0,
            ),
        ),
        PrivateTokens.of_tensors(
            torch.randn(*suffix_shape, HEAD_DIM), torch.randn(*suffix_shape, width)
        ),
    )


def dense(step: LayerStep, owned: Tensor, *, is_value: bool) -> Tensor:
    """Puts every token where its column is, one by one; a pad repeats the token before it."""
    prefix = step.parts[0].values if is_value else step.parts[0].keys
    suffix = step.private.tensors[is_value]
    out = torch.empty(ROWS, HEADS, PREFIX_LEN + owned.shape[1], suffix.shape[-1])
    for row in range(ROWS):
        out[row, :, :PREFIX_LEN] = prefix
        for column in range(owned.shape[1]):
            token = max(0, int(owned[row, : column + 1].sum()) - 1)
            out[row, :, PREFIX_LEN + column] = suffix[row, :, token]
    return out


OTHER = torch.randn(ROWS, HEADS, PREFIX_LEN + 4, HEAD_DIM)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda t: torch.cat((OTHER, t), dim=2),
    "stack_with_itself": lambda t: torch.stack([t, t]),
    "matmul": lambda t: torch.matmul(OTHER, t.transpose(2, 3)),
    "matmul_by_keyword": lambda t: torch.matmul(input=t, other=OTHER.mT),
    "operator": lambda t: OTHER @ t.mT,
    "reflected_operator": lambda t: 1.0 - t,
    "einsum": lambda t: torch.einsum("bhqd,bhkd->bhqk", OTHER, t),
    "getitem": lambda t: t[:, 1:, -3:],
    "getitem_by_mask": lambda t: t[COLUMNS.any(1)],
    "where": lambda t: torch.where(t > 0, t, OTHER),
    "transpose": lambda t: t.transpose(1, 2),
    "permute": lambda t: t.permute(3, 0, 2, 1),
    "reshape": lambda t: t.reshape(ROWS, HEADS, -1),
    "view": lambda t: t.view(ROWS * HEADS, -1, HEAD_DIM),
    "expand": lambda t: t[:, :, None].expand(-1, -1, 3, -1, -1),
    "repeat": lambda t: t.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(2, dim=1),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "to": lambda t: t.to(torch.float64),
    "half": lambda t: t.bfloat16(),
    "cpu": lambda t: t.cpu(),
    "split": lambda t: t.split(2, dim=2),
    "chunk": lambda t: torch.chunk(t, 2, dim=1),
    "unbind": lambda t: torch.unbind(t),
    "iteration": lambda t: list(t),
    "max_with_indices": lambda t: t.max(dim=2),
    "linear": lambda t: nn.functional.linear(t, OTHER[0, 0]),
    "sdpa": lambda t: scaled_dot_product_attention(OTHER, t, t),
    "index_select": lambda t: t.index_select(0, torch.tensor([2, 0])),
    "zeros_like": lambda t: torch.zeros_like(t),
    "strides": lambda t: (t.stride(), t.is_contiguous()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().sum(),
    "bool": lambda t: bool((t == t).all()),
    "op_by_name": lambda t: torch.ops.aten.add.Tensor(t, OTHER),
}


# these go token by token, and so leave it lazy; see test_tokenwise.py
BY_PARTS = {"transpose", "repeat", "contiguous", "chunk", "linear"}


def assert_same(got: Any, want: Any) -> None:
    if isinstance(got, LazyKeyValue):
        assert got.shape == want.shape
        got = got.clone()
    if isinstance(want, Tensor):
        assert type(got) is Tensor
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, (tuple, list)) and any(isinstance(part, Tensor) for part in want):
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)
    else:
        assert got == want


@pytest.mark.parametrize("owned", [ALL_COLUMNS, COLUMNS], ids=["even", "ragged"])
@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_torch_function_sees_the_dense_tensor(name: str, is_value: bool, owned: Tensor) -> None:
    step = layer_step(owned)
    want = FUNCTIONS[name](dense(step, owned, is_value=is_value))
    got = FUNCTIONS[name](LazyKeyValue(step, is_value=is_value))
    assert bool(step.plan.journal.dense_reads) == (name not in BY_PARTS)
    assert_same(got, want)


def test_torch_equal_compares_two_lazy_tensors() -> None:
    step = layer_step(COLUMNS)
    keys, values = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    assert torch.equal(keys, LazyKeyValue(step, is_value=False))
    assert not torch.equal(keys, values)


def test_callers_below_the_python_functions_see_the_dense_tensor() -> None:
    step = layer_step(COLUMNS)
    lazy = LazyKeyValue(step, is_value=False)
    with torch._C.DisableTorchFunctionSubclass():
        got = lazy + 1
    assert torch.equal(got, dense(step, COLUMNS, is_value=False) + 1)


METADATA: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "shape": (lambda t: tuple(t.shape), (ROWS, HEADS, PREFIX_LEN + 4, HEAD_DIM)),
    "size": (lambda t: tuple(t.size()), (ROWS, HEADS, PREFIX_LEN + 4, HEAD_DIM)),
    "size_of_a_dimension": (lambda t: t.size(-2), PREFIX_LEN + 4),
    "ndim": (lambda t: t.ndim, 4),
    "dim": (lambda t: t.dim(), 4),
    "numel": (lambda t: t.numel(), ROWS * HEADS * (PREFIX_LEN + 4) * HEAD_DIM),
    "dtype": (lambda t: t.dtype, torch.float32),
    "device": (lambda t: t.device, torch.device("cpu")),
    "is_cuda": (lambda t: t.is_cuda, False),
    "requires_grad": (lambda t: t.requires_grad, False),
    "is_floating_point": (lambda t: t.is_floating_point(), True),
    "isinstance": (lambda t: isinstance(t, Tensor), True),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_answered_without_building_anything(name: str) -> None:
    step = layer_step(COLUMNS)
    ask, want = METADATA[name]
    assert ask(LazyKeyValue(step, is_value=False)) == want
    assert not step.plan.journal.dense_reads


def test_to_where_it_is_leaves_it_lazy() -> None:
    """Layers that read another layer's keys move them to their own device first."""
    step = layer_step(ALL_COLUMNS)
    lazy = LazyKeyValue(step, is_value=False)
    assert lazy.to(torch.device("cpu")) is lazy
    assert lazy.to(torch.float32) is lazy
    assert not step.plan.journal.dense_reads
    assert lazy.to(torch.float64).dtype == torch.float64
    assert lazy.to("cpu", copy=True) is not lazy
    assert step.plan.journal.dense_reads


def test_a_lazy_tensor_holds_no_storage() -> None:
    lazy = LazyKeyValue(layer_step(ALL_COLUMNS), is_value=False)
    with torch._C.DisableTorchFunctionSubclass():
        assert lazy.untyped_storage().nbytes() in (0, lazy.numel() * 4)
        assert lazy.data_ptr() == 0


def test_values_may_be_wider_than_keys() -> None:
    step = layer_step(COLUMNS, width=7)
    assert LazyKeyValue(step, is_value=True).shape[-1] == 7
    want = dense(step, COLUMNS, is_value=True)
    assert torch.equal(LazyKeyValue(step, is_value=True).clone(), want)


def test_the_dense_tensor_is_built_once_and_each_side_is_counted() -> None:
    step = layer_step(COLUMNS)
    keys, values = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    assert torch.equal(keys + 0, keys.clone())
    values.sum()
    assert step.plan.journal.dense_reads == {1: 2}


def test_a_materialised_layer_is_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    step = layer_step(ALL_COLUMNS, layer_idx=6)
    with caplog.at_level(logging.INFO, logger="hf_granikv"):
        LazyKeyValue(step, is_value=False).sum()
        LazyKeyValue(step, is_value=True).sum()
    assert [r.getMessage() for r in caplog.records if "Layer 6" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    (line,) = step.plan.journal.lines()
    assert "1 layers were put together 2 times" in line
    assert "sum" in line


@pytest.mark.parametrize("q_len", [1, 2], ids=["decode", "two_new"])
@pytest.mark.parametrize("owned", [ALL_COLUMNS, COLUMNS], ids=["even", "ragged"])
def test_the_attention_function_attends_without_materialising(owned: Tensor, q_len: int) -> None:
    step = layer_step(owned, q_len=q_len)
    query = torch.randn(ROWS, 2 * HEADS, q_len, HEAD_DIM)
    lazy = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    got, _ = granikv_attention(nn.Module(), query, *lazy, None, scaling=0.3)
    assert not step.plan.journal.dense_reads
    keys, values = (dense(step, owned, is_value=side) for side in (False, True))
    visible = torch.cat([torch.ones(ROWS, PREFIX_LEN, dtype=torch.bool), owned], 1)
    newest = (
        torch.arange(visible.shape[1]) <= visible.shape[1] - q_len + torch.arange(q_len)[:, None]
    )
    mask = visible[:, None, None] & newest
    want = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    is_token = owned[:, -q_len:]
    torch.testing.assert_close(got[is_token], want[is_token], atol=1e-5, rtol=1e-5)


def test_dropout_goes_the_dense_way_and_says_so() -> None:
    step = layer_step(ALL_COLUMNS)
    lazy = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    module = nn.Module()
    module.num_key_value_groups = 1
    granikv_attention(module, torch.randn(ROWS, HEADS, 1, HEAD_DIM), *lazy, None, dropout=0.1)
    assert "dropout is 0.1" in step.plan.journal.lines()[0]


@pytest.mark.parametrize(
    "extra", [{"s_aux": torch.zeros(HEADS)}, {"softcap": 30.0}], ids=["s_aux", "softcap"]
)
def test_what_no_path_serves_is_refused_by_name(extra: dict[str, Any]) -> None:
    step = layer_step(ALL_COLUMNS)
    lazy = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    query, module = torch.randn(ROWS, HEADS, 1, HEAD_DIM), nn.Module()
    with pytest.raises(NotImplementedError, match=next(iter(extra))):
        granikv_attention(module, query, *lazy, None, dropout=0.1, **extra)
