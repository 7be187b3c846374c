"""`generate` for batches of whole prompts: finds the prefixes that rows share, stores each once."""

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_granikv.announce import device_of_ids, forward_parameters
from hf_granikv.backends import BACKENDS
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT, kept_back_arguments
from hf_granikv.config import check_min_shared_tokens
from hf_granikv.dispatch import constants_for
from hf_granikv.dispatch.sharing import FLOOR_TOKENS, sharing_gain_s
from hf_granikv.errors import warn_nothing_shared
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.prompt_checks import unread_arguments
from hf_granikv.shared_prefix import Level, shared_prefixes, worthwhile_levels
from hf_granikv.wording import counted
from hf_granikv.worth import step_shape, why_slow

if TYPE_CHECKING:
    from hf_granikv.pools import Prefix

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]


# models of which it was said that a batch has nothing to share
_TOLD: "WeakSet[PreTrainedModel]" = WeakSet()


class _NotSharedError(Exception):
    """Why a batch is left to the stock path."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    min_shared_tokens: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes with the stock loops, over one stored copy of each prefix that rows share.

    Given to a model's own method: `model.generate(**prompts, custom_generate=hf_granikv.generate)`.
    Rows are whole prompts, left-padded or of one length; samples and beams count as rows. What all
    of them have in common, and what only some have after that, is computed once and kept in an
    `AsymmetricPagedCache`; tokens, scores and random draws are those of the call without
    `custom_generate`, to the rounding of the dtype; but where transformers counts the pads of a row,
    in local layers and in logits processors that look at the ids, they are those of each row alone.
    What is done, and why, is logged at level INFO; the cache that `return_dict_in_generate` returns
    has `explain()`. The first call with a model that shares nothing warns.

    The stock path, untouched, is left to: one row; a cache, embeddings, positions or anything else
    of one's own; `use_cache=False`; outputs that cover prompt tokens; models that cannot be served.

    Args:
        model: The model.
        input_ids: `[num_rows, num_columns]`, repeated for samples and beams.
        logits_processor: As `model.generate` prepares it.
        stopping_criteria: As `model.generate` prepares it.
        generation_config: As `model.generate` prepares it.
        min_shared_tokens: Share every run of at least this many tokens, wherever that is exact: also
            on the dense route, where a step is slower. None: where the cost model predicts a gain
            over the whole call, under `attn_implementation="granikv"` only, past 128 tokens.
        model_kwargs: The other arguments of the model's forward.

    Returns:
        What `model.generate` returns in this mode.

    Raises:
        ValueError: If `min_shared_tokens` is not a positive number of tokens, or the mode is none
            of transformers' own loops.
    """
    check_min_shared_tokens(min_shared_tokens)
    loop, loop_kwargs = _stock_loop(model, generation_config)
    cache = _cache_of(model, input_ids, generation_config, model_kwargs, min_shared_tokens)
    if cache is not None:
        model_kwargs[CACHE_ARGUMENT] = cache
    return loop(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **loop_kwargs,
        **model_kwargs,
    )


def _cache_of(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    min_shared_tokens: int | None,
) -> AsymmetricPagedCache | None:
    """Gives a cache that holds what rows share; None if the batch is left to the stock path."""
    try:
        rows = _whole_prompts(model, input_ids, config, model_kwargs)
        num_steps = config.max_length - input_ids.shape[1]
        levels = _levels(model, rows, num_steps, min_shared_tokens)
        cache = _prefilled(model, rows, levels, config.max_length)
    except _NotSharedError as reason:
        _tell_unshared(model, f"{counted(len(input_ids), 'row')}, nothing shared: {reason}")
        return None
    logger.info("%d rows share %s.", len(rows), _described(levels, len(rows)))
    # who says from where to share knows that the dense route may be taken
    cache.rows.journal.has_warned = min_shared_tokens is not None
    return cache


def _tell_unshared(model: PreTrainedModel, why: str) -> None:
    """Warns the first time for a model: the caller asked for sharing. Then it is logged."""
    logger.info(why)
    if model not in _TOLD:
        _TOLD.add(model)
        warn_nothing_shared(
            f"hf_granikv.generate: {why.rstrip('.')}. Later calls with this model say so at level "
            "INFO only."
        )


def _stock_loop(model: Any, config: GenerationConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    kept = kept_back_arguments()
    mode = config.get_generation_mode(kept["assistant_model"])
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        own = ", ".join(m.value for m, loop in GENERATION_MODES_MAPPING.items() if "/" not in loop)
        raise ValueError(
            f"the generation mode is {mode.value}, which transformers keeps outside of its package; "
            f"hf_granikv.generate decodes with: {own}. Change the arguments that select the mode, "
            "or leave custom_generate out."
        )
    kwargs: dict[str, Any] = model._extract_generation_mode_kwargs(
        None, {}, kept["synced_gpus"], kept["assistant_model"], kept["streamer"]
    )
    # again, as transformers does not show a callable's arguments to its own checks
    model._validate_generation_mode(mode, config, kwargs)
    loop = getattr(type(model), name)
    if "inputs_tensor" in inspect.signature(loop).parameters:
        kwargs["inputs_tensor"] = kept["inputs_tensor"]
    return loop, kwargs


def _is_prompt_learned(model: PreTrainedModel) -> bool:
    """Whether PEFT prepares the inputs, and with more than the ids: prompt and prefix tuning."""
    preparer = getattr(model.prepare_inputs_for_generation, "__self__", None)
    adapter = getattr(preparer, "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))


def _whole_prompts(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> list[Ints]:
    """Gives the token ids of each row without pads, if the rows are prompts and nothing else."""
    if len(input_ids) < 2:
        raise _NotSharedError("a single row has nobody to share with.")
    if _is_prompt_learned(model):
        raise _NotSharedError("an adapter puts embeddings or keys of its own before the prompts.")
    cache = kwargs.get(CACHE_ARGUMENT)
    if cache is None:
        raise _NotSharedError("this call has no cache (use_cache=False, or one of its own kind).")
    is_stock = type(cache) is DynamicCache and not cache.offloading and not cache.get_seq_length()
    if not is_stock or getattr(cache, "_is_user_defined", False):
        raise _NotSharedError(
            f"a {type(cache).__name__} was asked for; leave the cache out to have one chosen."
        )
    if config.output_hidden_states or config.output_attentions:
        raise _NotSharedError("hidden states or attentions of every prompt token were asked for.")
    unread = unread_arguments(kwargs, takes_media=False)
    if kwargs.get("inputs_embeds") is not None:
        unread.append("inputs_embeds")
    if unread:
        raise _NotSharedError(f"{', '.join(unread)} may say more about the prompts than their ids.")
    if config.prefill_chunk_size is not None:
        raise _NotSharedError("prefill_chunk_size cuts prompts; leave it unset.")
    ids = input_ids.cpu().numpy()
    given = kwargs.get("attention_mask")
    mask = np.ones(ids.shape, dtype=bool) if given is None else given.bool().cpu().numpy()
    if mask.shape != ids.shape or not mask[:, -1].all() or (mask[:, :-1] > mask[:, 1:]).any():
        raise _NotSharedError(
            "the attention_mask is none of left-padded prompts; set padding_side='left'."
        )
    positions = kwargs.get("position_ids")
    if positions is not None:
        counted = mask.cumsum(1) - 1
        if positions.ndim != 2 or (mask & (positions.cpu().numpy() != counted)).any():
            raise _NotSharedError("position_ids do not count the tokens of each row from 0.")
    return [row[is_token] for row, is_token in zip(ids, mask, strict=True)]


def _levels(
    model: PreTrainedModel, rows: list[Ints], num_steps: int, min_shared_tokens: int | None
) -> list[Level]:
    nodes = shared_prefixes(rows)
    at_least = min_shared_tokens or FLOOR_TOKENS + 1
    longest = max(nodes, key=lambda node: node.num_tokens, default=None)
    if longest is None or longest.num_tokens < at_least:
        found = "no tokens are common to rows"
        if longest is not None:
            found = f"{longest.num_tokens} tokens are common to {len(longest.rows)} rows"
        raise _NotSharedError(f"{found}, it takes {at_least}")
    reasons: list[str] = []

    def pays(level: Level) -> bool:
        num_rows, num_tokens = len(level.rows), level.num_tokens
        what = f"{num_tokens} tokens are common to {num_rows} rows"
        if num_tokens < at_least:
            reasons.append(f"{what}, it takes {at_least}")
            return False
        gain_s = 0.0
        if min_shared_tokens is None:
            gain_s = _gain_s(model, num_rows, num_tokens, num_steps)
            if gain_s <= 0:
                lost = f"sharing them would lose {-1e6 * gain_s:.0f} us per layer"
                reasons.append(f"{what}, {lost} in {num_steps} steps")
        return min_shared_tokens is not None or gain_s > 0

    served = _served(model)
    if served.has_states:
        # a batch of theirs reads one prefix
        nodes = [node for node in nodes if len(node.rows) == len(rows)]
    levels = worthwhile_levels(nodes, [len(row) for row in rows], pays)
    if not levels:
        raise _NotSharedError("; ".join(reasons[:3]) or "no tokens are common to all rows")
    return levels


def _gain_s(model: PreTrainedModel, num_rows: int, num_tokens: int, num_steps: int) -> float:
    if (reason := why_slow(model)) is not None:
        raise _NotSharedError(reason)
    return sharing_gain_s(
        step_shape(model, num_rows, num_tokens),
        hidden_size=model.config.get_text_config(decoder=True).hidden_size,
        num_steps=num_steps,
        constants=constants_for(device_of_ids(model)),
        backends=BACKENDS,
    )


def _served(model: PreTrainedModel) -> ServedModel:
    try:
        return ServedModel.from_config(model.config)
    except ValueError as error:
        raise _NotSharedError(str(error)) from error


def _described(levels: list[Level], num_rows: int) -> str:
    if len(levels) == 1 and len(levels[0].rows) == num_rows:
        return f"a prefix of {levels[0].stop} tokens"
    each = (f"{x.stop - x.start} tokens of {len(x.rows)} rows" for x in levels)
    return f"{len(levels)} prefixes: {', '.join(each)}"


def _prefilled(
    model: PreTrainedModel, rows: list[Ints], levels: list[Level], max_length: int
) -> AsymmetricPagedCache:
    """Gives a cache that holds the prefixes and awaits the prompts.

    What the cache checks before each forward is checked here for the longest one to come.
    """
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise _NotSharedError("the layers of the model lie on several devices.")
    is_even = len({len(row) for row in rows}) == 1
    try:
        served = _served(model)
        ends = {row: level.stop for level in levels for row in level.rows}
        served.check_length(min(ends.get(row, 0) for row in range(len(rows))), max_length)
        if not is_even or {level.rows for level in levels} != {tuple(range(len(rows)))}:
            takes_positions = "position_ids" in forward_parameters(model)
            served.check_padding(max_length, takes_positions=takes_positions)
        cache = AsymmetricPagedCache(model.config)
        prefixes: list[Prefix] = []
        for level in levels:
            ids = rows[level.rows[0]][level.start : level.stop]
            parent = None if level.parent is None else prefixes[level.parent]
            prefixes.append(cache.prefill(model, torch.from_numpy(ids.copy()), parent=parent))
    except ValueError as error:
        raise _NotSharedError(str(error)) from error
    leaves: list[Prefix | None] = [None] * len(rows)
    for level, prefix in zip(levels, prefixes, strict=True):
        for row in level.rows:
            leaves[row] = prefix
    cache.rows.prefixes.bind(leaves)
    # as generate does with a cache that it is handed
    cache._is_user_defined = True
    return cache
