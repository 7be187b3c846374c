"""A digest of a model that any process finds, for what is saved."""

import gc
import hashlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import with_lora
from families import HYBRIDS, LOCAL, SHARED_PATH
from test_identity import CHANGES, HARMLESS, UP, llama, up
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedModel

from hf_granikv import model_digest as module
from hf_granikv import tensor_hash
from hf_granikv.model_digest import ModelDigest, model_digest
from hf_granikv.tensor_hash import tensor_hashes

FAMILIES = {**SHARED_PATH, **LOCAL, **HYBRIDS}
IN_ANOTHER_PROCESS = """
import sys
import torch
from families import SHARED_PATH
from transformers import AutoModelForCausalLM
from hf_granikv.model_digest import model_digest

torch.set_num_threads(2)
built = SHARED_PATH["qwen3"].model(attn_implementation="eager")
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")
print(model_digest(built), model_digest(loaded))
"""


@pytest.mark.smoke
def test_another_process_finds_the_same_digest(tmp_path: Path) -> None:
    model = SHARED_PATH["qwen3"].model(attn_implementation="granikv")
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)]
    # hash() gives other numbers there, and sets another order
    other = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "2"}
    out = subprocess.run(command, env=other, capture_output=True, text=True, check=True).stdout
    assert out.split() == [model_digest(model)] * 2


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_another_model_has_another_digest(name: str) -> None:
    change, _ = CHANGES[name]
    model = llama()
    before = ModelDigest.of(model)
    change(model)
    after = ModelDigest.of(model)
    assert before.hex != after.hex
    assert before.difference(after) is not None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_key_changes_no_digest(name: str) -> None:
    model = llama()
    before = model_digest(model)
    HARMLESS[name](model)
    ModelDigest.forget(model)
    assert model_digest(model) == before


def exchange_gate_and_up(mlp: Any) -> None:
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


OTHERS: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "weights": (lambda m: up(m).data[-1, -1].add_(1e-4), "its weights are others"),
    "exchanged": (lambda m: exchange_gate_and_up(m.model.layers[1].mlp), "its weights are others"),
    "dtype": (lambda m: m.bfloat16(), "its weights are torch.bfloat16, not torch.float32"),
    "config": (
        lambda m: setattr(m.config, "rms_norm_eps", 0.1),
        "rms_norm_eps of its config is 0.1, not 1e-06",
    ),
    "scaling": (
        lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.5),
        "model.layers.0.self_attn.scaling is 0.5, not 0.3535533905932738",
    ),
    "buffers": (
        lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
        "its buffers (frequencies of RoPE and the like) are others",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference_is_named(name: str) -> None:
    change, named = OTHERS[name]
    model, other = llama(), llama()
    change(other)
    assert ModelDigest.of(model).difference(ModelDigest.of(other)) == named


def test_another_class_is_named() -> None:
    digests = [ModelDigest.of(SHARED_PATH[name].model()) for name in ("llama", "qwen3")]
    assert digests[0].difference(digests[1]) == "it is a Qwen3ForCausalLM, not a LlamaForCausalLM"


def test_adapters_count_as_they_are_switched() -> None:
    model = llama()
    plain = model_digest(model)
    layer = with_lora(model, "a", "b")[0]
    with_a = model_digest(model)
    layer.active_adapter = "b"
    with_b = model_digest(model)
    layer.active_adapter = "a"
    assert len({plain, with_a, with_b}) == 3
    assert model_digest(model) == with_a


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_digest_of_its_content(name: str) -> None:
    first, again, other = (FAMILIES[name].model(seed=seed) for seed in (1, 1, 2))
    assert model_digest(first) == model_digest(again) != model_digest(other)


def test_a_digest_comes_back_from_json() -> None:
    digest = ModelDigest.of(llama())
    assert ModelDigest.from_json(digest.to_json()) == digest


# ---- what it costs


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the hash was given."""
    counts: list[int] = []

    def counting(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return tensor_hashes(tensors)

    monkeypatch.setattr(module, "tensor_hashes", counting)
    return counts


def test_a_model_is_hashed_once_until_it_changes(hashed: list[int]) -> None:
    model = llama()
    before = [model_digest(model) for _ in range(2)]
    assert len(hashed) == 1
    up(model).data.mul_(1.5)
    after = [model_digest(model) for _ in range(2)]
    assert len(hashed) == 2
    assert before[0] == before[1] != after[0] == after[1]


def test_a_write_that_no_identity_sees_shows_when_the_digest_is_forgotten() -> None:
    model = llama(intermediate_size=256)
    before = model_digest(model)
    up(model).data[-1, -1] += 1
    assert model_digest(model) == before
    ModelDigest.forget(model)
    assert model_digest(model) != before


def test_tied_weights_are_hashed_once(hashed: list[int]) -> None:
    tied, untied, by_memory = llama(tie_word_embeddings=True), llama(), llama()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    by_memory.lm_head.weight = nn.Parameter(by_memory.model.embed_tokens.weight.detach())
    for model in (tied, by_memory, untied):
        model_digest(model)
    assert hashed[0] == hashed[1] == hashed[2] - 1 == len([*tied.parameters(), *tied.buffers()])


def test_a_digest_keeps_no_model_alive() -> None:
    model = llama()
    model_digest(model)
    weak = weakref.ref(up(model))
    del model
    gc.collect()
    assert weak() is None


# ---- what configs and weights may be made of


def test_configs_are_compared_by_what_they_mean() -> None:
    model, other = (LOCAL["gemma3"].model() for _ in range(2))
    model.config.rope_theta, other.config.rope_theta = 10000, 10000.0
    model.config.part = {"_name_or_path": "a", "sizes": (1, 2), "kinds": {"x", "y"}}
    other.config.part = {"_name_or_path": "b", "sizes": [1, 2], "kinds": {"y", "x"}}
    assert model_digest(model) == model_digest(other)
    other.config.part["sizes"] = [2, 1]
    assert model_digest(model) != model_digest(other)


def test_an_option_that_has_no_lasting_form_is_refused() -> None:
    model = llama()
    model.config.extra = {"of": [object()]}
    with pytest.raises(ValueError, match=r"extra.of is a object, of which another process cannot"):
        model_digest(model)


def with_up(make: Callable[[Tensor], Any]) -> PreTrainedModel:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight = make(up(model).detach())
    return model


def parameter(tensor: Tensor, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(tensor, requires_grad=False)
    vars(made).update(attributes)
    return made


class QuantState:
    """As bitsandbytes keeps it: on the weight, and in no buffer."""

    def __init__(self, scale: float, nested: "QuantState | None" = None) -> None:
        self.absmax, self.blocksize, self.dtype = torch.tensor([scale]), 64, torch.float32
        self.state2 = nested


def int8(tensor: Tensor) -> Tensor:
    return (tensor * 100).round().clamp(-127, 127).to(torch.int8)


KINDS: dict[str, Callable[[Tensor, float], Any]] = {
    "bfloat16": lambda t, x: parameter((t * x).bfloat16()),
    "float8": lambda t, x: parameter((t * x).to(torch.float8_e4m3fn)),
    "complex": lambda t, x: parameter(torch.complex(t, t * x).conj()),
    "nf4": lambda t, x: parameter(int8(t), quant_state=QuantState(1.0, QuantState(x))),
    "int8": lambda t, x: parameter(int8(t), SCB=torch.full((64,), x)),
    "wrapper": lambda t, x: nn.Parameter(TwoTensor(t, t * x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_all_kinds_count_with_what_belongs_to_them(kind: str) -> None:
    make = KINDS[kind]
    one, again, other = (with_up(lambda t, x=x: make(t, x)) for x in (2.0, 2.0, 4.0))
    assert model_digest(one) == model_digest(again) != model_digest(other)


def test_scales_that_a_forward_moves_to_the_module_are_the_same_scales() -> None:
    model, scales = with_up(lambda t: parameter(int8(t), SCB=torch.ones(64))), torch.ones(64)
    before = model_digest(model)
    up(model).SCB = None
    model.model.layers[1].mlp.up_proj.state = SimpleNamespace(SCB=scales)
    ModelDigest.forget(model)
    assert model_digest(model) == before
    scales *= 2
    ModelDigest.forget(model)
    assert model_digest(model) != before


UNREADABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "meta": (lambda t: parameter(t.to("meta")), "meta device, where accelerate"),
    "sparse": (lambda t: parameter(t.to_sparse()), "torch.sparse_coo, which cannot be hashed"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused(kind: str) -> None:
    make, text = UNREADABLE[kind]
    with pytest.raises(ValueError, match=f"{UP} is .*{text}"):
        model_digest(with_up(make))


# ---- hashes of tensors


@pytest.mark.parametrize("piece_bytes", [7, 64 * 2**20], ids=["in_pieces", "whole"])
def test_a_tensor_is_hashed_by_its_elements(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(tensor_hash, "_PIECE_BYTES", piece_bytes)
    base = torch.arange(60.0).view(5, 12)
    tensors = [base, base.T, base[:, ::3], base[1:, 2:], base[0, 0], base[:0], base.bool()]
    with torch.inference_mode():
        tensors.append(base.half() + 1)
    want = [hashlib.sha256(t.clone().contiguous().numpy().tobytes()).hexdigest() for t in tensors]
    assert tensor_hashes(tensors) == want


def test_hashes_come_in_the_order_of_the_tensors() -> None:
    tensors = [torch.full((size,), 1.0) for size in (3, 100, 1, 63)]
    assert tensor_hashes(tensors) == [tensor_hashes([tensor])[0] for tensor in tensors]
