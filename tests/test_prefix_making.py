"""Prefixes that keep the few tokens before them, and prefixes made of what rows hold already."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import HYBRIDS, LOCAL, SHARED_PATH
from prompts import alone, cached, left_padded, new_tokens, prefix_ids, tokens
from test_live_rows import Watched
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.backends import BACKENDS
from hf_granikv.dispatch.device_constants import amx_table, avx2_table, avx512_table
from hf_granikv.dispatch.fusing import fusing_cost
from hf_granikv.dispatch.roofline import DeviceConstants
from hf_granikv.views import GroupShape

ROOT, LONG, TIP = tokens(4, seed=1), tokens(40, seed=2), tokens(6, seed=3)
SHAPE = GroupShape(
    num_rows=1, q_len=1, prefix_len=16, num_kv_heads=3, gqa_ratio=3, head_dim=64, dtype_bytes=4
)


def fused(model: PreTrainedModel) -> Any:
    cache = AsymmetricPagedCache(model.config)
    root = cache.prefill(model, prefix_ids(ROOT))
    long = cache.prefill(model, prefix_ids(LONG), parent=root)
    cache.prefill(model, prefix_ids(TIP), parent=long)
    assert long.num_fused == len(ROOT)
    return cache


@pytest.mark.parametrize("name", [*SHARED_PATH, *LOCAL])
def test_rows_over_fused_levels(tiny_model: Callable[..., PreTrainedModel], name: str) -> None:
    model = tiny_model(name)
    cache, chain = fused(model), [*ROOT, *LONG]
    rows = [
        [*chain, *tokens(3, seed=10)],
        [*ROOT, *tokens(5, seed=11)],
        chain,
        [*chain, *TIP, *tokens(2, seed=12)],
    ]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, num_new=6, **cached(cache.bind(**prompts))) == alone(
        model, rows, num_new=6
    )
    # the long one is read at one depth with its root, the short tip behind it at the next
    assert {group.depth for group, _ in cache.rows.reads.readings()} == {0, 1}
    cache.check_integrity()


def test_hybrids_keep_states_beside_fused_tokens(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_model("qwen3_next")
    cache = fused(model)
    rows = [[*ROOT, *LONG, *tokens(3, seed=seed)] for seed in range(2)]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, **cached(cache.bind(**prompts))) == alone(model, rows)


def test_it_is_said(tiny_model: Callable[..., PreTrainedModel]) -> None:
    assert (
        "fused: a prefix of 40 tokens keeps the 4 before it" in fused(tiny_model("llama")).explain()
    )


def test_a_parent_goes_when_nobody_holds_or_extends_it(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_model("llama")
    cache = AsymmetricPagedCache(model.config)
    root = cache.prefill(model, prefix_ids(ROOT))
    long = cache.prefill(model, prefix_ids(LONG), parent=root)
    cache.release(root)
    assert cache.stats().hot_tokens == len(ROOT) + len(LONG)
    with pytest.raises(ValueError, match="does not hold"):
        cache.release(root)
    cache.release(long)
    assert cache.stats().hot_bytes == 0


@pytest.mark.parametrize(
    "constants", [avx2_table(), avx512_table(), amx_table()], ids=lambda found: found.name
)
def test_copies_do_not_pay_where_the_tokens_are_many_or_merges_cheap(
    constants: DeviceConstants,
) -> None:
    cost = fusing_cost(SHAPE, constants=constants, backends=BACKENDS)
    assert cost.pays
    many = fusing_cost(SHAPE._replace(prefix_len=4096), constants=constants, backends=BACKENDS)
    assert not many.pays
    assert many.apart_s > cost.apart_s


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "gemma3n"])
def test_private_tokens_become_a_prefix_without_being_computed(
    tiny_model: Callable[..., PreTrainedModel], name: str
) -> None:
    model = tiny_model(name)
    held, own = Watched(model), tokens(9, seed=5)
    row = held.start("left")
    held.step({row: own})
    counted: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counted.append(args[0].numel())
    )
    parked = held.live.park(row)
    prefix = held.cache.promote(parked, torch.tensor(own[:7]))
    handle.remove()
    assert not counted
    assert prefix.parent is held.prefixes["left"]
    assert held.cache.promote(parked, torch.tensor(own[:7])) is prefix
    rows = [[*prefix.chain_ids.tolist(), *tokens(n, seed=n)] for n in (3, 5)]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, **cached(held.cache.bind(**prompts))) == alone(model, rows)
    held.cache.check_integrity()


def test_what_cannot_be_promoted_is_refused(tiny_model: Callable[..., PreTrainedModel]) -> None:
    held = Watched(tiny_model("llama"))
    row = held.start("left")
    held.step({row: tokens(3, seed=1)})
    parked = held.live.park(row)
    with pytest.raises(ValueError, match="4 tokens were given of a row that holds 3"):
        held.cache.promote(parked, torch.tensor([1, 2, 3, 4]))
    with pytest.raises(ValueError, match="does not hold"):
        AsymmetricPagedCache(held.model.config).promote(parked, torch.tensor([1]))
    hybrid = Watched(tiny_model(next(iter(HYBRIDS))))
    row = hybrid.start("left")
    hybrid.step({row: tokens(3, seed=1)})
    with pytest.raises(ValueError, match="keep states"):
        hybrid.cache.promote(hybrid.live.park(row), torch.tensor([1, 2]))
