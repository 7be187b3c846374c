"""Which of its kernels the cascade backend takes."""

import pytest
import torch
from oracle import assert_close, reference

from hf_granikv.backends import BACKENDS
from hf_granikv.kernels import compiled
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.shared_attention import TiledAttention, VectorAttention, vectors
from hf_granikv.views import AttentionState

CASCADE = BACKENDS["cascade"]
needs_vectors = pytest.mark.skipif(
    bool(VectorAttention.missing()), reason=str(VectorAttention.missing())
)


def draw(dtype, rows=20, head_dim=40):
    query = torch.randn(rows, 4, 1, head_dim).to(dtype)
    keys, values = torch.randn(2, 2, 100, head_dim).to(dtype)
    return query, keys, values


def planned(query, keys, values):
    return CASCADE.planned(query, keys, values, scale=0.1, softcap=None)


def is_right(query, keys, values):
    pieces = zip(*planned(query, keys, values)(query, keys, values), strict=True)
    out, _ = merge_states([AttentionState(*piece) for piece in pieces])
    stored = (t.expand(len(query), -1, -1, -1) for t in (keys, values))
    ref = reference(query, *stored, scale=0.1)
    assert_close("out", out.reshape(query.shape), ref.out, ref.out_budget)


@needs_vectors
def test_float32_is_read_in_vector_registers():
    assert planned(*draw(torch.float32)).kernel == "in vector registers"


@needs_vectors
def test_bfloat16_is_where_there_are_no_tiles_and_says_why(monkeypatch):
    monkeypatch.setattr(vectors, "has_fast_matmul", lambda dtype: False)
    said = planned(*draw(torch.bfloat16)).kernel

    assert said.startswith("in vector registers, not in AMX tiles (")
    assert "it takes keys of 32" in said
    is_right(*draw(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_err_on_this_cpu_are_not_used(monkeypatch, dtype):
    monkeypatch.setattr(compiled, "fault", lambda module, trial: "it errs here")
    monkeypatch.setattr(TiledAttention, "missing", staticmethod(lambda: ()))
    monkeypatch.setattr(VectorAttention, "missing", staticmethod(lambda: ()))
    monkeypatch.setattr(vectors, "has_fast_matmul", lambda dtype: False)
    tensors = draw(dtype, head_dim=64)

    assert "not in vector registers (it errs here)" in planned(*tensors).kernel
    is_right(*tensors)


def test_other_dtypes_have_no_kernel_to_speak_of():
    assert planned(*draw(torch.float16)).kernel == ""
