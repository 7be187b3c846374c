"""The attention function: prefix once per group, suffix per row, merged by log-sum-exp."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_granikv.backends import BACKENDS, PrefixBackend
from hf_granikv.dispatch import Decision, Dispatcher
from hf_granikv.kernels.merge_states import merge_states, merged_out
from hf_granikv.kernels.suffix_attention import SuffixMask, prepare_mask, suffix_attention
from hf_granikv.lazy import LazyKeyValue, step_of
from hf_granikv.masks import granikv_mask, says_no_more_than
from hf_granikv.views import AttentionState, GroupShape, LayerStep
from hf_granikv.windows import LocalView, local_view

ATTENTION_NAME = "granikv"


def register() -> None:
    """Makes `attn_implementation="granikv"` known to transformers, with its masks."""
    AttentionInterface.register(ATTENTION_NAME, granikv_attention)
    # without a mask function of the same name every mask would silently be None
    AttentionMaskInterface.register(ATTENTION_NAME, granikv_mask)


def granikv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to a shared prefix and to private suffixes.

    Keys and values in one piece, as other caches give them, go to torch's SDPA, or, where that has
    no sinks or soft-capping, through the same kernels as a suffix.

    Args:
        module: The attention layer.
        query: `[rows, num_q_heads, q_len, head_dim]`.
        key: `[rows, num_kv_heads, kv_len, head_dim]`, lazy if it comes from a cache with a prefix.
        value: Likewise.
        attention_mask: `[rows, 1, q_len, kv_len]`; a lazy key carries its own.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        dropout: Dropout on the weights; the shared path has none.
        softcap: Bound `c` of the scores, which become `c * tanh(score / c)`.
        s_aux: `[num_q_heads]` logits of attention sinks, which enter the denominator once.
        kwargs: The other arguments of transformers' attention interface.

    Returns:
        `[rows, q_len, num_q_heads, head_dim]` in the dtype of the query, and None.

    Raises:
        NotImplementedError: For dropout or a position bias together with sinks or soft-capping.
    """
    rule = _ScoreRule(scaling or query.shape[-1] ** -0.5, softcap, s_aux)
    if isinstance(key, LazyKeyValue) and isinstance(value, LazyKeyValue):
        reasons = _dense_reasons(query, key, value, attention_mask, dropout, kwargs)
        if not reasons:
            return _shared(query, step_of(key, value), rule), None
        key = key.materialize(f"granikv ({', '.join(reasons)})")
        value = value.materialize(f"granikv ({', '.join(reasons)})")
    if softcap is None and s_aux is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    if dropout or kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            "attn_implementation='granikv' serves sinks (s_aux) and soft-capped scores (softcap) "
            "without dropout and position_bias; call model.eval(), or load this model with "
            "attn_implementation='eager'."
        )
    return _in_one_piece(query, key, value, attention_mask, rule), None


@dataclass(frozen=True, slots=True)
class _ScoreRule:
    """What a layer does to its scores besides masking."""

    scale: float
    softcap: float | None
    sinks: Tensor | None


def _dense_reasons(
    query: Tensor,
    key: LazyKeyValue,
    value: LazyKeyValue,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> list[str]:
    step = key.layer_step
    reasons = ["position_bias is set"] if kwargs.get("position_bias") is not None else []
    if dropout:
        reasons.append(f"dropout is {dropout}")
    if not says_no_more_than(mask, step.window):
        reasons.append("the layer brings a mask of its own")
    if key.is_written or value.is_written:
        reasons.append("the model writes to keys or values")
    if (key.token_dim, value.token_dim) != (2, 2) or value.layer_step is not step:
        reasons.append("keys and values are of another layout or of different layers")
    if not query.dtype == key.dtype == value.dtype:
        reasons.append(f"the query is {query.dtype}, as under autocast")
    if step.plan.dense_reason is not None:
        reasons.append(step.plan.dense_reason)
    return reasons


def _in_one_piece(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: _ScoreRule
) -> Tensor:
    if mask is None and query.shape[2] > 1:
        # as SDPA's own causal mask: aligned at the upper left
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask >= 0
    state = suffix_attention(query, key, value, scale=rule.scale, mask=mask, softcap=rule.softcap)
    return _finished([state], query, rule)


@dataclass(frozen=True, slots=True)
class _StepWork:
    """What attention works out at the first layer of a kind and keeps for the others of a step."""

    backend: PrefixBackend | None
    mask: SuffixMask | None
    local: LocalView | None
    fringe_mask: SuffixMask | None


def _shared(query: Tensor, step: LayerStep, rule: _ScoreRule) -> Tensor:
    scratch, keys, values = step.plan.scratch, step.prefix_keys, step.prefix_values
    key = (query.shape, keys.shape[0], query.device, step.window, rule.softcap is not None)
    work = scratch.get(key)
    if work is None:
        work = scratch[key] = _prepare(query, step, rule)
    own_keys, own_values, states = step.suffix_keys, step.suffix_values, []
    if (local := work.local) is not None:
        start = step.prefix_start
        if work.fringe_mask is not None:
            fringe = slice(local.fringe_start - start, local.common_start - start)
            states.append(_of_fringe(query, keys[:, fringe], values[:, fringe], work, rule))
        keys, values = (
            keys[:, local.common_start - start :],
            values[:, local.common_start - start :],
        )
        own_keys = own_keys[:, :, local.suffix_start :]
        own_values = own_values[:, :, local.suffix_start :]
    if work.backend is not None:
        states.append(work.backend.run(query, keys, values, scale=rule.scale, softcap=rule.softcap))
    states.append(
        suffix_attention(
            query, own_keys, own_values, scale=rule.scale, mask=work.mask, softcap=rule.softcap
        )
    )
    return _finished(states, query, rule)


def _of_fringe(
    query: Tensor, keys: Tensor, values: Tensor, work: _StepWork, rule: _ScoreRule
) -> AttentionState:
    """Attends to the prefix tokens that the windows of some rows have left, each row by itself."""
    num_rows = query.shape[0]
    return suffix_attention(
        query,
        keys.expand(num_rows, -1, -1, -1),
        values.expand(num_rows, -1, -1, -1),
        scale=rule.scale,
        mask=work.fringe_mask,
        softcap=rule.softcap,
    )


def _finished(states: list[AttentionState], query: Tensor, rule: _ScoreRule) -> Tensor:
    """Merges, lets the sinks take their share, and gives the layout of transformers."""
    if rule.sinks is None:
        out = merged_out(states)
    else:
        out, lse = merge_states(states)
        sinks = rule.sinks.to(lse.device, torch.float32)[None, :, None]
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _prepare(query: Tensor, step: LayerStep, rule: _ScoreRule) -> _StepWork:
    plan, local, backend = step.plan, None, None
    mask, fringe_mask, common_start = plan.suffix_mask, None, 0
    if step.window is not None:
        local = local_view(step)
        mask, fringe_mask, common_start = local.suffix_mask, local.fringe_mask, local.common_start
    if plan.shared_len > common_start:
        shape = _group_shape(query, step, plan.shared_len - common_start, rule)
        decision = _dispatcher(plan.dispatch).choose(shape, step.prefix_keys.device.type)
        _note(step, decision.backend_name, _described(shape, decision))
        backend = BACKENDS[decision.backend_name]
    if local is not None and fringe_mask is not None:
        num_tokens = common_start - local.fringe_start
        shape = _group_shape(query, step, num_tokens, rule)
        _note(step, "per_row", f"{_sized(shape)} that only some rows still see")
    ready = [
        None if m is None else prepare_mask(m.to(query.device), query.dtype)
        for m in (mask, fringe_mask)
    ]
    return _StepWork(backend, ready[0], local, ready[1])


def _group_shape(query: Tensor, step: LayerStep, prefix_len: int, rule: _ScoreRule) -> GroupShape:
    num_rows, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads = step.prefix_keys.shape[0]
    return GroupShape(
        num_rows=num_rows,
        q_len=q_len,
        prefix_len=prefix_len,
        num_kv_heads=num_kv_heads,
        gqa_ratio=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=step.prefix_keys.element_size(),
        is_capped=rule.softcap is not None,
    )


def _note(step: LayerStep, backend_name: str, described: str) -> None:
    """Counts a backend once per forward pass, whatever the number of layers and kinds."""
    noted = step.plan.scratch.setdefault("noted backends", set())
    if backend_name not in noted:
        noted.add(backend_name)
        step.plan.journal.note_backend(backend_name, described)


@cache
def _dispatcher(choice: str) -> Dispatcher:
    return Dispatcher(choice, backends=BACKENDS)


def _described(shape: GroupShape, decision: Decision) -> str:
    predicted = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in decision.predicted_s.items())
    refused = "".join(
        f"; {name} refused: {', '.join(why)}" for name, why in decision.refused.items()
    )
    return f"{_sized(shape)}, {decision.regime}-bound, predicted per layer: {predicted}{refused}"


def _sized(shape: GroupShape) -> str:
    return f"{shape.num_rows} rows x {shape.q_len} tokens over {shape.prefix_len}"
