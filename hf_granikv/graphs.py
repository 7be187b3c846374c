"""What a compiled forward holds of the cache and attention of one layer: a single operator.

A compiler traces a forward once and runs what it saw in every later one. What the cache and attention do
differs from step to step, so none of it is traced: `update` gives a note of what is to be stored, and
attention, given that note, puts one operator into the graph that stores and attends as ever. Whoever else
looks into the note gets the keys and values that `update` gives outside of graphs, at the price of a
graph break.
"""

from collections.abc import Callable, Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from hf_granikv.lazy import lazy_pair, stays

_LIBRARY = torch.library.Library("hf_granikv", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor number, int layer_idx, bool is_stored, "
    "float? scaling, float? softcap, Tensor? sinks) -> Tensor",
    # what it does depends on what is held, and is not in the arguments
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout),
)

# graphs take tensors, not objects; a number in a tensor is no constant of theirs
_caches: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def number_of(cache: Any) -> Tensor:
    """A number, `[]` int64 on the CPU, by which graphs know a cache; given once to each."""
    number = next(_numbers)
    _caches[number] = cache
    numbered: Any = torch.tensor(number, device="cpu")
    # reading a tensor takes as long as a small operator
    numbered.of_cache = ref(cache)
    return numbered


def _cache_of(number: Any) -> Any:
    of_cache = getattr(number, "of_cache", None)
    return _caches[int(number)] if of_cache is None else of_cache()


class DeferredUpdate:
    """What a layer brings to a cache, not stored yet.

    Args:
        cache: A `GraphCache`, whose `layers` store it.
        layer_idx: The layer.
        keys: `[num_rows, num_kv_heads, q_len, head_dim]`.
        values: Likewise.

    Attributes:
        is_stored: Whether it has been, or an operator before those to come stores it.
    """

    def __init__(self, cache: Any, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        self.cache, self.layer_idx = cache, layer_idx
        self.keys, self.values = keys, values
        self.is_stored = False
        self._given: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def store(self) -> tuple[Tensor, Tensor]:
        """Stores it, unless that is done; gives what `update` gives."""
        if self._given is None:
            self._given = _given(self.cache, self.layer_idx, self.keys, self.values, self.is_stored)
            self.is_stored = True
        return self._given


class DeferredKeyValue:
    """All keys, or all values, of a layer in a forward that is being traced.

    No tensor, so that nothing can be computed with it unnoticed.

    Args:
        update: What is to be stored first.
        is_value: Which of the two these are.
    """

    def __init__(self, update: DeferredUpdate, *, is_value: bool) -> None:
        self.update, self.is_value = update, is_value

    def stored(self) -> Tensor:
        """The keys or values, once stored."""
        return self.update.store()[self.is_value]

    def to(self, *targets: Any, **named: Any) -> Any:
        """`Tensor.to`; these themselves where that changes nothing."""
        like = self.update.values if self.is_value else self.update.keys
        return self if stays(like, *targets, **named) else self.stored().to(*targets, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.stored(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls it with what is stored."""
        return _with_stored(func, args, kwargs or {})


def _operator(name: str) -> Callable[..., Any]:
    return lambda deferred, *others: getattr(deferred.stored(), name)(*others)


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (
    *("getitem", "setitem", "len", "iter", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
    *(f"{side}{name}" for name in _ARITHMETIC for side in ("", "r")),
):
    setattr(DeferredKeyValue, f"__{_name}__", _operator(f"__{_name}__"))


@torch.compiler.disable
def _with_stored(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = torch.utils._pytree.tree_map_only(
        DeferredKeyValue, DeferredKeyValue.stored, (args, kwargs)
    )
    return func(*args, **kwargs)


def attend_in_graph(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: Any = None,
    dropout: float = 0.0,
    softcap: Any = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None] | None:
    """Puts attention of one layer into the graph that is being traced.

    Args:
        module: As for `granikv_attention`, like the others.
        query: Likewise.
        key: Likewise.
        value: Likewise.
        attention_mask: Likewise.
        scaling: Likewise.
        dropout: Likewise.
        softcap: Likewise.
        s_aux: Likewise.
        kwargs: Likewise.

    Returns:
        As `granikv_attention`; None if it has to stay outside.
    """
    if not isinstance(key, DeferredKeyValue) or not isinstance(value, DeferredKeyValue):
        return None
    update = key.update
    if value.update is not update or key.is_value or not value.is_value:
        return None
    if attention_mask is not None or dropout or kwargs.get("position_bias") is not None:
        return None
    if isinstance(scaling, Tensor) or isinstance(softcap, Tensor):
        return None
    of_layer = update.keys, update.values, update.cache.number, update.layer_idx, update.is_stored
    # layers may attend to what an earlier one has stored
    update.is_stored = True
    return torch.ops.hf_granikv.attend(query, *of_layer, scaling, softcap, s_aux), None


def _given(
    cache: Any, layer_idx: int, keys: Tensor, values: Tensor, is_stored: bool
) -> tuple[Tensor, Tensor]:
    layer, cache.rows.forwards.is_in_graph = cache.layers[layer_idx], True
    given: tuple[Tensor, Tensor] = layer.given() if is_stored else layer.update(keys, values)
    return given


def implement(
    attention: Callable[..., tuple[Tensor, None]], at_once: Callable[..., Tensor | None]
) -> None:
    """Says what the operator does: stores, and attends.

    Args:
        attention: Attends to what `update` gives.
        at_once: Stores and attends where an earlier layer of the step has shown how
            (`decoded_as_before`); gives None, and does nothing, where none has.
    """

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        number: Tensor,
        layer_idx: int,
        is_stored: bool,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        cache = _cache_of(number)
        layer = cache.layers[layer_idx]
        if not is_stored and (ready := layer.made_ready(keys, values)) is not None:
            if sinks is None:
                scale = scaling or query.shape[-1] ** -0.5
                done = at_once(query, ready.of_layer, scale, softcap, (keys, values))
                if done is not None:
                    return done
            layer.put(ready, keys, values)
            key, value = lazy_pair(ready.of_layer)
        else:
            key, value = _given(cache, layer_idx, keys, values, is_stored)
        rule: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": sinks}
        # SDPA asks for it, where attention goes there after all
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1])
        out, _ = attention(module, query, key, value, None, **rule)
        return out

    _LIBRARY.impl("attend", attend, "CompositeExplicitAutograd")


@torch.library.register_fake("hf_granikv::attend", lib=_LIBRARY)
def _shape_of_attend(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    num_rows, num_heads, q_len = query.shape[:3]
    return query.new_empty(num_rows, q_len, num_heads, values.shape[3])
