import pytest
import torch

from hf_granikv.processor import has_fast_matmul, has_tiles


@pytest.fixture
def cpu(monkeypatch):
    """Makes the CPU one of a capability, with and without bfloat16 in oneDNN, tiles, products."""

    def is_one(capability, has_bfloat16, tiles, products):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16, raising=False
        )
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: products)

    has_fast_matmul.cache_clear()
    yield is_one
    has_fast_matmul.cache_clear()


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "has_amx", "expected"),
    [
        ("AVX512", True, True, True),
        ("AVX2", True, True, False),
        ("AVX512", False, True, False),
        ("AVX512", True, False, False),
        ("DEFAULT", False, False, False),
    ],
)
def test_tiles_need_the_processor_torch_and_onednn(
    cpu, capability, has_bfloat16, has_amx, expected
):
    cpu(capability, has_bfloat16, has_amx, True)

    assert has_tiles() is expected


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "tiles", "products", "expected"),
    [
        ("AVX512", True, True, False, True),
        ("AVX512", True, False, True, True),
        ("AVX512", True, False, False, False),
        ("AVX2", False, False, False, False),
        ("AVX2", True, False, False, False),
        ("SVE256", True, False, False, True),
        ("DEFAULT", False, False, False, False),
    ],
)
def test_bfloat16_is_fast_where_it_is_multiplied_as_such(
    cpu, capability, has_bfloat16, tiles, products, expected
):
    cpu(capability, has_bfloat16, tiles, products)

    assert has_fast_matmul(torch.bfloat16) is expected


def test_float32_is_always_fast():
    assert has_fast_matmul(torch.float32)
