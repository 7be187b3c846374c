"""The forward passes that compute a prefix, and what they start from."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
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


def prefix_states(
    model: PreTrainedModel, ids: Tensor, chunk_size: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Computes the keys and values of a prefix.

    Args:
        model: A transformers model.
        ids: `[1, prefix_len]` token ids.
        chunk_size: The most tokens of one forward, which bounds its activations; None for all.

    Returns:
        Per layer, keys and values `[num_kv_heads, prefix_len, head_dim]`.

    Raises:
        ValueError: If the model does not keep them in the cache it is given.
    """
    embedding: Any = model.get_input_embeddings()
    ids = ids.to(next(embedding.parameters()).device)
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    takes_positions = "position_ids" in forward_parameters(model.base_model)
    start = 0
    for chunk in ids.split(chunk_size or ids.shape[1], dim=1):
        options: dict[str, Any] = {"use_cache": True, CACHE_ARGUMENT: recorder}
        end = start + chunk.shape[1]
        if takes_positions:
            # as generate counts; RoBERTa's own count starts elsewhere
            options["position_ids"] = torch.arange(start, end, device=ids.device)[None]
        with torch.no_grad():
            model.base_model(input_ids=chunk, **options)
        start = end
        if recorder.get_seq_length() != end:
            raise ValueError(
                f"{type(model).__name__} does not keep its keys and values in the cache it is "
                "given; it cannot be served."
            )
    layers: list[Any] = recorder.layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]


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
