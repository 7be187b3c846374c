"""Telling a cache what a forward pass is about to bring.

`Cache.update` sees keys and values only. Which columns are pads, and which repeat the prefix, is
said by the inputs of the model; a forward pre-hook on the model reads them. The hook is one plain
function per model object, whatever the number of caches, and leaves every other cache alone.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def attach_hook(model: nn.Module) -> PreTrainedModel:
    """Makes forward passes of a model announce themselves to the caches of this package.

    Args:
        model: A transformers model, or a wrapper around one (PEFT, for example).

    Returns:
        The transformers model inside.

    Raises:
        ValueError: If there is none.
    """
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} contains no transformers model; pass the object on which "
            "generate is called."
        )
    if announce_forward not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(announce_forward, with_kwargs=True)
    return inner


def announce_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hands the arguments of a forward pass to the cache in them, which may rewrite them."""
    if args:
        names = forward_parameters(module)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = kwargs.get("cache")
    if cache is None:
        cache = kwargs.get("past_key_values")
    announce = getattr(cache, "announce", None)
    if announce is None:
        return None
    rewritten = announce(module, kwargs)
    return None if rewritten is None else ((), rewritten)


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a model's `forward`, in order."""
    return _forward_parameters(type(module).forward)


@lru_cache(maxsize=64)
def _forward_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
