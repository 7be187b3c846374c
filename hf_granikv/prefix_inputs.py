"""What a prefix may be computed from."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_granikv.config import is_count

_ID_DTYPES = (torch.int32, torch.int64)


def one_row_of_ids(input_ids: Tensor) -> Tensor:
    """Gives the ids of a prefix as `[1, prefix_len]`.

    Raises:
        ValueError: If they are not one row of at least one token.
    """
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.dtype not in _ID_DTYPES:
        raise ValueError(
            f"input_ids of a prefix is {tuple(ids.shape)} {ids.dtype}; give one row of token "
            "ids, [1, prefix_len], without padding."
        )
    return ids


def check_chunk_size(chunk_size: int | None) -> None:
    """Checks that a prefix can be computed in chunks of this size.

    Raises:
        ValueError: If it is neither None nor a positive number of tokens.
    """
    if chunk_size is not None and not is_count(chunk_size):
        raise ValueError(
            f"chunk_size is {chunk_size!r}; give a positive number of tokens, or None to compute "
            "the prefix in one piece."
        )


def check_is_deterministic(model: PreTrainedModel) -> None:
    """Checks that a forward has no dropout in it.

    Raises:
        ValueError: If it has.
    """
    if model.training and _has_dropout(model):
        raise ValueError(
            f"{type(model).__name__} is in training mode and has dropout, which would be stored "
            "with the prefix; call model.eval() first."
        )


def embedded(model: nn.Module, token_ids: Tensor, *, like: Tensor | None) -> Tensor | None:
    """Gives the embeddings of a prefix to compare others with; None if there are no others.

    Args:
        model: The transformers model.
        token_ids: `[prefix_len]` on any device.
        like: What they will be compared with, on its device.

    Returns:
        `[prefix_len, hidden_size]`, detached.
    """
    if like is None:
        return None
    embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    found: Tensor = embed(token_ids.to(like.device)).detach()
    return found


def _has_dropout(model: nn.Module) -> bool:
    named = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    in_attention = any(getattr(model.config, name, 0) for name in named)
    return bool(in_attention) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
