"""Whether the prompts of a `generate` call go with the prefix in store."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_granikv.pools import Prefix
from hf_granikv.row_prefixes import RowPrefixes

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# what is read here, and what changes no key and no value
_UNDERSTOOD = {
    *("attention_mask", "cache", "cache_position", "input_ids", "inputs_embeds", "past_key_values"),
    *("position_ids", "use_cache", "labels", "logits_to_keep", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    # what decoding loops of transformers hand on, though no forward reads it
    *("tokenizer", "assistant_tokenizer", "streamer", "synced_gpus"),
}
# arguments that bring images or videos, whatever a model calls them
_WORDS_OF_IMAGES = ("pixel_values", "image", "video", "vision", "mm_encoder")
# what comes to places that are marked among the ids, and how large it is
_WORDS_OF_MEDIA = (
    *_WORDS_OF_IMAGES,
    *("pixel", "audio", "feature", "input_values", "grid", "frames", "aspect_ratio", "patches"),
    *("spatial_shapes", "token_type_ids"),
)
_WHOLE_PROMPTS = (
    "Pass whole prompts that start with the prefix; or the suffix alone, with an attention_mask over "
    "prefix and suffix, but whole prompts with prompt_lookup_num_tokens or assistant_model, for which "
    "generate cuts the mask."
)


def unread_arguments(kwargs: dict[str, Any], *, takes_media: bool) -> list[str]:
    """Names of what comes with a forward and is not read here, so that it may change keys and values.

    Args:
        kwargs: The arguments of the forward.
        takes_media: Whether the model takes images or sounds, which come to places that are marked
            among the ids: no prefix is computed with any.
    """
    given = [
        name for name, value in kwargs.items() if value is not None and name not in _UNDERSTOOD
    ]
    if takes_media:
        given = [name for name in given if not any(word in name for word in _WORDS_OF_MEDIA)]
    return sorted(given)


def check_arguments(kwargs: dict[str, Any], config: Any) -> None:
    """Checks that nothing comes with a forward that a prefix was computed without.

    Args:
        kwargs: The arguments of the forward.
        config: Of the model. One that consists of others takes images or sounds.

    Raises:
        ValueError: Naming the arguments that may change keys and values.
    """
    unread = unread_arguments(kwargs, takes_media=False)
    if unread and config.sub_configs:
        unread = unread_arguments(kwargs, takes_media=True)
    if unread:
        raise ValueError(
            f"{', '.join(unread)} came with a forward over a prefix, which is stored as the token ids "
            "alone give it, and may change keys and values. Leave it out, or generate without this "
            "cache."
        )


def check_keeps_cache(model: nn.Module) -> None:
    """Checks that the layers of a model are handed the cache.

    Raises:
        ValueError: If gradient checkpointing takes it from them, as transformers has it.
    """
    if not model.training or not torch.is_grad_enabled():
        return
    if any(
        part.training and getattr(part, "gradient_checkpointing", False) for part in model.modules()
    ):
        raise ValueError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, where transformers "
            "takes the cache away from its layers, so they would not see the prefix. Call "
            "model.gradient_checkpointing_disable() or model.eval(), or run whole prompts without a "
            "cache."
        )


def check_positions(kwargs: dict[str, Any], counted: Ints, is_real: Bools) -> None:
    """Checks that positions of the caller's own are those counted from the mask.

    Args:
        kwargs: The arguments of the forward.
        counted: `[num_rows, num_ids]` the position of each new column.
        is_real: `[num_rows, num_ids]` False for pads.

    Raises:
        ValueError: Naming the first that differs.
    """
    given = kwargs.get("position_ids")
    if given is None or given.ndim not in (2, 3):
        return
    differs = is_real & (given.cpu().numpy() != counted)
    if differs.any() and given.ndim == 3:
        raise ValueError(
            "position_ids count an image or a video of the prompt in several dimensions; a prefix "
            "is stored with positions of text. Give prompts with images no cache of this kind."
        )
    if differs.any():
        row, column = np.argwhere(differs)[0]
        at = given.expand(len(counted), -1)[row, column]
        raise ValueError(
            f"position_ids has {at} at new column {column} of row {row}, which is token "
            f"{counted[row, column]} of the row; a prefix is stored with positions counted from 0. "
            "Leave position_ids out; if you gave none, generate counts those of drafted tokens on "
            "from the last column: pad prompts on the left."
        )


def check_images(kwargs: dict[str, Any]) -> None:
    """Checks that no tokens of an image see each other.

    Raises:
        ValueError: If `token_type_ids` says so of tokens of an image.
    """
    types = kwargs.get("token_type_ids")
    of_images = [name for name in kwargs if any(word in name for word in _WORDS_OF_IMAGES)]
    has_images = any(kwargs[name] is not None for name in of_images)
    if has_images and types is not None and bool(types.any()):
        raise ValueError(
            "token_type_ids marks tokens of an image, which see each other in this model; over a "
            "prefix they would not. Give prompts with images no cache of this kind."
        )


def check_embeds(
    embeds: Tensor,
    is_real: Bools,
    hidden: Ints,
    starts: RowPrefixes,
    embeds_of: Mapping[Prefix, Tensor],
) -> None:
    """Checks that embeddings of whole prompts start with those of the prefix.

    Args:
        embeds: `[num_rows, num_ids, hidden_size]`.
        is_real: `[num_rows, num_ids]` False for pads.
        hidden: `[num_rows]` tokens of the prefix that come before the new columns.
        starts: The prefixes of the rows.
        embeds_of: `[stop, hidden_size]` embeddings of each chain.

    Raises:
        ValueError: Naming the first position that differs.
    """
    for row, (start, leaf) in enumerate(zip(hidden, starts.leaves, strict=True)):
        if leaf is None:
            continue
        prefix_embeds = embeds_of[leaf]
        columns = torch.from_numpy(np.flatnonzero(is_real[row])[: len(prefix_embeds) - start])
        repeated = embeds[row, columns.to(embeds.device)]
        expected = prefix_embeds[start : start + len(repeated)]
        same = torch.isclose(repeated.detach(), expected.to(repeated.dtype), rtol=1e-3, atol=1e-5)
        wrong = torch.nonzero(~same.all(-1))
        if len(wrong):
            raise ValueError(
                f"row {row} of inputs_embeds differs from the prefix at position "
                f"{start + int(wrong[0])}. Pass embeddings of whole prompts that start with the "
                "prefix; or, with the suffix alone, an attention_mask over prefix and suffix."
            )


def check_contains_prefix(
    kwargs: dict[str, Any], lengths: Ints, is_real: Bools, hidden: Ints, starts: RowPrefixes
) -> None:
    """Checks that every row starts with the whole of its prefix.

    Args:
        kwargs: The arguments of the forward.
        lengths: `[num_rows]` tokens of each row, the hidden ones included.
        is_real: `[num_rows, num_ids]` False for pads.
        hidden: `[num_rows]` tokens of the prefix that come before the new columns.
        starts: The prefixes of the rows.

    Raises:
        ValueError: Naming the row, and the first token that differs.
    """
    input_ids = kwargs.get("input_ids")
    ids = None if input_ids is None or not input_ids.shape[1] else input_ids.cpu().numpy()
    for row, (length, start) in enumerate(zip(lengths, hidden, strict=True)):
        prefix_ids = starts.ids(row)
        prefix_len = len(prefix_ids)
        if ids is not None:
            repeated = ids[row][is_real[row]][: prefix_len - start]
            expected = prefix_ids[start : start + len(repeated)]
            wrong = np.flatnonzero(repeated != expected)
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(
                    f"row {row} has token {repeated[at]} at position {start + at}, the prefix has "
                    f"{expected[at]} there. {_WHOLE_PROMPTS}"
                )
        if length < prefix_len:
            raise ValueError(
                f"row {row} has {length} tokens, fewer than the {prefix_len} of the prefix. "
                f"{_WHOLE_PROMPTS}"
            )
