"""Functions that run on prefix and suffix apart: right, lazy, and nothing written to what is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_lazy import ALL_COLUMNS, COLUMNS, HEAD_DIM, HEADS, PREFIX_LEN, ROWS, dense, layer_step
from torch import Tensor
from torch.nn.functional import linear

from hf_granikv.attention import granikv_attention
from hf_granikv.lazy import LazyKeyValue, step_of
from hf_granikv.views import PrivateTokens

KV_LEN = PREFIX_LEN + 4
WEIGHT = torch.randn(12, HEAD_DIM)


def expanded(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Does what latent attention does with what it has cached."""
    size = (latents.shape[0], latents.shape[2], -1, 6)
    both = linear(latents[:, :1] if latents.shape[1] > 1 else latents, WEIGHT)
    both = both.view(size).transpose(1, 2)
    keys, values = torch.split(both, [2, 4], dim=-1)
    rotated = rotated.expand(-1, keys.shape[1], -1, -1)
    whole = both.new_empty(*both.shape[:-1], 2 + HEAD_DIM)
    whole[..., :2].copy_(keys)
    whole[..., 2:].copy_(rotated)
    return whole, values


def one_head(owned: Tensor) -> Any:
    step = layer_step(owned)
    part = step.parts[0]
    return type(step)(
        step.layer_idx,
        step.plan,
        (replace(part, keys=part.keys[:1], values=part.values[:1]),),
        PrivateTokens.of_tensors(*(t[:, :1] for t in step.private.tensors)),
    )


@pytest.mark.parametrize("owned", [ALL_COLUMNS, COLUMNS], ids=["even", "ragged"])
def test_latents_are_expanded_by_parts(owned: Tensor) -> None:
    step = one_head(owned)
    lazy = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    keys, values = expanded(*lazy)
    assert isinstance(keys, LazyKeyValue)
    assert isinstance(values, LazyKeyValue)
    assert not step.plan.journal.dense_reads
    read = step_of(keys, values)
    assert read.parts[0].keys.shape == (2, PREFIX_LEN, 2 + HEAD_DIM), "once, not once per row"
    latents, rotated = (plain(step, owned, is_value=side) for side in (False, True))
    want_keys, want_values = expanded(latents, rotated)
    torch.testing.assert_close(keys.clone(), want_keys)
    torch.testing.assert_close(values.clone(), want_values)


def plain(step: Any, owned: Tensor, *, is_value: bool) -> Tensor:
    part = step.parts[0]
    prefix = part.values if is_value else part.keys
    suffix = step.private.tensors[is_value]
    wide = type(step)(
        step.layer_idx,
        step.plan,
        (replace(part, keys=prefix.expand(HEADS, -1, -1), values=prefix.expand(HEADS, -1, -1)),),
        PrivateTokens.of_tensors(*[suffix.expand(-1, HEADS, -1, -1)] * 2),
    )
    return dense(wide, owned, is_value=is_value)[:, :1]


# not token by token: rows or tokens take part, or the result cannot be told from one that does
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "transpose_of_rows": lambda t: t.transpose(0, 1),
    "view_that_mixes_tokens_and_heads": lambda t: t.reshape(ROWS, -1, HEAD_DIM),
    "view_of_other_rows": lambda t: t.reshape(ROWS * HEADS, KV_LEN, HEAD_DIM),
    "split_of_tokens": lambda t: t.split(3, dim=2),
    "chunk_of_rows": lambda t: t.chunk(3, dim=0),
    "repeat_of_tokens": lambda t: t.repeat(1, 1, 2, 1),
    "repeat_to_more_dimensions": lambda t: t.repeat(2, 1, 1, 1, 1),
    "slice_of_heads": lambda t: t[:, :1],
    "slice_of_width": lambda t: t[..., :2],
    "new_empty_of_another_shape": lambda t: t.new_empty(3).fill_(0.0),
    "linear_over_tokens": lambda t: linear(t.transpose(2, 3), torch.eye(KV_LEN)),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_gets_the_dense_tensor(name: str) -> None:
    step = layer_step(COLUMNS)
    want = MIXED[name](dense(step, COLUMNS, is_value=False))
    got = MIXED[name](LazyKeyValue(step, is_value=False))
    for ours, theirs in zip(as_list(got), as_list(want), strict=True):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)
    assert step.plan.journal.dense_reads == {1: 1}


def as_list(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def test_a_model_that_writes_to_keys_is_attended_densely_and_hot_stays() -> None:
    step = layer_step(ALL_COLUMNS)
    keys, values = LazyKeyValue(step, is_value=False), LazyKeyValue(step, is_value=True)
    before = step.parts[0].keys.clone(), step.private.tensors[0].clone()
    keys[..., :2].copy_(torch.zeros(ROWS, HEADS, KV_LEN, 2))
    keys.mul_(2.0)
    assert torch.equal(step.parts[0].keys, before[0])
    assert torch.equal(step.private.tensors[0], before[1])
    query = torch.randn(ROWS, HEADS, 1, HEAD_DIM)
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    got, _ = granikv_attention(module, query, keys, values, None)
    want_keys = dense(step, ALL_COLUMNS, is_value=False)
    want_keys[..., :2] = 0.0
    want = torch.nn.functional.scaled_dot_product_attention(
        query, want_keys * 2.0, dense(step, ALL_COLUMNS, is_value=True)
    )
    torch.testing.assert_close(got, want.transpose(1, 2))
