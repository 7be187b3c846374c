"""Decode steps of a model as one graph of `torch.compile`."""

from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from hf_granikv.announce import cache_in, transformers_model
from hf_granikv.errors import NotCompiledError
from hf_granikv.inputs import shape_of

Model = TypeVar("Model", bound=nn.Module)


def compile_decode(model: Model, **options: Any) -> Model:
    """Lets `torch.compile` run the decode steps of a model over the caches of this package.

    A step of one token per row over a prefix is one graph, the same in every step and for every cache. The
    first one is compiled, which takes seconds to minutes; on a CPU that needs a C++ compiler. Other
    forwards, and those over other caches, run as before: prompts, whose shapes differ, would be compiled
    again and again. `cache.explain()` counts forwards that ran as graphs.

    Args:
        model: The model. The `forward` of the transformers model that it is, or wraps, is replaced; a
            second call replaces what the first one did, and `del model.forward` of that one undoes it.
        options: Of `torch.compile`.

    Returns:
        The model.

    Raises:
        NotCompiledError: From the first step that cannot be compiled here. Nothing was computed then, so
            once `forward` is deleted a loop by hand can go on.
        ValueError: If it contains no transformers model.
    """
    inner: Any = transformers_model(model)
    replaced = _before(vars(inner).get("forward"))
    plain: Any = type(inner).forward if replaced is None else replaced
    compiled = torch.compile(plain, **options)

    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_known = getattr(cache_in(kwargs), "goes_straight", False)
        is_decode = is_known and shape_of(kwargs)[1] == 1
        if not is_decode:
            return plain(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            raise NotCompiledError(str(error), type(inner).__name__) from error

    run._itself, run._replaced = run, replaced  # type: ignore[attr-defined]
    # a method goes with a copy of the model
    inner.forward = MethodType(run, inner) if replaced is None else run
    return model


def _before(forward: Any) -> Any:
    """What a forward of ours has replaced; any other one itself."""
    ours = getattr(forward, "__func__", forward)
    # wrappers copy the attributes of what they wrap
    is_ours = ours is not None and getattr(ours, "_itself", None) is ours
    return ours._replaced if is_ours else forward
