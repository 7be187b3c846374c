"""A low-rank adapter made by hand, with the switches that PEFT's layers have."""

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

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        if self.disable_adapters or self.merged_adapters:
            return out
        name = self.active_adapter
        return out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]

    def merge(self) -> None:
        name = self.active_adapter
        delta = self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        self.base_layer.weight.data += delta.detach()
        self.merged_adapters.append(name)


def with_lora(model: PreTrainedModel, *names: str) -> list[LoraLinear]:
    """Wraps the value projections of a llama, in place."""
    torch.manual_seed(5)
    wrapped = []
    for layer in model.model.layers:
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, names)
        wrapped.append(layer.self_attn.v_proj)
    return wrapped
