"""What counts as another model, and what does not."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import with_lora
from families import SHARED_PATH
from prompts import prefix_ids
from torch import nn
from transformers import PreTrainedModel

from hf_granikv.identity import ModelIdentity, content_difference

UP = "model.layers.1.mlp.up_proj.weight"


def llama(**options: Any) -> PreTrainedModel:
    """Gives a model of its own; what the tests share must keep its weights."""
    return SHARED_PATH["llama"].model(attn_implementation="granikv", **options)


def up(model: PreTrainedModel) -> nn.Parameter:
    return model.get_parameter(UP)


def without_grad(write: Callable[[PreTrainedModel], Any]) -> Callable[[PreTrainedModel], None]:
    def run(model: PreTrainedModel) -> None:
        with torch.no_grad():
            write(model)

    return run


def in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        up(model).mul_(1.01)


def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> Any:
    def run(model: PreTrainedModel) -> None:
        steps = optimizer([up(model)], lr=1e-3, **options)
        model(input_ids=prefix_ids(), labels=prefix_ids(), use_cache=False).loss.backward()
        steps.step()

    return run


def replace_parameter(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(up(model).detach() * 1.01)


def replace_module(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 64, bias=False)


CHANGES: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "written_without_grad": (without_grad(lambda m: up(m).mul_(1.01)), UP),
    "one_element_without_grad": (without_grad(lambda m: up(m)[0, 0].add_(1.0)), UP),
    "copied_into": (without_grad(lambda m: up(m).copy_(torch.randn(64, 32))), UP),
    "written_detached": (lambda m: up(m).detach().mul_(1.01), UP),
    "written_past_autograd": (lambda m: up(m).data.mul_(1.01), UP),
    "one_element_past_autograd": (lambda m: up(m).data[0, 0].add_(1.0), UP),
    "written_by_numpy": (lambda m: up(m).detach().numpy().__imul__(1.01), UP),
    "written_in_inference_mode": (in_inference_mode, UP),
    "data_replaced": (lambda m: setattr(up(m), "data", up(m).data * 1.01), UP),
    "data_transposed": (lambda m: setattr(_o(m), "data", _o(m).data.T), "o_proj.weight"),
    "parameter_replaced": (replace_parameter, UP),
    "module_replaced": (replace_module, UP),
    "sgd": (trained(torch.optim.SGD), UP),
    "adamw": (trained(torch.optim.AdamW), UP),
    "adamw_foreach": (trained(torch.optim.AdamW, foreach=True), UP),
    "adamw_fused": (trained(torch.optim.AdamW, fused=True), UP),
    "state_loaded": (lambda m: m.load_state_dict(llama(seed=3).state_dict()), "weight"),
    "state_assigned": (
        lambda m: m.load_state_dict(llama(seed=3).state_dict(), assign=True),
        "weight",
    ),
    "cast": (lambda m: m.to(torch.bfloat16), "torch.bfloat16 .*, it was torch.float32"),
    "cast_and_back": (lambda m: m.half().float(), "written to or replaced"),
    "rope_buffer_written": (lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "rotary_emb.inv_freq"),
    "rope_buffer_replaced": (
        lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.5),
        "rotary_emb.inv_freq",
    ),
    "rope_buffer_shrunk": (
        lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq[:1].clone()),
        r"rotary_emb.inv_freq is torch.float32 \(1,\) on cpu, it was torch.float32 \(4,\)",
    ),
    "rope_parameters": (
        lambda m: m.config.rope_parameters.update(rope_theta=5e5),
        "rope_parameters .*500000",
    ),
    "attention_scaling": (
        lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.5),
        r"layers.0.self_attn.scaling is 0.5, it was 0.35",
    ),
    "adapter_added": (lambda m: with_lora(m, "a"), "v_proj"),
    "weight_added": (
        lambda m: m.model.register_parameter("extra", nn.Parameter(torch.ones(2))),
        "model.extra was added",
    ),
    "weight_removed": (
        lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", None),
        f"{UP} was removed",
    ),
}


def _o(model: PreTrainedModel) -> nn.Parameter:
    return model.model.layers[0].self_attn.o_proj.weight


@pytest.mark.smoke
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_named(name: str) -> None:
    change, named = CHANGES[name]
    model = llama()
    identity = ModelIdentity(model)
    assert identity.is_of(model)
    change(model)
    assert not identity.is_of(model)
    assert re.search(named, identity.difference(model)), identity.difference(model)


@pytest.mark.parametrize("past", ["data", "numpy", "fused"])
def test_a_large_tensor_is_sampled(past: str) -> None:
    model = llama(intermediate_size=256)
    identity = ModelIdentity(model)
    assert up(model).numel() > 4096
    if past == "data":
        up(model).data.add_(1e-6)
    elif past == "numpy":
        up(model).detach().numpy().__imul__(1.001)
    else:
        trained(torch.optim.AdamW, fused=True)(model)
    assert not identity.is_of(model)
    assert identity.difference(model) == f"{UP} was written to"


@pytest.mark.parametrize("what", ["switched", "disabled", "merged", "scaled", "trained"])
def test_a_change_of_adapters_is_seen(what: str) -> None:
    model = llama()
    layers = with_lora(model, "a", "b")
    identity = ModelIdentity(model)
    layer, name = layers[1], "model.layers.1.self_attn.v_proj"
    if what == "switched":
        layer.active_adapter = "b"
        expected = f"{name}.active_adapter is 'b', it was 'a'"
    elif what == "disabled":
        layer.disable_adapters = True
        expected = f"{name}.disable_adapters is True, it was None"
    elif what == "merged":
        layer.merge()
        expected = f"{name}.merged_adapters is ['a'], it was []"
    elif what == "scaled":
        layer.scaling["a"] = 0.5
        expected = f"{name}.scaling is {{'a': 0.5, 'b': 2.0}}"
    else:
        layer.lora_B["a"].weight.data += 0.1
        expected = f"{name}.lora_B.a.weight was written to"
    assert not identity.is_of(model)
    assert expected in identity.difference(model)


def test_an_adapter_that_is_switched_back_is_the_same() -> None:
    model = llama()
    (first, *_) = with_lora(model, "a", "b")
    identity = ModelIdentity(model)
    first.active_adapter, first.disable_adapters = "b", True
    assert not identity.is_of(model)
    first.active_adapter, first.disable_adapters = "a", False
    assert identity.is_of(model)


HARMLESS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "training_mode": lambda m: m.train(),
    "no_grad_wanted": lambda m: m.requires_grad_(False),
    "cast_to_what_it_is": lambda m: m.to(torch.float32),
    "another_attention": lambda m: m.set_attn_implementation("eager"),
    "gradients": lambda m: (
        m(input_ids=prefix_ids(), labels=prefix_ids()).loss.backward() or m.zero_grad()
    ),
    "generated": lambda m: m.generate(prefix_ids(), max_new_tokens=3),
    "a_hook": lambda m: m.model.register_forward_hook(lambda *_: None),
    "tied_again": lambda m: m.tie_weights(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_key_is_no_change(name: str) -> None:
    model = llama()
    identity = ModelIdentity(model)
    HARMLESS[name](model)
    assert identity.is_of(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_a_forward_rewrites_are_no_change(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope |= {"original_max_position_embeddings": 12}
    model = llama(rope_parameters=rope, max_position_embeddings=12)
    identity = ModelIdentity(model)
    before = model.model.rotary_emb.inv_freq.clone()
    model(input_ids=prefix_ids())
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert identity.is_of(model)


def test_a_model_made_in_inference_mode_has_an_identity() -> None:
    with torch.inference_mode():
        model = llama()
    identity = ModelIdentity(model)
    assert identity.is_of(model)
    with torch.inference_mode():
        up(model).mul_(1.01)
    assert not identity.is_of(model)
    assert UP in identity.difference(model)


def test_weights_that_are_not_numbers_stay_the_same() -> None:
    model = llama()
    up(model).data.fill_(torch.nan)
    assert ModelIdentity(model).is_of(model)


def test_an_identity_keeps_no_weight_alive() -> None:
    model = llama()
    identity = ModelIdentity(model)
    weak = [weakref.ref(weight) for weight in model.parameters()]
    assert identity.is_of(model)
    del model
    gc.collect()
    assert [ref() for ref in weak] == [None] * len(weak)


# ---- two objects


def test_objects_with_equal_weights_do_not_differ() -> None:
    assert content_difference(llama(), llama()) is None
    assert content_difference(llama(), SHARED_PATH["llama"].model()) is None


OTHERS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "other_weights": (lambda: llama(seed=7), "has other values"),
    "one_element": (lambda: _with_one_element(llama()), f"{UP} has other values"),
    "another_dtype": (lambda: llama().to(torch.bfloat16), "is torch.bfloat16, not torch.float32"),
    "another_rope": (
        lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "rope_parameters is .*500000",
    ),
    "another_norm": (lambda: llama(rms_norm_eps=0.1), "rms_norm_eps is 0.1"),
    "another_size": (lambda: llama(intermediate_size=96), "intermediate_size is 96, not 64"),
    "another_family": (lambda: SHARED_PATH["qwen3"].model(), "it is a Qwen3ForCausalLM"),
    "an_adapter": (lambda: _with_adapter(llama()), "it has other weights: .*v_proj"),
}


def _with_one_element(model: PreTrainedModel) -> PreTrainedModel:
    up(model).data[-1, -1] += 1e-4
    return model


def _with_adapter(model: PreTrainedModel) -> PreTrainedModel:
    with_lora(model, "a")
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_every_element_of_another_object_counts(name: str) -> None:
    build, named = OTHERS[name]
    assert re.search(named, content_difference(llama(), build()) or "")


def test_adapters_of_two_objects_are_compared() -> None:
    models = [llama(), llama()]
    layers = [with_lora(model, "a", "b") for model in models]
    assert content_difference(*models) is None
    layers[1][0].active_adapter = "b"
    assert "active_adapter is 'b', not 'a'" in (content_difference(*models) or "")
