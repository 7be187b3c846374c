"""Telling a cache what a forward pass is about to bring.

`Cache.update` sees keys and values only. Which columns are pads, and which repeat the prefix, is
said by the inputs of the model; a forward pre-hook on the model reads them. The hook is one plain
function per model object, whatever the number of caches, and leaves every other cache alone.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_granikv.errors import UnreadCacheError
from hf_granikv.row_processors import show_rows_alone


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a model: itself, or what a wrapper (PEFT, say) holds.

    Raises:
        ValueError: If there is none, or it keeps a cache of its own kind.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a {type(model).__name__} was given as the model; pass the object on which generate is "
            "called, and what is to be computed after it."
        )
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} contains no transformers model; pass the object on which "
            "generate is called."
        )
    takes_dynamic = getattr(inner, "_supports_default_dynamic_cache", None)
    if takes_dynamic is not None and not takes_dynamic():
        raise ValueError(
            f"{type(inner).__name__} keeps a cache of its own kind; it cannot be served."
        )
    return inner


def device_of_ids(model: PreTrainedModel) -> torch.device:
    """Where the token ids of a forward pass are expected.

    Offloaded weights are on no device until they run; accelerate then brings ids to them.
    """
    device: torch.device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def attach_hook(model: PreTrainedModel) -> None:
    """Makes forward passes of a model announce themselves to the caches of this package."""
    if announce_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(announce_forward, with_kwargs=True)
        model.register_forward_hook(settle_forward, with_kwargs=True, always_call=True)


@torch.compiler.disable
def announce_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hands the arguments of a forward pass to the cache in them, which may rewrite them."""
    if args:
        names = forward_parameters(module)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_in(kwargs)
    if getattr(cache, "announce", None) is None:
        return None
    rows: Any = getattr(cache, "rows", None)
    is_first_of_generate = rows is not None and rows.is_generation_pending
    rewritten = cache.announce(module, kwargs)
    if rewritten is None:
        return None
    if is_first_of_generate:
        show_rows_alone(module, rows.prefixes.starting_rows)
    return (), rewritten


@torch.compiler.disable
def settle_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Tells the cache that a forward pass is over, well or not.

    Raises:
        UnreadCacheError: If it is over, and no layer has asked the cache for anything.
    """
    if args:
        kwargs = {**dict(zip(forward_parameters(module), args, strict=False)), **kwargs}
    cache = cache_in(kwargs)
    settle = getattr(cache, "settle", None)
    if settle is not None:
        # a forward that raised has no output
        is_complete = output is not None
        is_unread = is_complete and getattr(getattr(cache, "rows", None), "is_staged", False)
        settle(is_complete=is_complete)
        if is_unread:
            raise UnreadCacheError(type(module).__name__)


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of a forward pass, under either of its names; None if there is none."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a model's `forward`, in order."""
    return _forward_parameters(type(module).forward)


@lru_cache(maxsize=64)
def _forward_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
