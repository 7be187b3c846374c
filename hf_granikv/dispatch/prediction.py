"""Predicts a decode step of a whole model on a known device, on paper."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_granikv.dispatch.dispatcher import Candidate
from hf_granikv.dispatch.roofline import PRIVATE, DeviceConstants, predict_all, regime_of
from hf_granikv.dispatch.sharing import dynamic_cache_s
from hf_granikv.views import GroupShape, LayerKind


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What attention of a model depends on.

    Attributes:
        name: What to call it.
        num_q_heads: Query heads of a layer.
        num_kv_heads: Key/value heads.
        head_dim: Width of one head.
        layers: The layers that attend.
        dtype: Torch's name of its numbers.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Load:
    """One decode step: rows with a token each, over a prefix, after private tokens of their own."""

    num_rows: int
    prefix_len: int
    suffix_len: int


@dataclass(frozen=True, slots=True)
class KindPrediction:
    """What a layer of one kind takes.

    Attributes:
        layer: The kind.
        num_layers: How many there are of it.
        shape: The prefix part; of no tokens where the window has left the prefix.
        prefix_s: Seconds of each backend that can run.
        refused: Reasons of every backend that cannot.
        regime: What limits the fastest one.
        suffix_s: Seconds over the private tokens, merge included.
        dynamic_s: Seconds of a `DynamicCache`.
        shared_bytes: Of our cache: the prefix.
        private_bytes: Of our cache: the rows.
        dynamic_bytes: Of a `DynamicCache`.
    """

    layer: LayerKind
    num_layers: int
    shape: GroupShape
    prefix_s: dict[str, float]
    refused: dict[str, list[str]]
    regime: str
    suffix_s: float
    dynamic_s: float
    shared_bytes: int
    private_bytes: int
    dynamic_bytes: int

    @property
    def fastest(self) -> str | None:
        """The backend that is predicted to be; None without a prefix."""
        return min(self.prefix_s, key=self.prefix_s.__getitem__, default=None)

    @property
    def ours_s(self) -> float:
        """Seconds of a layer with the fastest backend."""
        return self.suffix_s + min(self.prefix_s.values(), default=0.0)


def predict_kinds(
    model: ModelShape,
    load: Load,
    *,
    constants: DeviceConstants,
    backends: Mapping[str, Candidate],
) -> list[KindPrediction]:
    """Predicts a decode step, for each kind of layers.

    Args:
        model: The model.
        load: What it has to do.
        constants: Of the device.
        backends: Backends by name, `"per_row"` among them.
    """
    return [
        _of_kind(model, load, layer, num_layers, constants, backends)
        for layer, num_layers in Counter(model.layers).items()
    ]


def _of_kind(
    model: ModelShape,
    load: Load,
    layer: LayerKind,
    num_layers: int,
    constants: DeviceConstants,
    backends: Mapping[str, Candidate],
) -> KindPrediction:
    window, length = layer.window, load.prefix_len + load.suffix_len
    first_seen = 0 if window is None else window.first_reached(length)
    seen_prefix = max(0, load.prefix_len - first_seen)
    seen_suffix = length + 1 - max(first_seen, load.prefix_len)
    shape = _shape(model, load.num_rows, seen_prefix)
    reasons = {name: backend.unsupported_reasons(shape) for name, backend in backends.items()}
    works = {n: b.work(shape) for n, b in backends.items() if not reasons[n] and seen_prefix}
    prefix_s = predict_all(works, constants, model.dtype)
    regime = ""
    if prefix_s:
        fastest = min(prefix_s, key=prefix_s.__getitem__)
        regime = regime_of(works[fastest], constants, fastest, model.dtype)
    own = backends["per_row"].work(shape._replace(prefix_len=seen_suffix))
    # what was measured for it, else what reading a copy in every row takes
    name = PRIVATE if constants.knows([PRIVATE], model.dtype) else "per_row"
    own = replace(own, stored_bytes=own.bytes)
    suffix_s = predict_all({name: own}, constants, model.dtype)[name]
    if prefix_s:
        suffix_s += constants.merge.predict_s(4.0 * shape.num_queries * shape.head_dim)
    # a layer that reads another one's keys and values stores none
    token_bytes = int(layer.stores) * 2 * model.num_kv_heads * model.head_dim * shape.dtype_bytes
    kept = length if window is None else min(length, window.size - 1)
    whole = shape._replace(prefix_len=seen_prefix + seen_suffix)
    return KindPrediction(
        layer=layer,
        num_layers=num_layers,
        shape=shape,
        prefix_s=prefix_s,
        refused={name: why for name, why in reasons.items() if why},
        regime=regime,
        suffix_s=suffix_s,
        dynamic_s=dynamic_cache_s(whole, constants=constants, backends=backends),
        shared_bytes=token_bytes
        * (load.prefix_len if window is None else min(kept, load.prefix_len)),
        private_bytes=token_bytes * load.num_rows * load.suffix_len,
        dynamic_bytes=token_bytes * load.num_rows * kept,
    )


def _shape(model: ModelShape, num_rows: int, prefix_len: int) -> GroupShape:
    return GroupShape(
        num_rows=num_rows,
        q_len=1,
        prefix_len=prefix_len,
        num_kv_heads=model.num_kv_heads,
        gqa_ratio=model.num_q_heads // model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=4 if model.dtype == "float32" else 2,
        dtype=model.dtype,
    )
