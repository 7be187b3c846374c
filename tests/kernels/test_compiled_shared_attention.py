import os
import subprocess
import sys

import pytest
import torch
from oracle import assert_close, reference

from hf_granikv.backends.base import of_rows
from hf_granikv.kernels import compiled
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.shared_attention import (
    COMPILED,
    TiledAttention,
    VectorAttention,
    _arguments,
    trial,
    unsupported_reasons,
    vectors,
)
from hf_granikv.views import AttentionState

SCALE = 0.1


def kernels():
    for kernel in COMPILED:
        marks = ()
        if missing := kernel.missing():
            marks = pytest.mark.skip(reason=f"no {kernel.name}: {'; '.join(missing)}")
        for dtype in kernel.dtypes:
            name = f"{kernel.__name__}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(kernel, dtype, marks=marks, id=name)


no_vectors = pytest.mark.skipif(
    bool(VectorAttention.missing()), reason=str(VectorAttention.missing())
)
of_all = pytest.mark.parametrize(("kernel", "dtype"), list(kernels()))


def draw(rows, num_q_heads, num_kv_heads, q_len, length, key_dim, value_dim=None, *, dtype):
    generator = torch.Generator().manual_seed(rows * 10_007 + length)
    sizes = [
        (rows, num_q_heads, q_len, key_dim),
        (num_kv_heads, length, key_dim),
        (num_kv_heads, length, value_dim or key_dim),
    ]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def attend(kernel, query, keys, values, scale=SCALE):
    attention = kernel(query, keys, values, scale=scale)
    # nothing may be read that has not been written, and nothing written behind the end
    size = attention._memory.numel()
    attention._memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8)
    attention.task.numbers[_arguments.SCRATCH] = attention._memory.data_ptr()
    for states in attention.states:
        states.fill_(torch.nan)
    # of another layer, where the same object is used
    attention.run(query, values.new_zeros(keys.shape), values)
    attention.run(query, keys, values)
    assert attention._memory[size:].eq(0xFF).all()
    states = of_rows(*attention.states, len(query))
    out, lse = merge_states([AttentionState(*piece) for piece in zip(*states, strict=True)])
    shape = query.shape[:3]
    return AttentionState(out.reshape(*shape, -1), lse.reshape(shape))


def check(kernel, query, keys, values, scale=SCALE):
    out, lse = attend(kernel, query, keys, values, scale)

    stored = (t.expand(len(query), -1, -1, -1) for t in (keys, values))
    ref = reference(query, *stored, scale=scale)
    assert out.dtype == lse.dtype == torch.float32
    assert_close("out", out, ref.out, ref.out_budget)
    assert_close("lse", lse, ref.lse, ref.lse_budget)


@of_all
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 64),
        (16, 9, 3, 1, 4097, 64),
        (3, 8, 8, 1, 63, 128),
        (17, 4, 1, 1, 64, 32, 64),
        (65, 6, 2, 1, 127, 64),
        (2, 12, 2, 5, 1000, 96, 128),
        (1, 16, 16, 1, 700, 192, 128),
        (4, 8, 1, 33, 129, 256),
    ],
    ids=str,
)
def test_equals_dense_attention(kernel, dtype, sizes):
    check(kernel, *draw(*sizes, dtype=dtype))


@pytest.mark.parametrize("dtype", VectorAttention.dtypes)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1),
        (3, 2, 2, 1, 33, 7, 5),
        (5, 12, 3, 3, 100, 80, 24),
        (33, 1, 1, 1, 40, 16),
        (130, 3, 1, 1, 300, 20),
        (2, 4, 2, 101, 90, 48, 12),
    ],
    ids=str,
)
@no_vectors
def test_vectors_take_heads_of_any_size(dtype, sizes):
    check(VectorAttention, *draw(*sizes, dtype=dtype))


@of_all
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 64, 255, 512, 1003, 2000])
def test_pieces_for_threads_hold_every_token_once(monkeypatch, kernel, dtype, threads, length):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    check(kernel, *draw(4, 6, 3, 1, length, 64, dtype=dtype))


@of_all
def test_a_team_may_have_fewer_threads_than_were_asked_for(monkeypatch, kernel, dtype):
    """As under `OMP_THREAD_LIMIT`: what the missing ones would have done was left out."""
    run = compiled.run
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(compiled, "run", lambda task, numbers, threads: run(task, numbers, 1))

    check(kernel, *draw(4, 6, 3, 1, 2000, 64, dtype=dtype))


@of_all
def test_reads_tensors_as_they_lie(kernel, dtype):
    query, keys, values = draw(5, 6, 3, 2, 300, 64, dtype=dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    keys = torch.cat([keys, keys], -1)[..., 64:]
    values = values.transpose(0, 1).contiguous().transpose(0, 1)

    check(kernel, query, keys, values)


@of_all
def test_nothing_beside_the_prefix_counts(kernel, dtype):
    query, *stored = draw(3, 6, 3, 1, 300, 64, dtype=dtype)
    inside = [t.new_full((3, 500, 64), torch.nan) for t in stored]
    for whole, tokens in zip(inside, stored, strict=True):
        whole[:, 100:400] = tokens

    check(kernel, query, *(whole[:, 100:400] for whole in inside))


@of_all
@pytest.mark.parametrize("slope", [300.0, -300.0])
def test_a_running_maximum_survives_rising_and_falling_scores(kernel, dtype, slope):
    query, keys, values = draw(16, 5, 1, 1, 400, 64, dtype=dtype)
    keys = keys + torch.linspace(-slope, slope, 400)[:, None] * query.mean((0, 1)).sign()[0]

    check(kernel, query, keys.to(dtype), values)


@no_vectors
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 1e-4])
def test_vectors_take_any_scale(scale):
    check(VectorAttention, *draw(80, 3, 1, 1, 200, 64, dtype=torch.float32), scale)


@of_all
def test_queries_with_scores_of_any_size_are_apart(kernel, dtype):
    query, keys, values = draw(16, 3, 1, 1, 200, 64, dtype=dtype)
    query *= torch.logspace(-6, 6, 16)[:, None, None, None]

    check(kernel, query.to(dtype), keys, values)


@of_all
def test_copies_of_a_row_give_identical_outputs(kernel, dtype):
    """In the same panel of queries as the first, in one that is not full, in another chunk."""
    query, keys, values = draw(150, 6, 2, 1, 500, 64, dtype=dtype)
    query[[13, 40, 140, 149]] = query[2].clone()

    out, lse = attend(kernel, query, keys, values)

    for row in (13, 40, 140, 149):
        assert torch.equal(out[row], out[2])
        assert torch.equal(lse[row], lse[2])


@of_all
def test_torch_multiplies_rightly_before_and_after(kernel, dtype):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    before = a @ b

    check(kernel, *draw(16, 9, 3, 1, 300, 64, dtype=dtype))

    assert torch.equal(a @ b, before)


def reasons_of(kernel, *tensors):
    return "; ".join(unsupported_reasons(kernel, *tensors))


@of_all
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.double(), "on a CPU"),
        (lambda t: t.to("meta"), "on a CPU"),
        (lambda t: torch.stack([t, t], -1)[..., 0], "side by side"),
        (torch._neg_view, "of the other sign"),
        (lambda t: t[..., :0, :], "there is no key"),
        (lambda t: t[:0] if t.ndim == 4 else t, "there is no query"),
    ],
)
def test_what_it_cannot_do_is_said(kernel, dtype, change, reason):
    tensors = draw(20, 4, 2, 1, 100, 64, dtype=dtype)

    assert reason in reasons_of(kernel, *(change(t) for t in tensors))


def test_tiles_want_whole_tiles():
    tensors = draw(20, 4, 2, 1, 100, 40, dtype=torch.bfloat16)

    assert "values of 64, 128, ..." in reasons_of(TiledAttention, *tensors)


@no_vectors
def test_where_torch_multiplies_bfloat16_fast_it_is_left_to_it(monkeypatch):
    monkeypatch.setattr(vectors, "has_fast_matmul", lambda dtype: True)
    query, *stored = draw(20, 4, 2, 1, 100, 40, dtype=torch.bfloat16)

    assert "bfloat16 in hardware here" in reasons_of(VectorAttention, query, *stored)
    assert "in hardware" not in reasons_of(
        VectorAttention, query.float(), *(t.float() for t in stored)
    )


@of_all
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_no_number_stays_none(kernel, dtype, where):
    query, keys, values = draw(20, 4, 2, 1, 100, 64, dtype=dtype)
    if where == "query":
        query[7, 2:] = torch.nan
    else:
        {"keys": keys, "values": values}[where][1, 40] = torch.nan
    seen = torch.zeros(20, 4, 1, dtype=torch.bool)
    seen[[7] if where == "query" else slice(None), 2:] = True

    out, lse = attend(kernel, query, keys, values)

    assert torch.equal(out.isnan().all(-1), seen)
    assert out[~seen].isfinite().all()
    assert lse[~seen].isfinite().all()


@of_all
def test_queries_lie_anywhere(kernel, dtype):
    query, keys, values = draw(6, 6, 3, 1, 90, 64, dtype=dtype)
    turned = query.transpose(1, 3).contiguous().transpose(1, 3)
    negated = torch._neg_view(-query)
    out, _ = attend(kernel, query[:1].expand(6, -1, -1, -1), keys, values)

    check(kernel, turned, keys, values)
    check(kernel, negated, keys, values)
    assert torch.equal(out, out[:1].expand_as(out))


@no_vectors
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(("heads", "length"), [(1, 40), (2, 700), (5, 300)])
def test_many_queries_are_shared_out_among_threads(monkeypatch, threads, heads, length):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    check(VectorAttention, *draw(40, 2 * heads, heads, 21, length, 16, dtype=torch.float32))


def in_another_process(code, **names):
    command = [sys.executable, "-c", code]
    env = {**os.environ, **names}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@no_vectors
def test_another_default_device_is_no_matter():
    code = """
import torch
from hf_granikv.kernels.shared_attention import VectorAttention
query, (keys, values) = torch.randn(9, 4, 1, 64), torch.randn(2, 2, 50, 64)
torch.set_default_device("meta")
attention = VectorAttention(query, keys, values, scale=0.1)
attention.run(query, keys, values)
print(attention.states.out.isfinite().all().item())
"""
    assert in_another_process(code) == "True\n"


@no_vectors
def test_narrow_registers_give_the_same():
    """As on CPUs without AVX-512."""
    code = """
from hf_granikv.kernels import _numba_products
from hf_granikv.kernels.shared_attention import VectorAttention, trial
assert VectorAttention.missing() == (), VectorAttention.missing()
print(trial.largest_error(VectorAttention), _numba_products.NUM_VECTORS)
"""
    features = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+bmi,+bmi2,+lzcnt"
    names = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    error, num_vectors = in_another_process(code, **names).split()
    assert float(error) <= 1
    assert num_vectors == "1"


@of_all
def test_its_trial_passes(kernel, dtype):
    assert trial.largest_error(kernel) <= 1
