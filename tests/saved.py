"""Models of one name that compute alike, and prefixes that must be equal."""

from typing import Any

import torch
from families import HYBRIDS, LOCAL, SHARED_PATH
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.pools import Prefix

ALL = {**SHARED_PATH, **LOCAL, **HYBRIDS}


def built(name: str = "llama", **options: Any) -> PreTrainedModel:
    """Gives a model object of its own, equal to every other of the same name."""
    return ALL[name].model(attn_implementation="granikv", **options)


def empty(model: PreTrainedModel) -> AsymmetricPagedCache:
    return AsymmetricPagedCache(model.config)


def assert_same(one: Prefix, other: Prefix) -> None:
    assert one.digest == other.digest
    for now, then in zip(one.chain, other.chain, strict=True):
        assert now is not then
        assert (now.salt, now.num_fused, now.starts) == (then.salt, then.num_fused, then.starts)
        assert list(now.states) == list(then.states)
        for ours, theirs in zip(now.tensors(), then.tensors(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
