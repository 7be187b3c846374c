"""What a prefix may be computed from."""

from collections.abc import Collection, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_granikv.config import is_count
from hf_granikv.pools import Prefix
from hf_granikv.wording import counted

_ID_DTYPES = (torch.int32, torch.int64)


def one_row_of_ids(input_ids: Tensor) -> Tensor:
    """Gives the ids of a prefix as `[1, prefix_len]`.

    Raises:
        ValueError: If they are not one row of at least one token.
    """
    try:
        ids = torch.as_tensor(input_ids)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"input_ids of a prefix is a {type(input_ids).__name__}; give token ids, "
            "[1, prefix_len], as tokenizer(text, return_tensors='pt').input_ids."
        ) from error
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.dtype not in _ID_DTYPES:
        raise ValueError(
            f"input_ids of a prefix is {tuple(ids.shape)} {ids.dtype}; give one row of token "
            "ids, [1, prefix_len], without padding."
        )
    return ids


def check_in_vocabulary(ids: Tensor, model: PreTrainedModel) -> None:
    """Checks that a model has an embedding for every id.

    Args:
        ids: `[1, prefix_len]`.
        model: The transformers model.

    Raises:
        ValueError: Naming the first id that it has none for.
    """
    embed: Any = model.get_input_embeddings()
    size = getattr(embed, "num_embeddings", None)
    if size is None or not len(wrong := ids[(ids < 0) | (ids >= size)]):
        return
    raise ValueError(
        f"input_ids of a prefix contains {int(wrong[0])}; {type(model).__name__} knows ids from 0 to "
        f"{size - 1}. Use the tokenizer of this model."
    )


def check_extends(parent: Prefix | None, held: Collection[Prefix], num_tokens: int) -> None:
    """Checks that a prefix of so many tokens may extend another.

    Raises:
        ValueError: If the cache does not hold that one, or a state cannot be told from so few tokens.
    """
    if parent is None:
        return
    if parent not in held:
        raise ValueError(
            f"parent is {parent}, which this cache does not hold; pass a prefix that its own "
            "prefill returned and nobody released."
        )
    if parent.states and num_tokens < 2:
        raise ValueError(
            "a prefix of 1 token cannot extend another where layers keep states; give at least 2."
        )


def rows_of_ids(input_ids: Tensor, attention_mask: Tensor | None) -> list[NDArray[np.int64]]:
    """Gives the tokens of each row of a batch, without pads.

    Raises:
        ValueError: If ids and mask are not `[num_rows, num_columns]` both.
    """
    ids = torch.as_tensor(input_ids)
    mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
    if ids.ndim != 2 or ids.dtype not in _ID_DTYPES or ids.shape != mask.shape:
        raise ValueError(
            f"input_ids is {tuple(ids.shape)} {ids.dtype}, attention_mask {tuple(mask.shape)}; give "
            "token ids and a mask of whole prompts, [num_rows, num_columns] both."
        )
    tokens, is_token = ids.cpu().numpy().astype(np.int64), mask.bool().cpu().numpy()
    return [row[shown] for row, shown in zip(tokens, is_token, strict=True)]


def salts_of(salt: str | Sequence[str | None] | None, num_rows: int) -> list[str | None]:
    """Gives the salt of each row.

    Raises:
        ValueError: If there is not one for each.
    """
    if salt is None or isinstance(salt, str):
        return [salt] * num_rows
    salts = list(salt)
    if len(salts) != num_rows or not all(s is None or isinstance(s, str) for s in salts):
        raise ValueError(
            f"salt is {salts!r} for {counted(num_rows, 'row')}; give one str or None for each row, or for all."
        )
    return salts


def check_salt(salt: str | None, parent: Prefix | None) -> str | None:
    """Gives the salt of a prefix: its parent's where it has one.

    Raises:
        ValueError: If it is no str, or not its parent's.
    """
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"salt is {salt!r}; give a str, or None.")
    if parent is not None and salt not in (None, parent.salt):
        raise ValueError(
            f"salt is {salt!r}, the parent's is {parent.salt!r}; leave it out, or prefill the parent "
            "under it too."
        )
    return salt if parent is None else parent.salt


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


def embedded(model: nn.Module, token_ids: NDArray[np.int64], *, like: Tensor) -> Tensor:
    """Gives the embeddings of a prefix to compare others with.

    Args:
        model: The transformers model.
        token_ids: `[prefix_len]`.
        like: What they will be compared with, on its device.

    Returns:
        `[prefix_len, hidden_size]`, detached.

    Raises:
        ValueError: If layers read ids that embeddings do not tell, so that these are another prompt.
    """
    for name, part in model.named_modules():
        read_ids = getattr(part, "get_per_layer_inputs", None)
        if read_ids is not None and "inputs_embeds" not in signature(read_ids).parameters:
            raise ValueError(
                f"inputs_embeds were given, and {name or 'the model'} ({type(part).__name__}) reads "
                "input_ids in its layers, as the prefix was computed; pass input_ids."
            )
    embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    found: Tensor = embed(torch.from_numpy(token_ids).to(like.device)).detach()
    return found


def _has_dropout(model: nn.Module) -> bool:
    named = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    in_attention = any(getattr(model.config, name, 0) for name in named)
    return bool(in_attention) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
