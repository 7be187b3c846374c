"""Turning recorded or parked tokens into prefixes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.batch_rows import ParkedRow
from hf_granikv.dispatch import constants_for
from hf_granikv.dispatch.fusing import FusingCost, fusing_cost, is_short
from hf_granikv.layer import check_same_kind
from hf_granikv.pools import Prefix
from hf_granikv.pools.hot import Saver
from hf_granikv.pools.storage import KeysAndValues
from hf_granikv.recording import Recording
from hf_granikv.state import CacheState
from hf_granikv.views import GroupShape, LayerKind, dtype_name


def sealed(
    state: CacheState,
    token_ids: Tensor,
    recording: Recording,
    *,
    parent: Prefix | None,
    salt: str | None,
    saver: Saver,
    num_q_heads: int,
) -> Prefix:
    """Stores a prefix, with the tokens before it if that is predicted to be faster.

    Args:
        state: Of the cache.
        token_ids: `[num_tokens]` after the parent's.
        recording: What layers keep of them.
        parent: What it extends.
        salt: See `Prefix`.
        saver: Likewise.
        num_q_heads: Query heads of the model.
    """
    pairs, states = recording
    num_fused = 0
    if parent is not None:
        num_before = parent.stop - parent.reads_from
        cost = _cost(parent, pairs, num_before, num_q_heads)
        if cost is not None and cost.pays and is_short(num_before, len(token_ids)):
            num_fused = num_before
            pairs = _with_parent(parent, pairs, len(token_ids), state.layers)
            state.journal.note_fused(
                f"a prefix of {len(token_ids)} tokens keeps the {num_before} before it: to read them "
                f"apart would take {1e6 * cost.apart_s:.0f} us per layer, in each of its siblings "
                f"{1e6 * cost.fused_s:.0f} us."
            )
    return state.hot.seal(
        token_ids, pairs, states, parent=parent, salt=salt, num_fused=num_fused, saver=saver
    )


def check_is_kept(parked: ParkedRow, state: CacheState, *, knows_a_model: bool) -> None:
    """Checks that what a row holds goes with what a cache holds.

    Raises:
        ValueError: If no model is known, or heads or dtype differ from those of a prefix.
        StalePrefixError: If the row is older than the last `invalidate`.
    """
    if not knows_a_model:
        raise ValueError("no model is attached; call cache.attach(model) before promote.")
    state.check_epoch(parked)
    stored = state.prefixes.any
    for layer_idx, held in enumerate(parked.tokens):
        if held is not None and stored is not None:
            # layers compare what a forward brings, which has rows
            keys, values = (t.unsqueeze(0) for t in held)
            check_same_kind(keys, stored.keys[layer_idx], "keys", layer_idx)
            check_same_kind(values, stored.values[layer_idx], "values", layer_idx)


def recording_of(parked: ParkedRow, num_tokens: int, layers: Sequence[LayerKind]) -> Recording:
    """What layers keep of the first private tokens of a row, as if they had been recorded.

    Raises:
        ValueError: If the row does not see all of its prefix, or has fewer tokens, or layers keep
            states.
    """
    start = 0 if parked.prefix is None else parked.prefix.stop
    if any(layer.num_states for layer in layers):
        raise ValueError(
            "layers keep states, which are known after the last token of a row only; prefill the "
            "tokens as a prefix instead."
        )
    if parked.num_seen != start or not 0 < num_tokens <= parked.num_tokens:
        raise ValueError(
            f"{num_tokens} tokens were given of a row that holds {parked.num_tokens} after "
            f"{parked.num_seen} of the {start} tokens of its prefix; give the first ones that it holds, "
            "of a row that sees its whole prefix."
        )
    nothing = torch.empty(0, num_tokens, 0)
    pairs = []
    for layer, held in zip(layers, parked.tokens, strict=True):
        first = 0 if layer.window is None else layer.window.first_reached(start + num_tokens - 1)
        kept = slice(max(0, first - start), num_tokens)
        keys, values = (nothing, nothing) if held is None else (t[:, kept] for t in held)
        pairs.append((keys, values))
    return Recording(pairs, {})


def _cost(
    parent: Prefix, pairs: Sequence[KeysAndValues], num_before: int, num_q_heads: int
) -> FusingCost | None:
    keys = max((keys for keys, _ in pairs), key=Tensor.numel)
    num_kv_heads = keys.shape[0]
    if not num_kv_heads:
        return None
    shape = GroupShape(
        num_rows=1,
        q_len=1,
        prefix_len=num_before,
        num_kv_heads=num_kv_heads,
        gqa_ratio=max(1, num_q_heads // num_kv_heads),
        head_dim=keys.shape[2],
        dtype_bytes=keys.element_size(),
        dtype=dtype_name(keys.dtype),
    )
    return fusing_cost(shape, constants=constants_for(keys.device), backends=BACKENDS)


def _with_parent(
    parent: Prefix, pairs: list[KeysAndValues], num_tokens: int, layers: Sequence[LayerKind]
) -> list[KeysAndValues]:
    """Takes the layers of `pairs` one by one, so that no more than one is there twice."""
    stop, joined = parent.stop + num_tokens, []
    for layer, *theirs in zip(layers, parent.keys, parent.values, strict=True):
        ours = both = pairs.pop(0)
        # a window that has left the parent sees nothing of it any more
        if ours[0].shape[1] == num_tokens:
            first = 0 if layer.window is None else layer.window.first_reached(stop - 1)
            num_kept = max(0, parent.stop - max(first, parent.reads_from))
            kept = [t[:, t.shape[1] - num_kept :] if num_kept else t[:, :0] for t in theirs]
            keys, values = (
                torch.cat(pair, dim=1)
                if pair[0].shape[0]
                else pair[1].new_empty(0, num_kept + num_tokens, 0)
                for pair in zip(kept, ours, strict=True)
            )
            both = keys, values
        joined.append(both)
    return joined
