"""Weights that are on no device until they run.

Reported for caches of layers on several devices: huggingface/peft #2189, huggingface/transformers
#33147.
"""

from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
from agents import MESSAGES, byte_tokenizer, llama, new_runner
from families import SHARED_PATH
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, tokens, whole
from torch import nn
from transformers import PreTrainedModel

import hf_granikv

ROWS = whole(suffixes(3, 7, 0, 5))
PARTS = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
Offload = Callable[[nn.Module, Path], object]


def one_part_on_disk(name: str) -> Offload:
    places = {f"model.{part}": "cpu" for part in PARTS} | {"lm_head": "cpu", name: "disk"}
    return lambda model, folder: accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder
    )


OFFLOADS: dict[str, Offload] = {
    "all_to_memory": lambda model, _: accelerate.cpu_offload(model, execution_device="cpu"),
    "all_to_disk": lambda model, folder: accelerate.disk_offload(
        model, folder, execution_device="cpu"
    ),
    "embeddings": one_part_on_disk("model.embed_tokens"),
    "a_layer": one_part_on_disk("model.layers.1"),
}


@pytest.fixture(params=OFFLOADS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    built = SHARED_PATH["llama"].model(attn_implementation="granikv")
    OFFLOADS[request.param](built, tmp_path)
    assert any(weight.is_meta for weight in built.parameters())
    return built


@pytest.mark.smoke
def test_an_offloaded_model_gives_each_row_alone(
    tiny_model: Callable[..., PreTrainedModel], model: PreTrainedModel
) -> None:
    held, plain = prefilled(model), tiny_model("llama", "eager")
    for _ in range(2):
        assert new_tokens(model, left_padded(ROWS), **cached(held)) == alone(plain, ROWS)
    want = new_tokens(plain, left_padded(ROWS[:2]), num_beams=2, use_cache=False)
    assert new_tokens(model, left_padded(ROWS[:2]), num_beams=2, **cached(held)) == want


def test_a_runner_asks_an_offloaded_model() -> None:
    want = new_runner(llama(), byte_tokenizer()).run(MESSAGES, max_new_tokens=5)
    model = accelerate.cpu_offload(llama(), execution_device="cpu")
    assert new_runner(model, byte_tokenizer()).run(MESSAGES, max_new_tokens=5) == want


@pytest.mark.nothing_shared
def test_a_custom_loop_reckons_with_an_offloaded_model() -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    inputs = left_padded(whole(suffixes(3, 3), tokens(200, seed=3)))
    want = new_tokens(model, inputs, num_new=2)
    accelerate.cpu_offload(model, execution_device="cpu")
    got = new_tokens(model, inputs, num_new=2, custom_generate=hf_granikv.generate)
    assert got == want
