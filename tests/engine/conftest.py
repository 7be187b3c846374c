import pytest
import torch
from engine_rig import PREFIX_IDS, TOKENIZER, shared_model

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine


@pytest.fixture
def cache():
    cache = AsymmetricPagedCache(shared_model().config)
    cache.prefill(shared_model(), torch.tensor([PREFIX_IDS]))
    return cache


@pytest.fixture
def engine(cache):
    with Engine(shared_model(), cache, TOKENIZER) as engine:
        engine.prefix = cache._state.prefixes.only
        yield engine
        assert engine._rows.num_slots_used == 0
        engine.check_integrity()
