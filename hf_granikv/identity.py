"""What a model computes with, as cheap marks that show when it has changed.

Version counters show writes that autograd sees. Fused optimizers, `.data`, numpy and collectives
write past them, so some elements of each tensor are compared as well. Nothing here keeps a
tensor of the model alive.
"""

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# how adapter layers (PEFT's, and others alike) say which weights count, and what scales scores
_SWITCHES = {
    *("active_adapter", "_active_adapter", "active_adapters"),
    *("disable_adapters", "_disable_adapters", "merged", "merged_adapters"),
    *("scaling", "attention_scaling"),
}
# what PEFT binds to hooks for the time of one call, to say what each row of its batch runs through
_OF_ROWS = {"adapter_names", "alora_offsets"}
_SWITCH_TYPES = (bool, int, float, str, list, tuple, dict)
# tensors of up to so many elements are compared whole, larger ones by one run in their middle:
# time goes by the number of tensors, and a run costs a few cache lines
_WHOLE_LENGTH, _RUN_LENGTH = 4096, 64
# compared bit by bit, since NaN differs from itself
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# what a config says that changes no key and no value
SILENT_OPTIONS = {
    *("_attn_implementation", "_name_or_path", "architectures", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "output_attentions"),
    *("output_hidden_states", "return_dict"),
}

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_POINTER, _VERSION, _STRIDE = Tensor.data_ptr, attrgetter("_version"), Tensor.stride


class ModelIdentity:
    """The weights, adapters, dtypes and config of a model object at one moment.

    Caught with certainty: a weight replaced, moved, cast, or written where autograd sees it; an
    adapter added, switched, disabled, merged or scaled; another attention scaling; anything in the
    config, RoPE and windows included. A write past autograd is caught in tensors of up to 4,096
    elements, and in larger ones if it changes one of 64 in the middle, as updates of whole tensors
    do. Not looked at: hooks, replaced `forward` methods or activations, numbers that modules copied
    from the config, training mode, and weights of a tensor subclass beyond their version counter.

    Args:
        model: The transformers model; it is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = ModelParts(model)
        self._options = deepcopy(options_of(model))
        self._switches = deepcopy(parts.switches)
        self._marks = _marks(parts.weights)
        self._kinds = list(map(_kind, [*parts.weights, *parts.buffers]))
        self._names = parts.tensor_names()
        self._switch_names = parts.switch_names()
        self._runs = _groups_of_runs([*parts.weights, *parts.buffers])
        self._samples = self._read_samples(parts)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model still computes what it did."""
        parts = ModelParts(model)
        return (
            len(parts.weights) + len(parts.buffers) == len(self._names)
            and parts.switches == self._switches
            and _marks(parts.weights) == self._marks
            and list(map(_kind, parts.buffers)) == self._kinds[len(parts.weights) :]
            and options_of(model) == self._options
            and all(map(torch.equal, self._read_samples(parts), self._samples))
        )

    def difference(self, model: nn.Module) -> str:
        """What has changed in the model since, by name; of several changes the first found."""
        now = ModelIdentity(model)
        if other := _first_other(now._options, self._options):
            name, option, earlier = other
            return f"{name} of its config is {option!r}, it was {earlier!r}"
        were = dict(zip(self._switch_names, (value for *_, value in self._switches), strict=True))
        are = dict(zip(now._switch_names, (value for *_, value in now._switches), strict=True))
        if other := _first_other(are, were):
            name, switch, earlier = other
            return f"{name} is {switch!r}, it was {earlier!r}"
        added, removed = set(now._names) - set(self._names), set(self._names) - set(now._names)
        if added or removed:
            one, verb = (min(added), "added") if added else (min(removed), "removed")
            return f"{one} was {verb}"
        for name, is_, was in zip(self._names, now._kinds, self._kinds, strict=False):
            if is_ != was:
                return f"{name} is {_in_words(is_)}, it was {_in_words(was)}"
        for name, is_, was in zip(self._names, now._marks, self._marks, strict=False):
            if is_ != was:
                return f"{name} was written to or replaced"
        return f"{self._first_other_run(now)} was written to"

    def _read_samples(self, parts: "ModelParts") -> list[Tensor]:
        tensors = [*parts.weights, *parts.buffers]
        with torch.inference_mode():
            samples = [
                torch.cat([tensors[i].as_strided((n,), (1,), at) for i, n, at in group])
                for group in self._runs
            ]
            return [sample.view(_BITS[sample.element_size()]) for sample in samples]

    def _first_other_run(self, now: "ModelIdentity") -> str:
        for group, is_, was in zip(self._runs, now._samples, self._samples, strict=True):
            per_element = len(was) // sum(n for _, n, _ in group)
            lengths = [n * per_element for _, n, _ in group]
            pairs = zip(is_.split(lengths), was.split(lengths), strict=True)
            for (tensor_idx, *_), (run_now, run_then) in zip(group, pairs, strict=True):
                if not torch.equal(run_now, run_then):
                    return self._names[tensor_idx]
        raise AssertionError("difference was asked of a model that has not changed")


def argument_of_rows(model: nn.Module) -> str | None:
    """What lets rows of a batch run through weights of their own in the call under way.

    PEFT takes such arguments (`adapter_names`, say) from a call of the model that it wraps, and
    binds them to hooks of its layers; the model itself never sees them.

    Returns:
        The name; None if all rows run through the same.
    """
    for module in _modules(model):
        for hook in module._forward_pre_hooks.values():
            bound = _OF_ROWS & getattr(hook, "keywords", {}).keys()
            code = getattr(hook, "__code__", None)
            if not bound and str(getattr(hook, "__module__", "")).startswith("peft."):
                bound = set(getattr(code, "co_freevars", ())) or {"a hook of PEFT"}
            if bound:
                return min(bound)
    return None


def content_difference(model: nn.Module, other: nn.Module) -> str | None:
    """What `other` would compute with that `model` does not, every element compared.

    Returns:
        The first difference found, by name; None if there is none.
    """
    if type(model) is not type(other):
        return f"it is a {type(other).__name__}, not a {type(model).__name__}"
    if option := _first_other(options_of(model), options_of(other)):
        name, value, other_value = option
        return f"{name} is {other_value!r}, not {value!r}"
    parts, other_parts = ModelParts(model), ModelParts(other)
    names, other_names = parts.tensor_names(), other_parts.tensor_names()
    if names != other_names:
        return f"it has other weights: {min(set(names) ^ set(other_names))}"
    if parts.switch_names() != other_parts.switch_names():
        return (
            f"it has other adapters: {set(parts.switch_names()) ^ set(other_parts.switch_names())}"
        )
    pairs = zip(parts.switches, other_parts.switches, strict=True)
    for name, ((*_, value), (*_, other_value)) in zip(parts.switch_names(), pairs, strict=True):
        if value != other_value:
            return f"{name} is {other_value!r}, not {value!r}"
    tensors = zip(
        [*parts.weights, *parts.buffers], [*other_parts.weights, *other_parts.buffers], strict=True
    )
    for name, (tensor, other_tensor) in zip(names, tensors, strict=True):
        if tensor.dtype != other_tensor.dtype:
            return f"{name} is {other_tensor.dtype}, not {tensor.dtype}"
        if tensor is not other_tensor and not _is_equal(tensor, other_tensor):
            return f"{name} has other values"
    return None


class ModelParts:
    """The tensors and switches of a model's modules, in one order for equal structures."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: list[Tensor] = []
        self.buffers: list[Tensor] = []
        # (index of the module, attribute, value)
        self.switches: list[tuple[int, str, Any]] = []
        self._model = model
        self._modules = _modules(model)
        owned = chain.from_iterable(map(dict.values, map(_PARAMETERS, self._modules)))
        self.weights += [weight for weight in owned if weight is not None]
        for module in self._modules:
            if module._buffers:
                self.buffers += [buffer for _, buffer in _lasting_buffers(module)]
        for module_idx, attributes in enumerate(map(vars, self._modules)):
            if not attributes.keys().isdisjoint(_SWITCHES):
                self._add_switches(module_idx, attributes)

    def _add_switches(self, module_idx: int, attributes: dict[str, Any]) -> None:
        for name in sorted(_SWITCHES & attributes.keys()):
            value = attributes.get(name)
            # an adapter that was never disabled has no flag of its own
            if value is not None and value is not False and isinstance(value, _SWITCH_TYPES):
                self.switches.append((module_idx, name, value))

    def tensor_names(self) -> list[str]:
        """Names of the weights, then of the buffers."""
        prefixes = self._prefixes()
        weights = [
            prefix + name
            for prefix, module in zip(prefixes, self._modules, strict=True)
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        buffers = [
            prefix + name
            for prefix, module in zip(prefixes, self._modules, strict=True)
            for name, _ in _lasting_buffers(module)
        ]
        return weights + buffers

    def switch_names(self) -> list[str]:
        """Names of the switches."""
        prefixes = self._prefixes()
        return [prefixes[module_idx] + name for module_idx, name, _ in self.switches]

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules, each with what the names of its parts begin with."""
        return list(zip(self._prefixes(), self._modules, strict=True))

    def _prefixes(self) -> list[str]:
        names = {module: name for name, module in self._model.named_modules()}
        return [f"{names[module]}." if names[module] else "" for module in self._modules]


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module, level by level; `model.modules()` puts names together, which takes longer."""
    level, found = [model], []
    while level:
        found += level
        children = chain.from_iterable(map(dict.values, map(_CHILDREN, level)))
        level = [child for child in children if child is not None]
    return found


def _lasting_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that a forward leaves alone: RoPE that depends on the length rewrites its own."""
    rope_type = str(getattr(module, "rope_type", None))
    is_rewritten = "dynamic" in rope_type or "longrope" in rope_type
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None
        and not (is_rewritten and name.endswith("inv_freq") and "original" not in name)
    ]


def _marks(weights: list[Tensor]) -> list[tuple[Any, ...]]:
    """Where each tensor lies, and how often autograd saw it written."""
    try:
        return list(
            zip(map(_POINTER, weights), map(_VERSION, weights), map(_STRIDE, weights), strict=True)
        )
    except RuntimeError:
        # made in inference mode: no counter; or a subclass without memory of its own
        return [(id(t), t.is_inference() or t._version, t.shape) for t in weights]


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    return tensor.dtype, tensor.device, tuple(tensor.shape)


def _groups_of_runs(tensors: list[Tensor]) -> list[list[tuple[int, int, int]]]:
    """The elements to compare, by dtype and device: index of the tensor, how many, from where."""
    groups: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for tensor_idx, tensor in enumerate(tensors):
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and not tensor.is_meta and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in steps)
            length = span if span <= _WHOLE_LENGTH else _RUN_LENGTH
            run = (tensor_idx, length, int(tensor.storage_offset()) + (span - length) // 2)
            groups[tensor.dtype, tensor.device].append(run)
    return list(groups.values())


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.is_meta or other.is_meta:
        return False
    return torch.equal(tensor, other.to(tensor.device))


def options_of(model: nn.Module) -> dict[str, Any]:
    """What the config says, except what changes no key and no value."""
    config: Any = model.config
    options: dict[str, Any] = config.to_dict()
    return {name: value for name, value in options.items() if name not in SILENT_OPTIONS}


def _first_other(these: dict[str, Any], those: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name that stands for different things in the two, and those; None if there is none."""
    for name in (*these, *those):
        if these.get(name) != those.get(name):
            return name, these.get(name), those.get(name)
    return None


def _in_words(kind: tuple[torch.dtype, torch.device, tuple[int, ...]]) -> str:
    dtype, device, shape = kind
    return f"{dtype} {shape} on {device}"
