"""Decode steps of a model as one graph of `torch.compile`."""

from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from hf_granikv.announce import cache_in, transformers_model
from hf_granikv.inputs import shape_of

Model = TypeVar("Model", bound=nn.Module)


def compile_decode(model: Model, **options: Any) -> Model:
    """Lets `torch.compile` run the decode steps of a model over the caches of this package.

    A step of one token per row is one graph, the same in every step and for every cache; it is compiled
    when the second such step of a cache comes, which takes seconds to minutes. Other forwards, and
    those over other caches, run as before: prompts, whose shapes differ, would be compiled again and again.
    `cache.explain()` counts the steps that ran as a graph.

    Args:
        model: The model. Its `forward` is replaced; a second call replaces what the first one did.
        options: Of `torch.compile`.

    Returns:
        The model.

    Raises:
        ValueError: If it contains no transformers model.
    """
    inner: Any = transformers_model(model)
    forward: Any = getattr(inner.forward, "_granikv_plain", inner.forward)
    compiled = torch.compile(forward, **options)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_known = getattr(cache_in(kwargs), "goes_straight", False)
        is_decode = is_known and shape_of(kwargs)[1] == 1
        return (compiled if is_decode else forward)(*args, **kwargs)

    run._granikv_plain = forward  # type: ignore[attr-defined]
    inner.forward = run
    return model
