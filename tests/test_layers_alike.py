"""A decode step works out once what layers that are alike do, and again for one that is not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import logits_alone, prefilled, step, suffixes, whole
from transformers import AttentionInterface, AttentionMaskInterface

from hf_granikv import attention
from hf_granikv.attention import granikv_attention
from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention.attention import MODULE
from hf_granikv.lazy import LazyKeyValue
from hf_granikv.masks import granikv_mask

NUM_LAYERS, ODD = 4, 2
Change = Callable[..., tuple[Any, ...]]


def _asking(**asked: Any) -> Change:
    return lambda query, key, value, mask: (query, key, value, mask, asked)


# what one layer does that the others do not, and whether the compiled pass still serves it
CHANGES: dict[str, Change] = {
    "nothing": _asking(),
    "scale": _asking(scaling=0.3),
    "softcap": _asking(softcap=2.0),
    "sinks": _asking(s_aux=torch.linspace(-1, 1, 4)),
    "by_parts": lambda q, k, v, mask: (q, k, v.transpose(1, 2).transpose(1, 2), mask, {}),
    "densely": lambda q, k, v, mask: (q, k, 2 * v, mask, {}),
    "keys_as_values": lambda q, k, v, mask: (q, k, k, mask, {}),
    "values_as_keys": lambda q, k, v, mask: (q, v, v, mask, {}),
    "swapped": lambda q, k, v, mask: (q, v, k, mask, {}),
    "in_place": lambda q, k, v, mask: (q, k, _doubled(v), mask, {}),
    "only_keys": lambda q, k, v, mask: (q, 2 * k, v, mask, {}),
    "mask": lambda q, k, v, mask: (q, k, v, _nothing_before(k, q), {}),
}


def _doubled(value: Any) -> Any:
    """The same object where it is lazy; what a cache has stored is nobody's to write to."""
    if not isinstance(value, LazyKeyValue):
        return 2 * value
    value.mul_(2.0)
    return value


def _nothing_before(key: Any, query: Any) -> Any:
    """A mask that hides the first five tokens, and is causal."""
    q_len, kv_len = query.shape[2], key.shape[2]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    mask[:, :5] = False
    return mask.expand(len(query), 1, q_len, kv_len)


@pytest.fixture(params=CHANGES)
def odd_model(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    change = CHANGES[request.param]

    def odd(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if module.layer_idx == ODD:
            query, key, value, mask, asked = change(query, key, value, mask)
            kwargs |= asked
        return granikv_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("granikv_odd", odd)
    AttentionMaskInterface.register("granikv_odd", granikv_mask)
    yield (
        request.param,
        SHARED_PATH["llama"].model(attn_implementation="granikv_odd", num_hidden_layers=NUM_LAYERS),
    )
    AttentionInterface._global_mapping.pop("granikv_odd")
    AttentionMaskInterface._global_mapping.pop("granikv_odd")


@pytest.mark.nothing_shared
@pytest.mark.skipif(isinstance(compiled.load(MODULE), str), reason="there are no compiled kernels")
def test_one_layer_that_is_not_as_the_others(
    odd_model: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model = odd_model
    cache, rows, is_known = prefilled(model), suffixes(4, 4), []
    as_before = attention.decoded_as_before

    def noted(query: Any, layer_step: Any, *args: Any) -> Any:
        out = as_before(query, layer_step, *args)
        is_known.append((layer_step.layer_idx, out is not None))
        return out

    monkeypatch.setattr(attention, "decoded_as_before", noted)
    mask = torch.ones(2, cache.get_seq_length() + 4, dtype=torch.int64)
    step(model, cache, rows, attention_mask=mask)
    for new in ([5, 6], [7, 8]):
        is_known.clear()
        logits = step(model, cache, [[token] for token in new])
        rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
        for row, ids in enumerate(whole(rows)):
            want = logits_alone(model, ids, 1)
            torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)
        known = [layer_idx for layer_idx, known in is_known if known]
        assert known == [i for i in range(1, NUM_LAYERS) if i != ODD or name == "nothing"]
