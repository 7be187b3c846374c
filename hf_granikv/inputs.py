"""What the inputs of one forward pass mean, given what the cache holds.

transformers counts columns: under left padding, row i starts with p_i zeros in its mask, and a
cache that holds the prefix is offered tokens that the prefix already covers. Here every forward
is read as `[prefix | new columns]`, where a new column of a row is either a token the row owns or
a pad. Tokens that repeat the prefix are compared with it and dropped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_granikv.layouts import HeldRows, Layout, all_tokens
from hf_granikv.pools import Prefix
from hf_granikv.prompt_checks import (
    Bools,
    Ints,
    check_contains_prefix,
    check_embeds,
    check_images,
    check_positions,
)
from hf_granikv.row_prefixes import RowPrefixes
from hf_granikv.wording import counted

PER_TOKEN_KWARGS = ("token_type_ids",)


def read_generation(
    kwargs: dict[str, Any],
    starts: RowPrefixes,
    held: HeldRows,
    embeds_of: Mapping[Prefix, Tensor] | None = None,
) -> tuple[Layout, dict[str, Any]]:
    """Reads the first forward pass of a `generate` call.

    Args:
        kwargs: The arguments of the forward. `input_ids` (or `inputs_embeds`) are whole prompts,
            or new tokens with an `attention_mask` that covers the prefix too.
        starts: The prefixes that the rows start from.
        held: The rows of the call before.
        embeds_of: `[stop, hidden_size]` embeddings of the ids of each chain; needed for
            `inputs_embeds`.

    Returns:
        The layout, and the arguments rewritten to the tokens that must be computed: right-aligned,
        pads on the left.

    Raises:
        ValueError: If the inputs contradict the prefix or are too short to contain it.
    """
    num_rows, num_ids = shape_of(kwargs)
    mask = _mask_2d(kwargs)
    if mask is None:
        num_columns = _num_positions(kwargs, default=num_ids)
        mask = np.ones((num_rows, num_columns), dtype=bool)
    num_hidden = mask.shape[1] - num_ids
    _check_mask(mask, num_rows, num_ids)
    hidden, is_real = mask[:, :num_hidden].sum(1), mask[:, num_hidden:]
    if (hidden > starts.chain_lengths).any():
        # more is taken for granted than the prefix: the rows of the call before go on
        kwargs = {**kwargs, "attention_mask": torch.from_numpy(mask)}
        return read_forward(kwargs, held)
    lengths = hidden + is_real.sum(1)
    check_images(kwargs)
    check_contains_prefix(kwargs, lengths, is_real, hidden, starts)
    check_positions(kwargs, hidden[:, None] + is_real.cumsum(1) - 1, is_real)
    if embeds_of is not None:
        check_embeds(kwargs["inputs_embeds"], is_real, hidden, starts, embeds_of)

    reads = _computed_from(starts, lengths, kwargs.get("logits_to_keep"))
    q_len = int((lengths - reads.lengths).max())
    positions = lengths[:, None] - q_len + np.arange(q_len)
    owned = positions >= reads.lengths[:, None]
    # the columns of real tokens come last in each row of `order`, in their order
    order = np.argsort(is_real, axis=1, kind="stable")
    from_end = positions - lengths[:, None] + num_ids
    is_given = owned & (positions >= hidden[:, None])
    columns = np.zeros_like(from_end)
    if num_ids:
        columns = np.take_along_axis(order, np.clip(from_end, 0, num_ids - 1), axis=1)
    kwargs = _take_columns(kwargs, columns, is_given, positions, starts, owned)
    ends_in_pads = bool(num_ids and not is_real[:, -1].all())
    is_full = bool(owned.all())
    layout = Layout(True, reads, owned, is_full, recounts_positions=ends_in_pads)
    kwargs["position_ids"] = None
    return layout, with_positions_and_mask(kwargs, layout, np.maximum(positions, 0), held)


def _computed_from(starts: RowPrefixes, lengths: Ints, num_asked: Any) -> RowPrefixes:
    """How much of its prefix each row reads, and does not compute again.

    What a row is asked logits of it has to compute: where it is the prefix itself its last token,
    and under assisted decoding that token and the candidates. All rows of one prefix do so again,
    to stay one group.
    """
    num_asked = max(1, num_asked) if isinstance(num_asked, int) else 1
    seen = np.maximum(np.minimum(starts.chain_lengths, lengths - num_asked), 0)
    for leaf in {leaf for leaf in starts.leaves if leaf is not None}:
        rows = [row for row, its_leaf in enumerate(starts.leaves) if its_leaf is leaf]
        length = int(seen[rows].min())
        if possible := leaf.row_starts:
            length = max((start for start in possible if start <= length), default=0)
        seen[rows] = length
    return starts.seeing(seen)


def read_forward(kwargs: dict[str, Any], held: HeldRows) -> tuple[Layout, dict[str, Any]]:
    """Reads any other forward pass: every column is new, as `DynamicCache` would take it.

    Args:
        kwargs: The arguments of the forward.
        held: The rows so far.

    Returns:
        The layout, and the arguments with mask and positions completed.

    Raises:
        ValueError: If mask, rows or ids do not go with what the cache holds.
    """
    num_rows, num_ids = shape_of(kwargs)
    seen = held.reads.lengths.tolist()
    known = [0] * num_rows if held.lengths is None else held.lengths.tolist()
    if len(known) != num_rows:
        raise ValueError(
            f"the forward has {counted(num_rows, 'row')}, the cache holds {len(known)}; call cache.reset() to "
            "start a new batch from the prefix."
        )
    before = [of_prefix + own for of_prefix, own in zip(seen, known, strict=True)]
    given, owned, is_full = kwargs.get("attention_mask"), all_tokens(num_rows, num_ids), True
    dense_reason = None
    needs_2d = held.pads_first or not held.reads.is_even
    if isinstance(given, dict) or (given is not None and given.ndim != 2 and needs_2d):
        shape = "a dict" if isinstance(given, dict) else f"{given.ndim}-dimensional"
        raise ValueError(
            f"attention_mask is {shape}; with local layers, or prefixes of different length, pass "
            "[num_rows, num_columns], from which every layer makes its own."
        )
    if given is not None and given.ndim != 2:
        dense_reason = f"a mask of {given.ndim} dimensions was given"
    elif given is not None:
        num_hidden = given.shape[1] - num_ids
        _check_mask(given, num_rows, num_ids)
        # half precision would not count far
        hidden = given[:, :num_hidden].bool().sum(1).tolist()
        if hidden != before:
            row = next(row for row, shown in enumerate(hidden) if shown != before[row])
            raise ValueError(
                f"attention_mask shows {hidden[row]} tokens of row {row} before the {num_ids} new "
                f"columns, the cache holds {before[row]} "
                f"({seen[row]} of the prefix, {known[row]} private); pass a mask over "
                "everything held and the new tokens, or call cache.reset() to start again from "
                "the prefix. Tokens of the prefix cannot be given again in a plain forward pass."
            )
        owned, is_full = _tokens_among(given[:, num_hidden:])
    layout = Layout(held.lengths is None, held.reads, owned, is_full, dense_reason)
    if held.recounts_positions and dense_reason is None:
        kwargs = {**kwargs, "position_ids": None}
    return layout, with_positions_and_mask(kwargs, layout, _positions(before, layout), held)


def _tokens_among(mask: Tensor) -> tuple[Bools, bool]:
    """Which of the `[num_rows, q_len]` new columns of a mask are tokens, and whether all are."""
    # a list is there sooner than an array
    if mask.shape[1] == 1 and all(shown for (shown,) in mask.tolist()):
        return all_tokens(len(mask), 1), True
    owned = mask.bool().cpu().numpy()
    return owned, bool(owned.all())


def _positions(before: list[int], layout: Layout) -> Ints | list[list[int]]:
    """The positions of new columns after so many tokens of each row."""
    if layout.is_full and layout.owned.shape[1] == 1:
        return [[num_tokens] for num_tokens in before]
    return np.maximum(layout.positions(np.array(before)), 0)


def _check_mask(mask: Any, num_rows: int, num_ids: int) -> None:
    if mask.shape[0] != num_rows or mask.shape[1] < num_ids:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)} for {counted(num_rows, 'row')} of {num_ids} tokens; it "
            "must have a row for each and cover at least these tokens."
        )


def _take_columns(
    kwargs: dict[str, Any],
    columns: Ints,
    is_given: Bools,
    positions: Ints,
    starts: RowPrefixes,
    owned: Bools,
) -> dict[str, Any]:
    kwargs = dict(kwargs)
    embeds = kwargs.get("inputs_embeds")
    if embeds is not None:
        if (owned & ~is_given).any():
            raise ValueError(
                "a row of inputs_embeds has nothing after the prefix; pass whole prompts as "
                "input_ids."
            )
        index = torch.from_numpy(columns).to(embeds.device)[..., None]
        kwargs["inputs_embeds"] = embeds.gather(1, index.expand(-1, -1, embeds.shape[2]))
        return kwargs
    ids = kwargs["input_ids"]
    known = torch.from_numpy(_prefix_tokens(starts, positions))
    index = torch.from_numpy(columns).to(ids.device)
    given = torch.from_numpy(is_given).to(ids.device)
    for name in ("input_ids", *PER_TOKEN_KWARGS):
        tensor = kwargs.get(name)
        if tensor is not None and tensor.shape[1]:
            fill = known if name == "input_ids" else torch.zeros_like(known)
            fill = fill.to(tensor.device, tensor.dtype)
            kwargs[name] = torch.where(given, tensor.gather(1, index), fill)
        elif name == "input_ids":
            kwargs[name] = known.to(ids.device, ids.dtype)
    return kwargs


def _prefix_tokens(starts: RowPrefixes, positions: Ints) -> Ints:
    """The ids of the prefixes at `[num_rows, q_len]` positions; anything past their ends."""
    tokens = np.zeros_like(positions)
    for row in range(starts.num_rows):
        ids = starts.ids(row)
        if len(ids):
            tokens[row] = ids[np.clip(positions[row], 0, len(ids) - 1)]
    return tokens


def with_positions_and_mask(
    kwargs: dict[str, Any],
    layout: Layout,
    positions: Ints | list[list[int]],
    held: HeldRows,
) -> dict[str, Any]:
    """Completes the arguments of a forward whose columns are known.

    Args:
        kwargs: The arguments; `position_ids` that are there stay.
        layout: The new columns.
        positions: `[num_rows, q_len]` of the new columns, none of them negative.
        held: The rows that go on, or did until these start.
    """
    kwargs = dict(kwargs)
    like = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = torch.tensor(positions, dtype=torch.int64, device=like.device)
    if layout.dense_reason is not None:
        return kwargs
    before = None if layout.starts_batch else held.owned
    if layout.reads.is_even and (before is None or before.all()) and layout.is_full:
        kwargs["attention_mask"] = None
    else:
        if before is None:
            num_before = 0 if layout.starts_batch else held.num_columns
            before = np.ones((len(layout.owned), num_before), dtype=bool)
        of_prefix = layout.reads.column_of_prefix()
        columns = np.concatenate([of_prefix, before, layout.owned], axis=1)
        columns = np.sort(columns, axis=1) if held.pads_first else columns
        kwargs["attention_mask"] = torch.from_numpy(columns.astype(np.int64)).to(like.device)
    return kwargs


def shape_of(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and new columns of a forward.

    Raises:
        ValueError: If it has neither ids nor embeddings.
    """
    for name in ("inputs_embeds", "input_ids"):
        tensor: Tensor | None = kwargs.get(name)
        if tensor is not None:
            return tensor.shape[0], tensor.shape[1]
    raise ValueError("the forward has neither input_ids nor inputs_embeds; pass one of them.")


def _mask_2d(kwargs: dict[str, Any]) -> Bools | None:
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    if isinstance(mask, dict) or mask.ndim != 2:
        shape = "is a dict" if isinstance(mask, dict) else f"has {mask.ndim} dimensions"
        raise ValueError(
            f"attention_mask {shape}; generate with a prefix needs [num_rows, num_columns]."
        )
    as_bools: Bools = mask.bool().cpu().numpy()
    return as_bools


def _num_positions(kwargs: dict[str, Any], default: int) -> int:
    positions = kwargs.get("position_ids")
    return default if positions is None else int(positions.max()) + 1
