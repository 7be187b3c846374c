from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_granikv.errors import IntegrityError
from hf_granikv.pools import HotPool, Prefix

NUM_TOKENS, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 7, 3, 2, 4


def fresh(num_tokens: int = NUM_TOKENS) -> list[tuple[Tensor, Tensor]]:
    shape = (NUM_HEADS, num_tokens, HEAD_DIM)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(NUM_LAYERS)]


def sealed(pool: HotPool, pairs: list[tuple[Tensor, Tensor]] | None = None) -> Prefix:
    pairs = fresh() if pairs is None else pairs
    return pool.seal(torch.arange(pairs[0][0].shape[1]), pairs)


def every_other(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], 1).flatten(0, 1)[::2]


def out_of_a_larger_storage(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)])[: len(tensor)]


def token_major(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def made_in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def with_a_graph(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() * 1


SOURCES = [every_other, out_of_a_larger_storage, token_major, made_in_inference_mode, with_a_graph]


@pytest.mark.parametrize("source", SOURCES)
def test_a_prefix_is_exact_contiguous_and_detached(source: Callable[[Tensor], Tensor]) -> None:
    pool, pairs = HotPool(), fresh()
    prefix = sealed(pool, [(source(k), source(v)) for k, v in pairs])
    pool.check_integrity()
    tensors = (*prefix.keys, *prefix.values)
    given = [k for k, _ in pairs] + [v for _, v in pairs]
    assert all(map(torch.equal, tensors, given))
    assert all(t.is_contiguous() and not t.requires_grad and not t.is_inference() for t in tensors)
    assert prefix.num_bytes == 2 * NUM_LAYERS * NUM_HEADS * NUM_TOKENS * HEAD_DIM * 4


def test_keys_and_values_may_differ_in_width() -> None:
    pool = HotPool()
    prefix = pool.seal(torch.arange(5), [(torch.randn(2, 5, 12), torch.randn(2, 5, 8))])
    pool.check_integrity()
    assert prefix.num_bytes == 2 * 5 * 20 * 4


def test_a_prefix_does_not_follow_its_source_ids() -> None:
    ids = torch.arange(NUM_TOKENS)
    prefix = HotPool().seal(ids, fresh())
    ids.zero_()
    assert prefix.token_ids.tolist() == list(range(NUM_TOKENS))


@pytest.mark.parametrize("attribute", ["token_ids", "keys", "values"])
def test_the_parts_of_a_prefix_cannot_be_replaced(attribute: str) -> None:
    prefix = sealed(HotPool())
    with pytest.raises(AttributeError):
        setattr(prefix, attribute, None)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_write_to_a_sealed_prefix_is_reported(side: str) -> None:
    pool = HotPool()
    prefix = sealed(pool)
    getattr(prefix, side)[NUM_LAYERS - 1][0, 0, 0] += 1
    with pytest.raises(IntegrityError, match="written to or moved"):
        pool.check_integrity()


def test_a_write_in_inference_mode_is_reported_too() -> None:
    pool = HotPool()
    with torch.inference_mode():
        prefix = sealed(pool)
        prefix.keys[0].zero_()
    with pytest.raises(IntegrityError, match="written to or moved"):
        pool.check_integrity()


def test_a_prefix_lives_until_its_last_holder_lets_go() -> None:
    pool = HotPool()
    prefix = sealed(pool)
    pool.acquire(prefix)
    pool.release(prefix)
    assert pool.num_tokens == NUM_TOKENS
    pool.release(prefix)
    assert (pool.num_tokens, pool.num_bytes) == (0, 0)
    pool.check_integrity()


def test_a_prefix_that_was_given_up_cannot_be_held_or_released_again() -> None:
    pool = HotPool()
    prefix = sealed(pool)
    pool.release(prefix)
    with pytest.raises(KeyError):
        pool.acquire(prefix)
    with pytest.raises(KeyError):
        pool.release(prefix)


def test_prefixes_are_counted_one_by_one() -> None:
    pool = HotPool()
    first, second = sealed(pool), sealed(pool, fresh(11))
    assert pool.num_bytes == first.num_bytes + second.num_bytes
    assert pool.num_tokens == NUM_TOKENS + 11
    pool.release(first)
    assert pool.num_bytes == second.num_bytes
    pool.check_integrity()


def test_a_released_prefix_frees_its_memory() -> None:
    pool = HotPool()
    prefix = sealed(pool)
    alive = StorageWeakRef(prefix.keys[0].untyped_storage())
    pool.release(prefix)
    assert not alive.expired()
    del prefix
    assert alive.expired()
