import pytest
import torch
from oracle import assert_close, reference

from hf_granikv.backends.base import of_rows
from hf_granikv.kernels import compiled
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.shared_attention import TiledAttention, trial, unsupported_reasons
from hf_granikv.views import AttentionState

SCALE = 0.1


def draw(rows, num_q_heads, num_kv_heads, q_len, length, key_dim, value_dim=None):
    generator = torch.Generator().manual_seed(rows * 10_007 + length)
    sizes = [
        (rows, num_q_heads, q_len, key_dim),
        (num_kv_heads, length, key_dim),
        (num_kv_heads, length, value_dim or key_dim),
    ]
    return [torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes]


if missing := unsupported_reasons(*draw(1, 1, 1, 1, 1, 64)):
    pytest.skip(f"no tiles: {'; '.join(missing)}", allow_module_level=True)


def attend(query, keys, values):
    assert not unsupported_reasons(query, keys, values)
    tiled = TiledAttention(query, keys, values, scale=SCALE)
    # of another layer, where the same object is used
    tiled.run(query, values.new_zeros(keys.shape), values)
    tiled.run(query, keys, values)
    states = of_rows(*tiled.states, len(query))
    out, lse = merge_states([AttentionState(*piece) for piece in zip(*states, strict=True)])
    shape = query.shape[:3]
    return AttentionState(out.reshape(*shape, -1), lse.reshape(shape))


def check(query, keys, values):
    out, lse = attend(query, keys, values)

    ref = reference(query, *(t.expand(len(query), -1, -1, -1) for t in (keys, values)), scale=SCALE)
    assert out.dtype == lse.dtype == torch.float32
    assert_close("out", out, ref.out, ref.out_budget)
    assert_close("lse", lse, ref.lse, ref.lse_budget)


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
def test_equals_dense_attention(sizes):
    check(*draw(*sizes))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 64, 255, 512, 1003, 2000])
def test_pieces_for_threads_hold_every_token_once(monkeypatch, threads, length):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    check(*draw(4, 6, 3, 1, length, 64))


def test_a_team_may_have_fewer_threads_than_were_asked_for(monkeypatch):
    """As under `OMP_THREAD_LIMIT`: what the missing ones would have done was left out."""
    run = compiled.run
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(compiled, "run", lambda task, numbers, threads: run(task, numbers, 1))

    check(*draw(4, 6, 3, 1, 2000, 64))


def test_reads_tensors_as_they_lie():
    query, keys, values = draw(5, 6, 3, 2, 300, 64)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    keys = torch.cat([keys, keys], -1)[..., 64:]
    values = values.transpose(0, 1).contiguous().transpose(0, 1)

    check(query, keys, values)


def test_nothing_beside_the_prefix_counts():
    query, *stored = draw(3, 6, 3, 1, 300, 64)
    inside = [t.new_full((3, 500, 64), torch.nan) for t in stored]
    for whole, tokens in zip(inside, stored, strict=True):
        whole[:, 100:400] = tokens

    check(query, *(whole[:, 100:400] for whole in inside))


@pytest.mark.parametrize("slope", [300.0, -300.0])
def test_a_running_maximum_survives_rising_and_falling_scores(slope):
    query, keys, values = draw(1, 5, 1, 1, 400, 64)
    keys = keys + torch.linspace(-slope, slope, 400)[:, None] * query.mean(1).sign()[0]

    check(query, keys.to(torch.bfloat16), values)


def test_queries_with_scores_of_any_size_are_apart():
    query, keys, values = draw(16, 3, 1, 1, 200, 64)
    query *= torch.logspace(-6, 6, 16)[:, None, None, None]

    check(query.to(torch.bfloat16), keys, values)


def test_copies_of_a_row_give_identical_outputs():
    query, keys, values = draw(20, 6, 2, 1, 500, 64)
    query[13] = query[2]

    out, lse = attend(query, keys, values)

    assert torch.equal(out[13], out[2])
    assert torch.equal(lse[13], lse[2])


def test_torch_multiplies_rightly_before_and_after():
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    before = a @ b

    check(*draw(16, 9, 3, 1, 300, 64))

    assert torch.equal(a @ b, before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.float(), "bfloat16"),
        (lambda t: t[..., :40], "64, 128"),
        (lambda t: torch.stack([t, t], -1)[..., 0], "side by side"),
        (lambda t: t[..., :0, :], "and some"),
        (lambda t: t[:0] if t.ndim == 4 else t, "no query"),
    ],
)
def test_what_it_cannot_do_is_said(change, reason):
    tensors = draw(2, 4, 2, 1, 100, 64)

    reasons = unsupported_reasons(*(change(t) for t in tensors))

    assert reason in "; ".join(reasons)


def test_its_trial_passes():
    assert trial.largest_error() <= 1
