"""Which prompts can run in one padded batch."""

import logging
import sys
from typing import Any

from hf_granikv.announce import forward_parameters, transformers_model
from hf_granikv.layer_kinds import ServedModel

logger = logging.getLogger(__name__)

Prompts = dict[str, list[int]]


def in_batches(model: Any, prompts: Prompts, num_columns: int | None) -> list[Prompts]:
    """Gives the prompts in one batch, or in one for each length where pads cannot be right.

    Args:
        model: A transformers model, or a wrapper of one.
        prompts: Whole prompts by name.
        num_columns: Columns of the batch when its last token has been generated; None if unlimited.
    """
    by_length: dict[int, Prompts] = {}
    for name, prompt in prompts.items():
        by_length.setdefault(len(prompt), {})[name] = prompt
    inner = transformers_model(model)
    try:
        ServedModel.from_config(inner.config).check_padding(
            sys.maxsize if num_columns is None else num_columns,
            takes_positions="position_ids" in forward_parameters(inner),
        )
    except ValueError as reason:
        logger.info("%d prompts in %d batches: %s", len(prompts), len(by_length), reason)
        return list(by_length.values())
    return [prompts]
