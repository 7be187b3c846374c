"""Stored prefixes that end earlier than they did: the same ids in other parts, and nothing computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompts import alone, cached, left_padded, new_tokens, prefix_ids, tokens
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import IntegrityError
from hf_granikv.level_cuts import can_be_cut, graft, head_of

ROOT, LONG, TIP, OTHER = (tokens(n, seed=n) for n in (4, 40, 6, 9))
AT = 25
Build = Callable[..., PreTrainedModel]


def stored(model: PreTrainedModel) -> tuple[AsymmetricPagedCache, Any, Any]:
    """A root, a long prefix that keeps a copy of it, and a tip that goes on from that."""
    cache = AsymmetricPagedCache(model.config)
    root = cache.prefill(model, prefix_ids(ROOT))
    long = cache.prefill(model, prefix_ids(LONG), parent=root)
    assert long.num_fused == len(ROOT)
    return cache, long, cache.prefill(model, prefix_ids(TIP), parent=long)


@pytest.mark.parametrize("copies", [False, True], ids=["parts", "copies"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt2", "qwen3_moe"])
def test_rows_over_what_was_cut(tiny_model: Build, name: str, copies: bool) -> None:
    model = tiny_model(name)
    cache, long, tip = stored(model)
    num_bytes, held = cache.stats().hot_bytes, cache.rows.prefixes
    head = head_of(held, long, AT, copies=copies)
    replaced = graft(held, long, head, copies=copies)
    assert replaced.keys() == {long, tip}
    assert [p.stop for p in replaced.values()] == [p.stop for p in replaced]
    assert all(new.chain_ids.tolist() == old.chain_ids.tolist() for old, new in replaced.items())
    assert (head.num_fused, replaced[long].num_fused) == (len(ROOT), 0)
    # nothing was computed or doubled, and what was cut is shown only, unless it was copied
    assert cache.stats().hot_bytes == num_bytes
    shows = {t.untyped_storage().data_ptr() for t in long.keys}
    for part in (head, replaced[long]):
        assert (part.keys[0].untyped_storage().data_ptr() in shows) == (not copies)
    other = cache.prefill(model, prefix_ids(OTHER), parent=head)
    rows = [
        [*ROOT, *LONG, *TIP, *tokens(3, seed=10)],
        [*ROOT, *LONG, *tokens(2, seed=11)],
        [*other.chain_ids.tolist(), *tokens(4, seed=12)],
        [*head.chain_ids.tolist(), *tokens(4, seed=13)],
        [*ROOT, *LONG],
    ]
    prompts = left_padded(rows)
    want = alone(model, rows)
    assert new_tokens(model, prompts, **cached(cache.bind(**prompts))) == want
    cache.check_integrity()
    for prefix in (*replaced.values(), other):
        cache.release(prefix)
    assert cache.stats().hot_tokens == head.stop


def test_a_saved_part_is_what_the_whole_would_be(tiny_model: Build, tmp_path: Any) -> None:
    model = tiny_model("llama")
    cache, long, tip = stored(model)
    head = head_of(cache.rows.prefixes, long, AT, copies=False)
    cut = graft(cache.rows.prefixes, long, head, copies=False)[tip]
    cut.save(tmp_path / "cut")
    other = AsymmetricPagedCache(model.config)
    loaded = other.load(tmp_path / "cut", model)
    assert loaded.chain_ids.tolist() == tip.chain_ids.tolist()
    rows = [[*loaded.chain_ids.tolist(), *tokens(n, seed=n)] for n in (2, 3)]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, **cached(other.bind(**prompts))) == alone(model, rows)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_what_layers_have_forgotten_cannot_be_cut(tiny_model: Build, name: str) -> None:
    model = tiny_model(name)
    cache = AsymmetricPagedCache(model.config)
    assert not can_be_cut(cache.prefill(model, prefix_ids(LONG)))


def test_a_part_that_was_written_to_is_noticed(tiny_model: Build) -> None:
    model = tiny_model("llama")
    cache, long, _ = stored(model)
    head = head_of(cache.rows.prefixes, long, AT, copies=False)
    graft(cache.rows.prefixes, long, head, copies=False)
    cache.check_integrity()
    with torch.no_grad():
        long.keys[0][:, -1] += 1
    with pytest.raises(IntegrityError, match="was written to"):
        cache.check_integrity()


def test_a_head_takes_the_place_of_all_of_a_level(tiny_model: Build) -> None:
    model = tiny_model("llama")
    cache = AsymmetricPagedCache(model.config)
    left, right = (cache.prefill(model, prefix_ids(ids)) for ids in (LONG, [*LONG[:20], 5]))
    held = cache.rows.prefixes
    head = head_of(held, right, 20, copies=True)
    assert head_of(held, head, 20, copies=True) is head
    cut = graft(held, left, head, copies=True) | graft(held, right, head, copies=True)
    assert [level.parent for level in cut.values()] == [head, head]
    twin = cache.prefill(model, prefix_ids(LONG[20:]), parent=head)
    assert twin is cut[left]
