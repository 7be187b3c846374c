"""Prompts that `generate` cuts into chunks before the cache sees them (`prefill_chunk_size`).

A chunk alone does not tell which of its tokens the prefix holds already, nor what its mask means:
older transformers cut it off at columns that count from the first given id. So the whole prompt is
read before it is cut, and each forward is given its part of what remains to be computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_granikv.inputs import (
    PER_TOKEN_KWARGS,
    read_generation,
    with_positions_and_mask,
)
from hf_granikv.layouts import HeldRows, Layout
from hf_granikv.row_prefixes import RowPrefixes

_PER_TOKEN = ("input_ids", "position_ids", *PER_TOKEN_KWARGS)
_GENERATE_MODULE = "transformers.generation.utils"


def is_asked_by_generate(caller: FrameType) -> bool:
    """Whether a function was called from `generate`.

    transformers may still refuse the call it has marked the cache for; then nobody but `generate`
    may be told that the cache is empty.
    """
    return counts_positions_itself(caller) or caller.f_globals.get("__name__") == _GENERATE_MODULE


def counts_positions_itself(caller: FrameType) -> bool:
    """Whether the caller is a model's own preparation of positions, in its own module.

    `generate` calls it before it marks the cache, and what a model adds for images of the call
    before must not get into the positions of a prompt that starts anew.
    """
    is_preparation = caller.f_code.co_name == "_prepare_position_ids_for_generation"
    return is_preparation and caller.f_globals.get("__name__") != _GENERATE_MODULE


@dataclass(slots=True)
class CutPrompt:
    """A prompt of which some forwards are still to come.

    The columns to compute are spread evenly over the forwards that `generate` will make. Where
    there are fewer columns than forwards (the prefix covers whole chunks, and this transformers
    version sends them all the same), some forwards get one column of pads, which owns no slot.

    Attributes:
        first_column: Where whole prompts have to be sent from; suffix-only ids all are.
        chunks: The ids of each forward, `[num_rows, chunk_len]`, as `generate` sends them.
        layout: What `[num_rows, q_len]` columns have to be computed, over all forwards.
        columns: Ids, positions and the like of those columns, each `[num_rows, q_len]`.
        num_sent: Forwards that have begun.
        num_held: Columns held since the prefix before the next one.
    """

    first_column: int
    chunks: tuple[Tensor, ...]
    layout: Layout
    columns: dict[str, Tensor]
    num_sent: int
    num_held: int

    @classmethod
    def read(
        cls,
        caller: FrameType,
        starts_of: Callable[[int], RowPrefixes],
        held_of: Callable[[int], HeldRows],
    ) -> "CutPrompt | None":
        """Reads the prompt that `generate` is about to cut.

        Args:
            caller: The function in `generate` that asks for the length of the cache.
            starts_of: Gives the prefixes that so many rows start from.
            held_of: Gives the rows of the call before, or what so many rows would start from.

        Returns:
            None if it is about to send the prompt in one piece.

        Raises:
            ValueError: If the prompt contradicts the prefix, is too short to contain it, or consists
                of embeddings.
        """
        names = caller.f_locals
        config, model_kwargs = names.get("generation_config"), names.get("model_kwargs")
        size = getattr(config, "prefill_chunk_size", None)
        if caller.f_code.co_name != "_prefill" or size is None or model_kwargs is None:
            return None
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                f"prefill_chunk_size={size} was given with inputs_embeds, which generate does not "
                "cut; leave it unset, or pass input_ids."
            )
        ids: Tensor = names["input_ids"]
        mask = _mask(ids, model_kwargs, config)
        kwargs = {"input_ids": ids, "attention_mask": mask, **_per_token(ids, model_kwargs)}
        kwargs["logits_to_keep"] = model_kwargs.get("logits_to_keep")
        held = held_of(len(ids))
        layout, kwargs = read_generation(kwargs, starts_of(len(ids)), held)
        columns: dict[str, Tensor] = {
            name: tensor for name in _PER_TOKEN if (tensor := kwargs.get(name)) is not None
        }
        num_held = 0 if layout.starts_batch else held.num_columns
        return cls(
            first_column=max(0, ids.shape[1] - layout.owned.shape[1]),
            chunks=torch.split(ids, size, dim=-1),
            layout=layout,
            columns=columns,
            num_sent=0,
            num_held=num_held,
        )

    def note_chunks(self, caller: FrameType) -> bool:
        """Looks whether `generate` asks once more, with the ids cut that it will really send.

        Newer versions do, and leave out those before `first_column`.
        """
        chunks = caller.f_locals.get("input_chunks")
        if chunks is not None:
            self.chunks = chunks
        return chunks is not None

    @property
    def num_left(self) -> int:
        """Columns that forwards still to begin will compute."""
        q_len = self.layout.owned.shape[1]
        return q_len - q_len * self.num_sent // len(self.chunks)

    @property
    def seq_len(self) -> int:
        """Tokens of the longest row."""
        return int(self.columns["position_ids"].max()) + 1

    def is_continued_by(self, kwargs: dict[str, Any], held: HeldRows, is_first: bool) -> bool:
        """Whether a forward brings the next chunk to a cache that has taken the others.

        Args:
            kwargs: The arguments of the forward.
            held: The rows so far.
            is_first: Whether it is the first forward of a `generate` call.
        """
        ids = kwargs.get("input_ids")
        return (
            is_first == (self.num_sent == 0)
            and self.num_sent < len(self.chunks)
            and (held.num_columns == self.num_held or self._starts_batch)
            and ids is not None
            and torch.equal(ids, self.chunks[self.num_sent].to(ids.device))
        )

    def send(self, kwargs: dict[str, Any], held: HeldRows) -> tuple[Layout, dict[str, Any]]:
        """Gives the next forward its part of the prompt.

        Returns:
            The layout, and the arguments rewritten to the tokens that it has to compute.
        """
        num_rows, q_len = self.layout.owned.shape
        start, end = (q_len * (self.num_sent + i) // len(self.chunks) for i in (0, 1))
        owned = self.layout.owned[:, start:end]
        columns = {name: tensor[:, start:end] for name, tensor in self.columns.items()}
        if start == end:
            owned = np.zeros((num_rows, 1), dtype=bool)
            columns = {
                name: tensor.new_zeros(len(tensor), 1) for name, tensor in self.columns.items()
            }
        starts_batch = self._starts_batch
        is_full = bool(owned.all())
        layout = self.layout._replace(starts_batch=starts_batch, owned=owned, is_full=is_full)
        self.num_sent += 1
        self.num_held += owned.shape[1]
        counted = columns["position_ids"].cpu().numpy()
        return layout, with_positions_and_mask({**kwargs, **columns}, layout, counted, held)

    @property
    def _starts_batch(self) -> bool:
        return self.layout.starts_batch and self.num_sent == 0


def _mask(ids: Tensor, model_kwargs: dict[str, Any], config: Any) -> Tensor | None:
    mask: Tensor | None = model_kwargs.get("attention_mask")
    # newer versions drop a mask that shows everything, and note how long it was
    num_columns = getattr(config, "_mask_length", None)
    if mask is None and num_columns is not None:
        mask = ids.new_ones(len(ids), num_columns)
    return mask


def _per_token(ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    given = {name: model_kwargs.get(name) for name in _PER_TOKEN if name != "input_ids"}
    return {
        name: tensor[..., tensor.shape[-1] - ids.shape[1] :]
        for name, tensor in given.items()
        if tensor is not None
    }
