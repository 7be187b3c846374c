"""A stored prefix and the only one that extends it as one: the same rows, and nothing computed."""

from collections.abc import Callable
from typing import Any

import pytest
from families import LOCAL
from prompts import alone, cached, left_padded, new_tokens, prefix_ids, tokens
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.level_merges import merge

Build = Callable[..., PreTrainedModel]
FAMILIES = ["llama", "deepseek_v3", "gpt2", "qwen3_moe", *LOCAL]
# tokens of the root, of a level and of its child. Windows are of 8; a prefix of 8 times as many keeps
# those before it
LENGTHS = {
    "all kept": (10, 12, 5),
    "within a window": (10, 3, 3),
    "after a window": (10, 5, 11),
    "parent keeps the root": (4, 40, 6),
    "child keeps its parent": (10, 3, 30),
    "both keep what is before": (1, 3, 40),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_over_what_was_merged(tiny_model: Build, name: str, lengths: str) -> None:
    model = tiny_model(name)
    cache = AsymmetricPagedCache(model.config)
    held, chain = cache.rows.prefixes, []
    for seed, length in enumerate((*LENGTHS[lengths], 4)):
        parent = chain[-1] if chain else None
        chain.append(cache.prefill(model, prefix_ids(tokens(length, seed=seed)), parent=parent))
    root, level, child, tip = chain
    replaced = merge(held, level, child, cache.rows.layers)
    merged = replaced[child]
    assert replaced.keys() == {child, tip}
    assert (merged.parent, replaced[tip].parent) == (root, merged)
    for old, new in replaced.items():
        assert new.chain_ids.tolist() == old.chain_ids.tolist()
    assert set(held.all) == {root, *replaced.values()}
    # what layers keep is what they would if both had been computed at once
    other = AsymmetricPagedCache(model.config)
    parent = other.prefill(model, prefix_ids(root.token_ids.tolist()))
    whole = other.prefill(model, prefix_ids(merged.token_ids.tolist()), parent=parent)
    if whole.num_fused == merged.num_fused:
        assert merged.starts == whole.starts
    ids = tip.chain_ids.tolist()
    rows = [
        [*ids, *tokens(3, seed=10)],
        [*ids[: merged.stop], *tokens(2, seed=11)],
        [*ids[: root.stop], *tokens(4, seed=12)],
        ids[: merged.stop],
    ]
    prompts = left_padded(rows)
    want = alone(model, rows)
    assert new_tokens(model, prompts, **cached(cache.bind(**prompts))) == want
    cache.check_integrity()
    for prefix in (root, *replaced.values()):
        cache.release(prefix)
    assert cache.stats().hot_tokens == 0


def test_a_merged_prefix_can_be_saved(tiny_model: Build, tmp_path: Any) -> None:
    model = tiny_model("llama")
    cache = AsymmetricPagedCache(model.config)
    level = cache.prefill(model, prefix_ids(tokens(9, seed=1)))
    child = cache.prefill(model, prefix_ids(tokens(7, seed=2)), parent=level)
    merged = merge(cache.rows.prefixes, level, child, cache.rows.layers)[child]
    merged.save(tmp_path / "merged")
    loaded = AsymmetricPagedCache(model.config).load(tmp_path / "merged", model)
    assert loaded.token_ids.tolist() == merged.token_ids.tolist()
    assert cache.prefill(model, prefix_ids(merged.token_ids.tolist())) is merged
