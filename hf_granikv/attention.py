"""The attention function: prefix once per group, suffix per row, merged by log-sum-exp."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_granikv.compat import outside_graphs
from hf_granikv.errors import NotPackableError
from hf_granikv.gradients import SeenPart, needs_gradients, parts_seen, with_gradients
from hf_granikv.graphs import DeferredKeyValue, attend_in_graph, implement
from hf_granikv.kernels.suffix_attention import suffix_attention
from hf_granikv.lazy import LazyKeyValue, are_as_stored, step_of
from hf_granikv.masks import granikv_mask, says_no_more_than
from hf_granikv.packed_tensors import PackedKeyValue, segments_of
from hf_granikv.part_work import ScoreRule
from hf_granikv.step_attention import decoded_as_before, finished, step_attention
from hf_granikv.views import LayerStep, PrivateTokens

ATTENTION_NAME = "granikv"


def register() -> None:
    """Makes `attn_implementation="granikv"` known to transformers, with its masks."""
    AttentionInterface.register(ATTENTION_NAME, granikv_attention)
    # without a mask function of the same name every mask would silently be None
    AttentionMaskInterface.register(ATTENTION_NAME, granikv_mask)
    implement(granikv_attention, decoded_as_before)


@outside_graphs(in_graphs=attend_in_graph)
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
        key: `[rows, num_kv_heads, kv_len, head_dim]`, lazy if it comes from a cache with a prefix,
            packed if it comes from several.
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
    scale = scaling or query.shape[-1] ** -0.5
    is_plain = attention_mask is None and s_aux is None and not dropout
    if is_plain and isinstance(key, LazyKeyValue) and "position_bias" not in kwargs:
        as_before = _as_before(query, key, value, scale, softcap)
        if as_before is not None:
            return as_before, None
    if isinstance(key, DeferredKeyValue) or isinstance(value, DeferredKeyValue):
        key, value = (t.stored() if isinstance(t, DeferredKeyValue) else t for t in (key, value))
    if isinstance(key, PackedKeyValue):
        if not says_no_more_than(attention_mask, key.segments[0].layer_step.window):
            raise NotPackableError("a layer brings a mask of its own")
        options = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
        return _packed(module, query, key, value, **options, **kwargs), None
    rule = ScoreRule(scale, softcap, s_aux)
    if isinstance(key, LazyKeyValue) and isinstance(value, LazyKeyValue):
        reasons = _dense_reasons(query, key, value, attention_mask, dropout, kwargs)
        if not reasons:
            return _by_parts(query, step_of(key, value), rule), None
        asked_by = f"granikv ({', '.join(reasons)})"
        key, value = key.materialize(asked_by), value.materialize(asked_by)
    if attention_mask is None and _is_causal(module, kwargs):
        attention_mask = _mask_of_cut_queries(query.shape[2], key)
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


def _as_before(
    query: Tensor, key: LazyKeyValue, value: Tensor, scale: float, softcap: float | None
) -> Tensor | None:
    """Attends as an earlier layer of the step did that was given the like; None if none was."""
    if torch.is_grad_enabled() or not isinstance(value, LazyKeyValue):
        return None
    step = key.layer_step
    if step is not value.layer_step or key.is_written or value.is_written:
        return None
    return decoded_as_before(query, step, scale, softcap) if are_as_stored(key, value) else None


def _mask_of_cut_queries(q_len: int, key: Tensor) -> Tensor | None:
    """The causal mask of the last queries, where a model cuts them after its mask was made.

    SDPA would align them at the upper left.
    """
    kv_len = key.shape[2]
    if not 1 < q_len < kv_len:
        return None
    return key.new_ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _packed(
    module: nn.Module, query: Tensor, keys: PackedKeyValue, values: Tensor, **options: Any
) -> Tensor:
    """Attends batch by batch; gives `[1, num_tokens, num_q_heads, head_dim]`."""
    if options.get("position_bias") is not None or not isinstance(values, PackedKeyValue):
        raise NotPackableError("attention is given more than queries, keys and values")
    queries = segments_of(query, keys.sizes)
    outs = [
        granikv_attention(module, *of_batch, None, **options)[0].flatten(0, 1)
        for of_batch in zip(queries, keys.segments, values.segments, strict=True)
    ]
    return torch.cat(outs).unsqueeze(0)


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
    if not query.dtype == key.kept_dtype == value.kept_dtype:
        reasons.append(f"the query is {query.dtype}, as under autocast")
    if query.dtype == torch.float64:
        reasons.append("parts are merged in float32, and the query is torch.float64")
    if step.plan.dense_reason is not None:
        reasons.append(step.plan.dense_reason)
    return reasons


def _by_parts(query: Tensor, step: LayerStep, rule: ScoreRule) -> Tensor:
    if not torch.is_grad_enabled():
        return step_attention(query, step, rule)
    own = step.private.tensors
    stored = (t for part in step.parts for t in (part.keys, part.values))
    if not needs_gradients(query, *own, rule.sinks, *stored):
        return step_attention(query, step, rule)
    # some layers have tokens with a graph, and all of a step go one way
    step = replace(step, private=PrivateTokens.of_tensors(*own))
    return with_gradients(
        lambda: step_attention(query, step, rule),
        query,
        parts_seen(step, query.shape[2]),
        scale=rule.scale,
        softcap=rule.softcap,
        sinks=rule.sinks,
    )


def _in_one_piece(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: ScoreRule
) -> Tensor:
    if mask is None and query.shape[2] > 1:
        # as SDPA's own causal mask: aligned at the upper left
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask >= 0
    scores: dict[str, Any] = {"scale": rule.scale, "softcap": rule.softcap}

    def run() -> Tensor:
        return finished([suffix_attention(query, key, value, mask=mask, **scores)], query, rule)

    if not needs_gradients(query, key, value, rule.sinks):
        return run()
    part = SeenPart(key, value, mask)
    return with_gradients(run, query, [part], sinks=rule.sinks, **scores)
