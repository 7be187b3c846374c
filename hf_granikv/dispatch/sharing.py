"""Predicts what a stored prefix, or one level more of it, saves against a copy of it in every row."""

from collections.abc import Mapping
from dataclasses import replace

from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.fusing import MERGE_LAUNCHES
from hf_granikv.dispatch.roofline import DeviceConstants, constants_for, predict_s
from hf_granikv.views import GroupShape

# no gain was ever published at or below this, whatever is predicted
FLOOR_TOKENS = 128
# a stored prefix needs, besides its backend: its own attention over the suffix, the merge, and a
# write by slot. Fitted on a CPU to 2 to 16 rows over 32 to 1024 tokens, like the rest of its table
_EXTRA_LAUNCHES = 16
# DynamicCache appends by copying: every key is read and written again before attention reads it
_COPY_FACTOR = 3
_COPY_LAUNCHES = 2
# one more forward pass, the prefix by itself
_FORWARD_LAUNCHES = 40
# weights of one layer that a token meets, over hidden_size squared: a low guess, 10 to 14 in dense
# models and more in mixtures of experts
_WEIGHTS_PER_LAYER = 8


def sharing_gain_s(
    shape: GroupShape,
    *,
    hidden_size: int,
    num_steps: int,
    device_type: str,
    backends: Mapping[str, Candidate],
) -> float:
    """Predicts the seconds per layer that sharing saves over a whole generation.

    Counted are the prefix tokens that need not be computed again, less one more forward pass, and
    the difference of `num_steps` decode steps against `DynamicCache`, which may be a loss.

    Args:
        shape: The rows over the prefix in one decode step.
        hidden_size: Of the model.
        num_steps: Decode steps to come, at most.
        device_type: Such as `"cpu"`; picks the built-in constants.
        backends: Backends by name, `"per_row"` among them: what a copy in every row has to read.

    Returns:
        Negative where sharing costs more than it saves.
    """
    constants = constants_for(device_type)
    shared_s = min(
        predict_s(backend.work(shape), constants, name)
        for name, backend in backends.items()
        if not backend.unsupported_reasons(shape)
    )
    copied = backends["per_row"].work(shape)
    copied = replace(
        copied, bytes=_COPY_FACTOR * copied.bytes, launches=copied.launches + _COPY_LAUNCHES
    )
    step_gain_s = predict_s(copied, constants, "per_row") - shared_s
    step_gain_s -= _EXTRA_LAUNCHES * constants.launch_s
    tokens_saved = (shape.num_rows - 1) * shape.prefix_len
    prefill_gain_s = tokens_saved * _token_s(hidden_size, constants)
    prefill_gain_s -= _FORWARD_LAUNCHES * constants.launch_s
    return prefill_gain_s + num_steps * step_gain_s


def level_gain_s(
    shape: GroupShape,
    *,
    hidden_size: int,
    num_saved: int,
    num_steps: int,
    device_type: str,
    backends: Mapping[str, Candidate],
) -> float:
    """Predicts the seconds per layer that sharing saves rows which live in one batch already.

    Counted are the tokens that need not be computed, and the difference of `num_steps` decode steps:
    the tokens are read once for all rows, with one more launch and one more merge, and not in each
    row's own part.

    Args:
        shape: The rows over the shared tokens in one decode step.
        hidden_size: Of the model.
        num_saved: Tokens, over all rows, that sharing saves from being computed.
        num_steps: Decode steps to come, at most.
        device_type: Such as `"cpu"`; picks the built-in constants.
        backends: Backends by name, `"per_row"` among them: what the rows' own copies have to read.

    Returns:
        Negative where sharing costs more than it saves.
    """
    constants = constants_for(device_type)
    shared_s = min(
        predict_s(backend.work(shape), constants, name)
        for name, backend in backends.items()
        if not backend.unsupported_reasons(shape)
    )
    shared_s += MERGE_LAUNCHES * constants.launch_s
    # rows attend to tokens of their own anyway, so more of them start nothing more
    own_s = predict_s(replace(backends["per_row"].work(shape), launches=0), constants, "per_row")
    return num_saved * _token_s(hidden_size, constants) + num_steps * (own_s - shared_s)


def _token_s(hidden_size: int, constants: DeviceConstants) -> float:
    """Seconds that one token of a prompt takes in one layer."""
    return 2 * _WEIGHTS_PER_LAYER * hidden_size**2 / constants.peak_flops_per_s
