"""A low-rank adapter made by hand, with the switches that PEFT's layers have."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class LoraLinear(nn.Module):
    """A frozen linear layer and named low-rank updates of it, at most one of them active."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = base
        down = {n: nn.Linear(base.in_features, 2, bias=False) for n in names}
        up = {n: nn.Linear(2, base.out_features, bias=False) for n in names}
        self.lora_A, self.lora_B = nn.ModuleDict(down), nn.ModuleDict(up)
        self.scaling = dict.fromkeys(names, 2.0)
        self.active_adapter = names[0]
        self.merged_adapters: list[str] = []

    # a class attribute until it is first set, as in PEFT
    disable_adapters = False

    def forward(self, x: Tensor, adapter_names: list[str] | None = None) -> Tensor:
        out: Tensor = self.base_layer(x)
        if adapter_names is not None:
            rows = [self._added(n, row) for n, row in zip(adapter_names, x, strict=True)]
            return out + torch.stack(rows)
        if self.disable_adapters or self.merged_adapters:
            return out
        return out + self._added(self.active_adapter, x)

    def _added(self, name: str, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return added

    def merge(self) -> None:
        name = self.active_adapter
        delta = self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        self.base_layer.weight.data += delta.detach()
        self.merged_adapters.append(name)


def _bound(module: nn.Module, args: Any, kwargs: Any, adapter_names: list[str]) -> Any:
    return args, {**kwargs, "adapter_names": adapter_names}


@contextmanager
def an_adapter_for_each_row(layers: list[LoraLinear], names: list[str]) -> Iterator[None]:
    """Lets rows run through adapters of their own, as PEFT does for `adapter_names=names`."""
    hook = partial(_bound, adapter_names=names)
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_lora(model: PreTrainedModel, *names: str) -> list[LoraLinear]:
    """Wraps the value projections of a llama, in place."""
    torch.manual_seed(5)
    wrapped = []
    for layer in model.model.layers:
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, names)
        wrapped.append(layer.self_attn.v_proj)
    return wrapped
