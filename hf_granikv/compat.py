"""What differs between the transformers versions that this package supports, and what they keep back."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch
from transformers import GenerationMixin, cache_utils

# transformers 5.24 renamed the keyword of `generate` and of every forward
CACHE_ARGUMENT = (
    "cache"
    if "cache"
    in inspect.signature(
        GenerationMixin.prepare_inputs_for_generation, follow_wrapped=True
    ).parameters
    else "past_key_values"
)

# a layer that stores nothing, since 5.23; before, a cache has no object for such layers
DummyLayer: Any = getattr(cache_utils, "DummyLayer", None)

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_KEPT_BACK = ("streamer", "assistant_model", "synced_gpus", "inputs_tensor")


def variables_of_generate() -> dict[str, Any]:
    """The local variables of the `generate` under way, by name; none if there is none."""
    return dict(next(_variables_of_generates(), {}))


def generations_with(cache: Any) -> list[Any]:
    """The `generate` calls under way in this thread that were given a cache, innermost first.

    Returns:
        Of each the `generation_config`, which is an object of that call alone.
    """
    return [
        held.get("generation_config")
        for held in _variables_of_generates()
        if (held.get("model_kwargs") or {}).get(CACHE_ARGUMENT) is cache
    ]


def _variables_of_generates() -> Iterator[Mapping[str, Any]]:
    """The local variables of each `generate` under way in this thread, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE:
            yield frame.f_locals
        frame = frame.f_back


def kept_back_arguments() -> dict[str, Any]:
    """What the `generate` under way hands to its own loops, but not to a `custom_generate`.

    transformers gives a callable no streamer, whoever waits for it, and no assistant; they are
    read off its frame.

    Returns:
        The arguments by name, None where not given.
    """
    held = variables_of_generate()
    return {name: held.get(name) for name in _KEPT_BACK}


def outside_graphs(
    function: Callable[..., Any] | None = None,
    *,
    in_graphs: Callable[..., Any] = lambda *_, **__: None,
) -> Any:
    """Keeps compilers out of a function that is called in every layer.

    As `torch.compiler.disable` does, which takes some microseconds of every call where none is at work.

    Args:
        function: The function.
        in_graphs: What is traced in its place, given the same; where it gives None, the graph is broken.
    """
    if function is None:
        return partial(outside_graphs, in_graphs=in_graphs)
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        traced = in_graphs(*args, **kwargs)
        return disabled(*args, **kwargs) if traced is None else traced

    return run
