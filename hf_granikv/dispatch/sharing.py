"""Predicts what a stored prefix, or one level more of it, saves against a copy of it in every row."""

from collections.abc import Mapping
from dataclasses import replace

from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.roofline import DeviceConstants, Work, call_s, predict_all
from hf_granikv.views import GroupShape

# no gain was ever published at or below this, whatever is predicted
FLOOR_TOKENS = 128
# a stored prefix needs, besides its backend: its own attention over the suffix, the merge, and a
# write by slot. Fitted on a CPU to 2 to 16 rows over 32 to 1024 tokens, like the rest of its table
_EXTRA_LAUNCHES = 10
# DynamicCache appends by copying: every key is read and written again before attention reads it
_COPY_FACTOR = 2
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
    constants: DeviceConstants,
    backends: Mapping[str, Candidate],
) -> float:
    """Predicts the seconds per layer that sharing saves over a whole generation.

    Counted are the prefix tokens that need not be computed again, less one more forward pass, and
    the difference of `num_steps` decode steps against `DynamicCache`, which may be a loss.

    Args:
        shape: The rows over the prefix in one decode step.
        hidden_size: Of the model.
        num_steps: Decode steps to come, at most.
        constants: Of the device.
        backends: Backends by name, `"per_row"` among them: what a copy in every row has to read.

    Returns:
        Negative where sharing costs more than it saves.
    """
    shared_s = _shared_s(shape, constants, backends) + _EXTRA_LAUNCHES * constants.launch_s
    step_gain_s = dynamic_cache_s(shape, constants=constants, backends=backends) - shared_s
    tokens_saved = (shape.num_rows - 1) * shape.prefix_len
    prefill_gain_s = tokens_saved * _token_s(shape, hidden_size, constants)
    prefill_gain_s -= _FORWARD_LAUNCHES * constants.launch_s
    return prefill_gain_s + num_steps * step_gain_s


def level_gain_s(
    shape: GroupShape,
    *,
    hidden_size: int,
    num_saved: int,
    num_steps: int,
    constants: DeviceConstants,
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
        constants: Of the device.
        backends: Backends by name, `"per_row"` among them: what the rows' own copies have to read.

    Returns:
        Negative where sharing costs more than it saves.
    """
    shared_s = _shared_s(shape, constants, backends)
    work, own_s = _copied(shape, constants, backends)
    # rows attend to tokens of their own anyway, so more of them start nothing more
    own_s -= call_s(work, constants, "per_row", shape.dtype_name)
    return num_saved * _token_s(shape, hidden_size, constants) + num_steps * (own_s - shared_s)


def merging_gain_s(
    shape: GroupShape,
    num_before: int,
    *,
    num_steps: int,
    constants: DeviceConstants,
    backends: Mapping[str, Candidate],
) -> float:
    """Predicts the seconds per layer saved by storing a level and the one before it as one.

    Counted are the calls and merges of one level less in `num_steps` decode steps, and the copy of both.

    Args:
        shape: The rows over the level in one decode step.
        num_before: Tokens of the level before, which the same rows read.
        num_steps: Decode steps to come, at most.
        constants: Of the device.
        backends: Backends by name, `"per_row"` among them.

    Returns:
        Negative where the copy costs more than it saves.
    """
    before = shape._replace(prefix_len=num_before)
    both = shape._replace(prefix_len=num_before + shape.prefix_len)
    apart_s = _shared_s(before, constants, backends) + _shared_s(shape, constants, backends)
    step_gain_s = apart_s - _shared_s(both, constants, backends)
    num_bytes = backends["per_row"].work(both._replace(num_rows=1)).bytes
    # read once, and written once
    return num_steps * step_gain_s - 2 * num_bytes / constants.bandwidth_bytes_per_s


def dynamic_cache_s(
    shape: GroupShape, *, constants: DeviceConstants, backends: Mapping[str, Candidate]
) -> float:
    """Predicts the seconds per layer and step of `DynamicCache`, with a copy in every row.

    Args:
        shape: The rows over what each of them holds.
        constants: Of the device.
        backends: Backends by name, `"per_row"` among them: it computes the same.
    """
    work, read_s = _copied(shape, constants, backends)
    copy_s = _COPY_FACTOR * work.bytes / constants.bandwidth_bytes_per_s
    return read_s + copy_s + _COPY_LAUNCHES * constants.launch_s


def _shared_s(
    shape: GroupShape, constants: DeviceConstants, backends: Mapping[str, Candidate]
) -> float:
    """Seconds of the fastest backend over one stored copy, and of merging what it gives."""
    works = {n: b.work(shape) for n, b in backends.items() if not b.unsupported_reasons(shape)}
    fastest_s = min(predict_all(works, constants, shape.dtype_name).values())
    return fastest_s + constants.merge.predict_s(4.0 * shape.num_queries * shape.head_dim)


def _copied(
    shape: GroupShape, constants: DeviceConstants, backends: Mapping[str, Candidate]
) -> tuple[Work, float]:
    """What reading a copy in every row takes, and its seconds."""
    work = backends["per_row"].work(shape)
    work = replace(work, stored_bytes=work.bytes)
    return work, predict_all({"per_row": work}, constants, shape.dtype_name)["per_row"]


def _token_s(shape: GroupShape, hidden_size: int, constants: DeviceConstants) -> float:
    """Seconds that one token of a prompt takes in one layer."""
    peak = constants.products(shape.dtype_name).peak_flops_per_s
    return 2 * _WEIGHTS_PER_LAYER * hidden_size**2 / peak
