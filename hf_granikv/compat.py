"""What differs between the transformers versions that this package supports."""

import inspect
from typing import Any

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
