"""Prompts, the ways to lay them out in a batch, and what each must give."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from families import VOCAB_SIZE
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache, forward_reader
from hf_granikv.compat import CACHE_ARGUMENT

PAD_ID = 0
NUM_NEW = 10
# as in the reports that our cases come from: a ragged batch, one row the prefix itself
SUFFIX_LENGTHS = (3, 7, 0, 5)


def tokens(count: int, *, seed: int) -> list[int]:
    """Gives ids that are neither padding nor special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist()


PREFIX = tokens(20, seed=1)


def prefix_ids(ids: Sequence[int] = PREFIX) -> Tensor:
    return torch.tensor([list(ids)])


def suffixes(*lengths: int, seed: int = 100) -> list[list[int]]:
    return [tokens(length, seed=seed + row) for row, length in enumerate(lengths)]


def whole(rows: Sequence[Sequence[int]], prefix: Sequence[int] = PREFIX) -> list[list[int]]:
    return [[*prefix, *row] for row in rows]


def left_padded(rows: Sequence[Sequence[int]], *, extra: int = 0) -> dict[str, Tensor]:
    """Gives ids and mask, padded on the left to the longest row and `extra` columns more."""
    width = max(len(row) for row in rows) + extra
    ids = [[PAD_ID] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def right_padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(len(row) for row in rows)
    ids = [list(row) + [PAD_ID] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def middle_padded(
    rows: Sequence[Sequence[int]], prefix: Sequence[int] = PREFIX
) -> dict[str, Tensor]:
    """Gives `[prefix | pads | suffix]`: whole ids and the mask over all of it."""
    padded = left_padded(rows)
    shared = torch.tensor([list(prefix)] * len(rows))
    return {
        "input_ids": torch.cat([shared, padded["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(shared), padded["attention_mask"]], 1),
    }


def suffix_only(rows: Sequence[Sequence[int]], prefix: Sequence[int] = PREFIX) -> dict[str, Tensor]:
    """Gives the suffix ids, with the mask over prefix and suffix."""
    return {
        "input_ids": left_padded(rows)["input_ids"],
        "attention_mask": middle_padded(rows, prefix)["attention_mask"],
    }


def alone(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, num_new: int = NUM_NEW, **kwargs: Any
) -> list[list[int]]:
    """Gives the new tokens of each row by itself, without any cache."""
    return [
        new_tokens(model, left_padded([row]), num_new=num_new, use_cache=False, **kwargs)[0]
        for row in rows
    ]


def new_tokens(
    model: PreTrainedModel, inputs: dict[str, Tensor], *, num_new: int = NUM_NEW, **kwargs: Any
) -> list[list[int]]:
    """Gives the tokens that `generate` adds to each row."""
    out = model.generate(**inputs, max_new_tokens=num_new, **{"do_sample": False, **kwargs})
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def step(
    model: PreTrainedModel, cache: Any, rows: Sequence[Sequence[int]], **kwargs: Any
) -> Tensor:
    """Runs a plain forward of rows of one length and gives its logits, `[rows, q_len, vocab_size]`."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(rows), **cached(cache), **kwargs).logits


def logits_alone(model: PreTrainedModel, ids: Sequence[int], last: int) -> Tensor:
    """Gives the logits of the `last` tokens of one row, `[last, vocab_size]`, without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -last:]


def prefilled(model: PreTrainedModel, ids: Sequence[int] = PREFIX, **options: Any) -> Any:
    """Gives a cache that holds the prefix."""
    cache = AsymmetricPagedCache(model.config, **options)
    cache.prefill(model, prefix_ids(ids))
    return cache


def cached(cache: Any) -> dict[str, Any]:
    """Gives the cache under the keyword that this transformers version has for it."""
    return {CACHE_ARGUMENT: cache}


@contextmanager
def as_generate(cache: Any) -> Iterator[None]:
    """Does to a cache what `generate` does before its first forward, which is to come in here."""
    cache._is_user_defined = True
    with patch.object(forward_reader, "variables_of_generate", lambda: {"inputs_tensor": None}):
        yield
