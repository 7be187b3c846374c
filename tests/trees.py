"""A tree of prefixes, and a batch whose rows read different chains of it."""

from typing import Any

from prompts import prefix_ids, tokens
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

ROOT = tokens(12, seed=11)
LEFT = tokens(9, seed=12)
RIGHT = tokens(15, seed=13)
TIP = tokens(4, seed=14)
OTHER = tokens(7, seed=15)
CHAINS = {
    "root": ROOT,
    "left": [*ROOT, *LEFT],
    "right": [*ROOT, *RIGHT],
    "tip": [*ROOT, *RIGHT, *TIP],
    "other": OTHER,
    "none": [],
}
# two rows of each of two chains that are not neighbours, one that is exactly its chain, and others
ROWS = [
    (*CHAINS["left"], *tokens(3, seed=20)),
    (*CHAINS["tip"], *tokens(2, seed=21)),
    (*CHAINS["other"], *tokens(6, seed=22)),
    (*CHAINS["left"], *tokens(5, seed=23)),
    (*CHAINS["none"], *tokens(8, seed=24)),
    (*CHAINS["right"],),
    (*CHAINS["tip"], *tokens(1, seed=25)),
    (*CHAINS["root"], *tokens(4, seed=26)),
]
READ = ["left", "tip", "other", "left", "none", "right", "tip", "root"]


def planted(model: PreTrainedModel, **options: Any) -> tuple[AsymmetricPagedCache, dict[str, Any]]:
    """A cache that holds the tree, and its prefixes by name."""
    cache = AsymmetricPagedCache(model.config, **options)
    root = cache.prefill(model, prefix_ids(ROOT))
    right = cache.prefill(model, prefix_ids(RIGHT), parent=root)
    held = {
        "root": root,
        "left": cache.prefill(model, prefix_ids(LEFT), parent=root),
        "right": right,
        "tip": cache.prefill(model, prefix_ids(TIP), parent=right),
        "other": cache.prefill(model, prefix_ids(OTHER)),
    }
    return cache, held
