"""What a model computes with, as a digest that another process finds as well."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_granikv.identity import SILENT_OPTIONS, ModelIdentity, ModelParts, options_of
from hf_granikv.tensor_hash import tensor_hashes

# what bitsandbytes dequantises a weight with lies in these attributes of it, in no buffer
_OF_QUANTISED = ("quant_state", "SCB")


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """The content of a model: equal for models that compute alike, in whatever process.

    Covers what `ModelIdentity` covers, with every element of every tensor. Not covered: names and
    places of files, versions of transformers, attention implementations, devices, training mode.

    Attributes:
        architecture: Name of the model's class.
        dtypes: Of its weights.
        options: The config, as JSON with sorted keys.
        switches: Adapters and scalings by the names of their modules, likewise.
        weights: Hash of names, dtypes, shapes and elements of all weights.
        buffers: Likewise, RoPE's frequencies among them.
    """

    architecture: str
    dtypes: str
    options: str
    switches: str
    weights: str
    buffers: str

    @classmethod
    def of(cls, model: nn.Module) -> "ModelDigest":
        """Gives the digest of a model; hashes nothing if the model has not changed since.

        Raises:
            ValueError: If some part of it cannot be read, or says other things in each process.
        """
        if model in _known:
            identity, digest = _known[model]
            if identity.is_of(model):
                return digest
        # the identity first: what changes while hashes are taken counts as a change
        identity, digest = ModelIdentity(model), _computed(model)
        _known[model] = identity, digest
        return digest

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Lets `of` hash a model anew: for writes that `ModelIdentity` cannot see."""
        _known.pop(model, None)

    @property
    def hex(self) -> str:
        """The digest in 64 digits."""
        return _sha256(self.to_json())

    def to_json(self) -> str:
        """All parts as one line of JSON, for `from_json`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ModelDigest":
        """Gives what `to_json` was called on."""
        return cls(**json.loads(text))

    def difference(self, other: "ModelDigest") -> str | None:
        """What a model with the digest `other` computes with that this one does not.

        Returns:
            The first difference found, by name as far as names are kept; None if there is none.
        """
        if other.architecture != self.architecture:
            return f"it is a {other.architecture}, not a {self.architecture}"
        for text, other_text, suffix in (
            (self.options, other.options, " of its config"),
            (self.switches, other.switches, ""),
        ):
            values, others = json.loads(text), json.loads(other_text)
            for name in (*values, *others):
                value, other_value = values.get(name), others.get(name)
                if value != other_value:
                    return f"{name}{suffix} is {other_value!r}, not {value!r}"
        if other.dtypes != self.dtypes:
            return f"its weights are {other.dtypes}, not {self.dtypes}"
        if other.weights != self.weights:
            return "its weights are others"
        if other.buffers != self.buffers:
            return "its buffers (frequencies of RoPE and the like) are others"
        return None


_known: WeakKeyDictionary[nn.Module, tuple[ModelIdentity, ModelDigest]] = WeakKeyDictionary()


def model_digest(model: nn.Module) -> str:
    """The digest of what a model computes with, the same in every process.

    Every element is hashed once for each model object, and again after it has changed.

    Args:
        model: The transformers model; it is not kept alive.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: If some part of it cannot be read, or says other things in each process.
    """
    return ModelDigest.of(model).hex


def _computed(model: nn.Module) -> ModelDigest:
    parts = ModelParts(model)
    names = parts.tensor_names()
    num_weights = len(parts.weights)
    weights = list(zip(names[:num_weights], parts.weights, strict=True))
    buffers = list(zip(names[num_weights:], parts.buffers, strict=True))
    of_weights = [leaf for name, weight in weights for leaf in _leaves(name, weight)]
    of_weights += _scales_of_modules(parts)
    of_buffers = [leaf for name, buffer in buffers for leaf in _leaves(name, buffer)]
    hashes = _hashes([leaf for _, leaf in (*of_weights, *of_buffers) if isinstance(leaf, Tensor)])
    switches = zip(parts.switch_names(), parts.switches, strict=True)
    return ModelDigest(
        architecture=type(model).__name__,
        dtypes=", ".join(sorted({str(weight.dtype) for weight in parts.weights})),
        options=_as_json({name: _plain(name, it) for name, it in options_of(model).items()}),
        switches=_as_json({name: _plain(name, value) for name, (*_, value) in switches}),
        weights=_combined(of_weights, hashes),
        buffers=_combined(of_buffers, hashes),
    )


def _leaves(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    """What a tensor consists of: tensors with memory of their own, and plain values."""
    if isinstance(part, Tensor) and hasattr(part, "__tensor_flatten__"):
        inner_names, context = part.__tensor_flatten__()
        yield f"{name}.context", _plain(name, context)
        for inner in inner_names:
            yield from _leaves(f"{name}.{inner}", getattr(part, inner))
    elif isinstance(part, Tensor):
        _check_readable(name, part)
        yield name, part
        for attribute in _OF_QUANTISED:
            if (attached := getattr(part, attribute, None)) is not None:
                yield from _leaves(f"{name}.{attribute}", attached)
    elif type(part).__name__ == "QuantState":
        for attribute, value in sorted(vars(part).items()):
            yield from _leaves(f"{name}.{attribute}", value)
    else:
        yield name, _plain(name, part)


def _scales_of_modules(parts: ModelParts) -> Iterator[tuple[str, Any]]:
    """Scales that bitsandbytes moves from a weight to its module in the first forward."""
    for prefix, module in parts.named_modules():
        scales = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scales, Tensor) and getattr(module.weight, "SCB", None) is None:
            yield from _leaves(f"{prefix}weight.SCB", scales)


def _check_readable(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the meta device, where accelerate leaves what it offloads, and cannot "
            "be read; load the model without offloading."
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise ValueError(f"{name} is {kind}, which cannot be hashed; convert it to a dense tensor.")


def _hashes(tensors: list[Tensor]) -> dict[Any, str]:
    """Hashes by the place of a tensor, so that a tied weight is read once."""
    places = {_place(tensor): tensor for tensor in tensors}
    return dict(zip(places, tensor_hashes(list(places.values())), strict=True))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _combined(leaves: list[tuple[str, Any]], hashes: dict[Any, str]) -> str:
    entries = {
        name: [str(leaf.dtype), list(leaf.shape), hashes[_place(leaf)]]
        if isinstance(leaf, Tensor)
        else leaf
        for name, leaf in leaves
    }
    return _sha256(_as_json(entries))


def _plain(name: str, value: Any) -> Any:
    """A value as JSON writes it, alike for values that are equal."""
    if isinstance(value, dict):
        return {
            str(k): _plain(f"{name}.{k}", v) for k, v in value.items() if k not in SILENT_OPTIONS
        }
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(name, item) for item in value), key=repr)
    if isinstance(value, Enum):
        return _plain(name, value.value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    raise ValueError(
        f"{name} is a {type(value).__name__}, of which another process cannot tell whether it is "
        "the same; a prefix of this model cannot be saved."
    )


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
