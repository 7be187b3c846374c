"""What a shared prefix costs: bytes held, bytes allocated on the way, tokens computed."""

import pytest
import torch
from families import SHARED_PATH
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT

PREFIX_LEN = 4096
SUFFIX_LEN = 32


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built = SHARED_PATH["llama"].model(max_position_embeddings=8192)
    built.set_attn_implementation("granikv")
    return built


def prompts(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    prefix = torch.randint(2, 97, (1, PREFIX_LEN), generator=generator)
    suffixes = torch.randint(2, 97, (num_rows, SUFFIX_LEN), generator=generator)
    return prefix, torch.cat([prefix.expand(num_rows, -1), suffixes], dim=1)


def test_fifteen_agents_hold_a_thirteenth_of_the_dense_bytes(model: PreTrainedModel) -> None:
    prefix, ids = prompts(15)
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix)
    model.generate(ids, max_new_tokens=5, do_sample=False, **{CACHE_ARGUMENT: cache})
    stats = cache.stats()
    assert stats.dense_equivalent_bytes >= 13 * (stats.hot_bytes + stats.cold_bytes)


def test_a_decode_step_allocates_no_copy_of_the_prefix(model: PreTrainedModel) -> None:
    prefix, ids = prompts(4)
    cache = AsymmetricPagedCache(model.config, dispatch="cascade")
    held = cache.prefill(model, prefix)
    model.generate(ids, max_new_tokens=2, do_sample=False, **{CACHE_ARGUMENT: cache})
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        model(input_ids=ids[:, -1:], **{CACHE_ARGUMENT: cache})
    events = profile.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert 0 < largest < held.keys[0].untyped_storage().nbytes() / 8


def test_the_prefix_is_computed_once_for_sixteen_agents(model: PreTrainedModel) -> None:
    prefix, ids = prompts(16)
    num_tokens = 0

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal num_tokens
        num_tokens += args[0].numel()

    handle = model.get_input_embeddings().register_forward_pre_hook(count)
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix)
    model.generate(ids, max_new_tokens=1, do_sample=False, **{CACHE_ARGUMENT: cache})
    handle.remove()
    assert num_tokens == PREFIX_LEN + 16 * SUFFIX_LEN
    assert ids.numel() >= 10 * num_tokens
