"""What keeps a model from running the tokens of rows of different length side by side."""

from typing import Any

from hf_granikv.announce import forward_parameters
from hf_granikv.layer_kinds import ServedModel


def why_not_packable(model: Any, served: ServedModel) -> str | None:
    """Why a model cannot run packed tokens; None if nothing is known to be in the way."""
    if served.has_states:
        return "layers keep states, which would run on from row to row"
    return why_masked(model, served)


def why_masked(model: Any, served: ServedModel) -> str | None:
    """Why a model needs masks over rows of different length; None if nothing is known of that."""
    takes_positions = "position_ids" in forward_parameters(model)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return served.why_masked(attention, takes_positions=takes_positions)
