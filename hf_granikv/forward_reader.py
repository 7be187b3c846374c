"""Reading the arguments of coming forward passes, for one cache."""

from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import variables_of_generate
from hf_granikv.cut_prompts import CutPrompt
from hf_granikv.inputs import read_forward, read_generation, shape_of
from hf_granikv.known_models import KnownModels
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.layouts import Layout
from hf_granikv.pools import Prefix
from hf_granikv.prefix_inputs import embedded
from hf_granikv.prompt_checks import check_arguments, check_keeps_cache
from hf_granikv.row_prefixes import RowPrefixes
from hf_granikv.rows_owner import RowsOwner
from hf_granikv.state import CacheState


class ForwardReader:
    """Tells a cache's state what the next forward brings, and the model what it has to compute.

    Args:
        state: Of the cache.
        served: What the cache was built for.
        models: Whose forwards are read.

    Attributes:
        owner: Whose rows the cache holds.
        goes_straight: Whether the coming forward does, from the cache to attention by parts.
    """

    def __init__(self, state: CacheState, served: ServedModel, models: KnownModels) -> None:
        self._state = state
        self._served = served
        self._models = models
        self._cut_prompt: CutPrompt | None = None
        self.owner = RowsOwner()
        self.goes_straight = False
        self._configs: tuple[Any, Any] = None, None

    def read(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Reads the arguments of a coming forward pass, and stages it.

        Args:
            module: The model.
            kwargs: The arguments of its forward.

        Returns:
            The arguments to run with; None to leave them alone.

        Raises:
            ValueError: If they mean nothing right; the cache is as it was.
            StalePrefixError: If the model has changed since it computed the prefix; likewise.
            RowsTakenError: If it is of a `generate` call whose rows are gone; likewise.
        """
        state = self._state
        self.goes_straight = False
        if module not in self._models:
            return None
        self.owner.enter()
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if not state.reads_inputs:
            self.owner.check(cache, state.num_rows, is_first=False)
            return None
        state.settle()
        # a call that generate gave up before its first forward leaves its mark
        is_marked = state.is_generation_pending and self.owner.is_marked_here
        generation = variables_of_generate() if is_marked else {}
        if is_marked:
            state.is_generation_pending = False
        self.owner.check(cache, state.num_rows, is_first=bool(generation))
        layout, kwargs, cut = self._laid_out(module, kwargs, generation)
        if not state.forwards.needs_mask and layout.is_full:
            kwargs["attention_mask"] = None
        if generation or layout.starts_batch:
            self._models.check(module)
        takes_positions = "position_ids" in forward_parameters(module)
        ahead = _num_ahead(generation) + (0 if cut is None else cut.num_left)
        self._check_served(layout, kwargs, takes_positions=takes_positions, num_ahead=ahead)
        if not takes_positions:
            kwargs.pop("position_ids", None)
        self.goes_straight = self._will_go_straight(
            module, layout, kwargs, takes_positions=takes_positions
        )
        if self.goes_straight and (mask := kwargs.get("attention_mask")) is not None:
            # nobody reads it in a graph, which shall not be made anew for every length
            torch._dynamo.maybe_mark_dynamic(mask, 1)
        state.stage(layout)
        self._cut_prompt = cut
        return kwargs

    def _will_go_straight(
        self, module: Any, layout: Layout, kwargs: dict[str, Any], *, takes_positions: bool
    ) -> bool:
        """Whether every layer is known to hand what the cache gives to our attention as it is.

        Nobody looks at a mask then, and a compiler may take all such forwards for the same.
        """
        if not self._state.forwards.goes_straight or torch.is_grad_enabled() or module.training:
            return False
        if layout.dense_reason is not None or not layout.is_full or self._served.has_states:
            return False
        if not takes_positions or _autocasts(kwargs["position_ids"].device.type):
            return False
        attention = self._text_config(module.config)._attn_implementation
        return self._served.why_masked(attention, takes_positions=takes_positions) is None

    def _text_config(self, config: Any) -> Any:
        # transformers looks for it anew every time, which takes longer than all the rest here
        if self._configs[0] is not config:
            self._configs = config, config.get_text_config(decoder=True)
        return self._configs[1]

    def _laid_out(
        self, module: nn.Module, kwargs: dict[str, Any], generation: dict[str, Any]
    ) -> tuple[Layout, dict[str, Any], CutPrompt | None]:
        """Gives the layout, the arguments rewritten, and what is still to come of a cut prompt."""
        state = self._state
        if kwargs.get("use_cache") is False:
            takes_positions = "position_ids" in forward_parameters(module)
            reason = self._served.why_no_pads(takes_positions=takes_positions)
            raise ValueError(
                "use_cache=False was given, or stands in the model's generation_config, together with "
                "a cache that holds a prefix; pass use_cache=True, or leave the cache out."
                # who pads rows shall not learn of it when that is done
                + (f" With the cache, rows have to be of equal length: {reason}." if reason else "")
            )
        check_arguments(kwargs, module.config)
        check_keeps_cache(module)
        num_rows, _ = shape_of(kwargs)
        held, cut, self._cut_prompt = state.held_rows(num_rows), self._cut_prompt, None
        if cut is not None and cut.is_continued_by(kwargs, held, bool(generation)):
            return *cut.send(kwargs, held), cut
        if not generation:
            return *read_forward(kwargs, held), None
        starts = state.prefixes.starting_rows(num_rows)
        embeds_of = _embeds(module, starts, kwargs.get("inputs_embeds"))
        kwargs = _with_mask(kwargs, generation)
        return *read_generation(kwargs, starts, held, embeds_of), None

    def _check_served(
        self, layout: Layout, kwargs: dict[str, Any], *, takes_positions: bool, num_ahead: int
    ) -> None:
        """Checks that the model can be right about a forward that is laid out so.

        Args:
            layout: Of the forward.
            kwargs: Its arguments.
            takes_positions: Whether the model's forward takes `position_ids`.
            num_ahead: Tokens that may follow in the same call.
        """
        served, positions = self._served, kwargs.get("position_ids")
        if positions is not None and served.has_length_limit:
            served.check_length(layout.reads.shortest_chain, int(positions.max()) + 1 + num_ahead)
        if layout.dense_reason is None and (mask := kwargs.get("attention_mask")) is not None:
            # rows that come and go have each read their own tokens; pads are where others have more
            reads_pads = not self._state.is_live or not layout.is_full
            served.check_padding(
                mask.shape[-1] + num_ahead, takes_positions=takes_positions, reads_pads=reads_pads
            )
        if self._state.has_windows:
            served.check_reach(layout.reads)

    def first_column(self, caller: FrameType) -> int:
        """Answers `generate` that asks how much the cache holds: 0, so that prompts arrive whole.

        Where it cuts them, the columns that need not be sent.
        """
        cut, state = self._cut_prompt, self._state
        if cut is not None and cut.note_chunks(caller):
            return cut.first_column
        self._cut_prompt = None
        model: Any = caller.f_locals.get("self")
        if not state.reads_inputs or model not in self._models:
            return 0
        cut = CutPrompt.read(caller, state.prefixes.starting_rows, state.held_rows)
        if cut is None:
            return 0
        # later chunks must not fail on what is known now
        self._served.check_length(cut.layout.reads.shortest_chain, cut.seq_len)
        state.cold.check_room(int(cut.layout.owned.sum()), replacing=cut.layout.starts_batch)
        self._cut_prompt = cut
        return cut.first_column


def _autocasts(device: str) -> bool:
    return any(
        torch.amp.is_autocast_available(each) and torch.is_autocast_enabled(each)
        for each in ("cpu", device)
    )


def _with_mask(kwargs: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    """Gives back the mask that `generate` has dropped, where nothing else tells its length.

    That is where a model's own preparation of inputs hands on no positions.
    """
    if kwargs.get("attention_mask") is not None or kwargs.get("position_ids") is not None:
        return kwargs
    num_rows, num_ids = shape_of(kwargs)
    prompts = generation.get("inputs_tensor")
    mask_length = getattr(generation.get("generation_config"), "_mask_length", None)
    num_hidden = 0
    if mask_length is not None and prompts is not None:
        num_hidden = max(0, mask_length - prompts.shape[1])
    mask = torch.ones(num_rows, num_hidden + num_ids, dtype=torch.int64)
    return {**kwargs, "attention_mask": mask}


def _num_ahead(generation: Mapping[str, Any]) -> int:
    """Tokens that a `generate` call may still bring to the cache after its prompt."""
    ids: Tensor | None = generation.get("input_ids")
    max_length = getattr(generation.get("generation_config"), "max_length", None)
    # the last token generated is not read any more
    return 0 if ids is None or max_length is None else max(0, max_length - ids.shape[1] - 1)


def _embeds(
    module: nn.Module, starts: RowPrefixes, like: Tensor | None
) -> dict[Prefix, Tensor] | None:
    if like is None:
        return None
    leaves = {leaf for leaf in starts.leaves if leaf is not None}
    return {leaf: embedded(module, leaf.chain_ids, like=like) for leaf in leaves}
