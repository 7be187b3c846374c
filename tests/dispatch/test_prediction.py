"""A decode step on paper, against sums made by hand."""

from dataclasses import replace

import pytest
from devices import CPU_TABLE
from prompts import PREFIX, cached, left_padded, new_tokens, prefilled, suffixes, whole

from hf_granikv.backends import BACKENDS
from hf_granikv.dispatch.known_devices import ON_PAPER
from hf_granikv.dispatch.prediction import Load, ModelShape, predict_kinds
from hf_granikv.dispatch.roofline import DeviceConstants, predict_s
from hf_granikv.explaining import model_shape
from hf_granikv.views import LayerKind, Window

FULL, LOCAL = LayerKind(), LayerKind(window=Window(100))
MODEL = ModelShape("a model", 9, 3, 64, (FULL, LOCAL, FULL, LOCAL, LOCAL), "float32")
LOAD = Load(num_rows=16, prefix_len=4096, suffix_len=50)


def kinds(model: ModelShape = MODEL, load: Load = LOAD, constants: DeviceConstants = CPU_TABLE):
    return predict_kinds(model, load, constants=constants, backends=BACKENDS)


def test_layers_of_a_kind_are_counted():
    assert [(kind.layer, kind.num_layers) for kind in kinds()] == [(FULL, 2), (LOCAL, 3)]


def test_a_backend_takes_what_the_dispatcher_would_predict():
    full, _ = kinds()

    for name, backend in BACKENDS.items():
        want = predict_s(backend.work(full.shape), CPU_TABLE, name, "float32")
        assert full.prefix_s[name] == pytest.approx(want)
    assert full.shape.prefix_len == 4096
    assert full.ours_s == pytest.approx(full.suffix_s + full.prefix_s[full.fastest])


def test_a_window_sees_the_end_of_the_prefix_and_then_nothing_of_it():
    _, local = kinds()
    # the new token at 4146 sees 4047 to 4146
    assert local.shape.prefix_len == 4096 - 4047

    _, later = kinds(load=replace(LOAD, suffix_len=99))
    assert later.fastest is None
    assert later.prefix_s == {}
    assert later.ours_s == later.suffix_s


def test_bytes_of_the_cache_are_those_of_its_tokens():
    full, local = kinds()
    token = 2 * 3 * 64 * 4

    assert full.shared_bytes == 4096 * token
    assert full.private_bytes == 16 * 50 * token
    assert full.dynamic_bytes == 16 * 4146 * token
    assert local.shared_bytes == 99 * token
    assert local.dynamic_bytes == 16 * 99 * token


def test_a_layer_that_reads_the_keys_of_another_stores_none():
    reusing = replace(MODEL, layers=(LayerKind(stores=False),))
    (kind,) = kinds(reusing)

    assert (kind.shared_bytes, kind.private_bytes, kind.dynamic_bytes) == (0, 0, 0)
    assert kind.prefix_s


def test_bytes_are_those_that_a_real_cache_counts(tiny_model):
    model = tiny_model("llama")
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(5, 5, 5))), num_new=4, **cached(cache))

    config = model.config
    shape = ModelShape("tiny", 4, 2, 8, (FULL,) * config.num_hidden_layers, "float32")
    (kind,) = kinds(shape, Load(3, len(PREFIX), 8))
    stats = cache.stats()
    assert kind.num_layers * kind.shared_bytes == stats.hot_bytes
    assert kind.num_layers * kind.dynamic_bytes == stats.dense_equivalent_bytes


@pytest.mark.parametrize("device", ON_PAPER)
def test_a_data_centre_card_reads_a_long_prefix_once_at_the_rate_of_its_memory(device):
    constants = ON_PAPER[device]
    model, load = model_shape("llama-3.1-8b", None), Load(16, 65536, 64)
    (kind,) = kinds(model, load, constants)

    assert kind.regime == "memory"
    at_least_s = kind.shared_bytes / constants.bandwidth_bytes_per_s
    assert at_least_s < kind.prefix_s[kind.fastest] < 3 * at_least_s
    assert kind.dynamic_s > 8 * kind.ours_s
    assert constants.origin == "predicted on paper, not measured"


def test_more_rows_than_the_ridge_are_bound_by_arithmetic():
    model, load = model_shape("llama-3.1-8b", None), Load(2048, 16384, 64)
    (kind,) = kinds(model, load, ON_PAPER["h100"])

    assert kind.regime == "compute"
