"""What differs between the transformers versions that this package supports."""

import inspect

from transformers import GenerationMixin

# transformers 5.24 renamed the keyword of `generate` and of every forward
CACHE_ARGUMENT = (
    "cache"
    if "cache"
    in inspect.signature(
        GenerationMixin.prepare_inputs_for_generation, follow_wrapped=True
    ).parameters
    else "past_key_values"
)
