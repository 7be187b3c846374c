"""Plain forwards: several new tokens at once, loops written by hand, turns that go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from prompts import (
    PREFIX,
    alone,
    cached,
    left_padded,
    logits_alone,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from refusals import observed
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

P = len(PREFIX)
# GPT-Neo and BLOOM have no attention interface
FAMILIES = {
    "llama": "granikv",
    "gpt2": "granikv",
    "gpt_neox": "granikv",
    "opt": "granikv",
    "gpt_neo": "eager",
    "bloom": "eager",
}
Build = Callable[..., PreTrainedModel]


def forward(model: PreTrainedModel, cache: Any, ids: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(ids), **cached(cache), **kwargs).logits


def assert_logits(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("has_prefix", [True, False], ids=["prefix", "plain"])
@pytest.mark.parametrize("chunks", [(7,), (1, 6), (3, 1, 3), (1,) * 7], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_logits_of_one_forward(
    tiny_model: Build, family: str, chunks: tuple[int, ...], has_prefix: bool
) -> None:
    model = tiny_model(family, FAMILIES[family])
    cache = prefilled(model) if has_prefix else AsymmetricPagedCache(model.config)
    start, rows = PREFIX if has_prefix else [], suffixes(7, 7)
    parts = torch.tensor(rows).split(chunks, dim=1)
    got = torch.cat([forward(model, cache, part) for part in parts], 1)
    assert_logits(got, torch.stack([logits_alone(model, start + row, 7) for row in rows]))
    assert cache.get_seq_length() == len(start) + 7


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_get_the_logits_they_have_alone(tiny_model: Build, family: str) -> None:
    model = tiny_model(family, FAMILIES[family])
    cache, rows, later = prefilled(model), suffixes(2, 6, 5), suffixes(3, 1, 0, seed=300)
    first = suffix_only(rows)
    got = forward(model, cache, first["input_ids"], attention_mask=first["attention_mask"])
    for row, ids in enumerate(rows):
        assert_logits(got[row, -len(ids) :], logits_alone(model, PREFIX + ids, len(ids)))
    second = left_padded(later)
    mask = torch.cat([first["attention_mask"], second["attention_mask"]], 1)
    got = forward(model, cache, second["input_ids"], attention_mask=mask)
    for row, (ids, new) in enumerate(zip(rows, later, strict=True)):
        if new:
            want = logits_alone(model, PREFIX + ids + new, len(new))
            assert_logits(got[row, -len(new) :], want)
    cache.check_integrity()


def test_a_chunk_of_pads_alone_changes_nothing(model: PreTrainedModel) -> None:
    cache, rows = prefilled(model), suffixes(3, 3)
    pads = torch.zeros(2, 2, dtype=torch.int64)
    mask = torch.cat([torch.ones(2, P, dtype=torch.int64), pads], 1)
    forward(model, cache, pads, attention_mask=mask)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)
    got = forward(model, cache, rows, attention_mask=mask)
    assert_logits(got, torch.stack([logits_alone(model, PREFIX + row, 3) for row in rows]))


# stock eager attention adds the mask, so a bool one means nothing to it
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("granikv", torch.bool),
        ("granikv", torch.float32),
        ("sdpa", torch.bool),
        ("eager", torch.float32),
    ],
    ids=str,
)
def test_a_mask_of_four_dimensions_is_obeyed_and_reported(
    tiny_model: Build, attention: str, dtype: torch.dtype
) -> None:
    """The second new token must not see the first."""
    model = tiny_model("llama", attention)
    cache, row = prefilled(model), tokens(2, seed=4)
    visible = torch.ones(1, 1, 2, P + 2, dtype=torch.bool).tril(P)
    visible[..., 1, P] = False
    mask = (
        visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -1e30)
    )
    positions = torch.tensor([[P, P]])
    got = forward(model, cache, [row], attention_mask=mask, position_ids=positions)
    want = torch.cat([logits_alone(model, [*PREFIX, token], 1) for token in row])
    assert_logits(got[0], want)
    assert attention != "granikv" or "4 dimensions" in cache.explain()


def test_positions_of_the_caller_are_kept(model: PreTrainedModel) -> None:
    cache, row = prefilled(model), tokens(3, seed=4)
    positions = torch.tensor([[40, 41, 42]])
    got = forward(model, cache, [row], position_ids=positions)
    inputs = left_padded([PREFIX + row])
    inputs["position_ids"] = torch.cat([torch.arange(P)[None], positions], 1)
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits[:, -3:]
    assert_logits(got, want)


@pytest.mark.parametrize("gives_positions", [True, False], ids=["positions", "no_positions"])
@pytest.mark.parametrize("gives_mask", [True, False], ids=["mask", "no_mask"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_decode_loop_written_by_hand_gives_the_tokens_of_generate(
    tiny_model: Build, family: str, gives_mask: bool, gives_positions: bool
) -> None:
    model = tiny_model(family)
    rows, out = suffixes(3, 7, 5), []
    cache, inputs = prefilled(model), suffix_only(rows)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for step in range(10):
        kwargs: dict[str, Any] = {}
        if gives_mask or step == 0:
            kwargs["attention_mask"] = mask
        if gives_positions and family != "opt":
            kwargs["position_ids"] = (mask.cumsum(1) - 1)[:, -ids.shape[1] :].clamp_min(0)
        ids = forward(model, cache, ids, **kwargs)[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        out.append(ids)
    assert torch.cat(out, 1).tolist() == alone(model, whole(rows))


def test_positional_arguments_are_read_too(model: PreTrainedModel) -> None:
    cache, inputs = prefilled(model), suffix_only(suffixes(2, 4))
    with torch.no_grad():
        got = model(inputs["input_ids"], inputs["attention_mask"], **cached(cache)).logits
    assert_logits(got[0, -2:], logits_alone(model, whole(suffixes(2))[0], 2))


def test_a_forward_may_keep_the_last_logits_only(model: PreTrainedModel) -> None:
    rows = suffixes(5, 5)
    got = forward(model, prefilled(model), rows, logits_to_keep=2)
    assert_logits(got, torch.stack([logits_alone(model, PREFIX + row, 2) for row in rows]))


# ---- turns


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole_ids", "new_ids_and_full_mask"])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 7, 5), (0, 4)], ids=str)
def test_a_second_turn_goes_on_from_the_first(
    model: PreTrainedModel, lengths: tuple[int, ...], is_whole: bool
) -> None:
    cache, rows = prefilled(model), whole(suffixes(*lengths))
    first = left_padded(rows)
    out = model.generate(**first, **cached(cache), max_new_tokens=5, do_sample=False)
    messages = torch.tensor(suffixes(*[3] * len(rows), seed=300))
    ids = torch.cat([out, messages], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(len(rows), 5 + 3, dtype=torch.int64)], 1)
    history = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    num_computed = cache.stats().cold_tokens
    # the last token of an answer has not been computed yet
    new = ids if is_whole else ids[:, -4:]
    got = new_tokens(model, {"input_ids": new, "attention_mask": mask}, **cached(cache))
    assert got == alone(model, history)
    assert is_whole or cache.stats().cold_tokens == num_computed + len(rows) * (4 + 9)
    cache.check_integrity()


def test_generate_and_plain_forwards_may_alternate(model: PreTrainedModel) -> None:
    cache, rows, later = prefilled(model), whole(suffixes(2, 5)), suffixes(3, 3, seed=300)
    out = new_tokens(model, left_padded(rows), num_new=4, **cached(cache))
    got = forward(model, cache, [[o[-1], *new] for o, new in zip(out, later, strict=True)])
    history = [row + o + new for row, o, new in zip(rows, out, later, strict=True)]
    assert_logits(got, torch.stack([logits_alone(model, row, 4) for row in history]))
    assert new_tokens(model, left_padded(rows), **cached(cache)) == alone(model, rows)


# ---- forwards that break off


class BrokenLayerError(Exception):
    pass


@contextmanager
def breaking(model: PreTrainedModel, layer_idx: int, after: int = 0) -> Iterator[None]:
    """Makes a layer raise in its forward number `after`; earlier ones pass."""
    calls = iter(range(10**6))

    def raise_once(*_: object) -> None:
        if next(calls) == after:
            raise BrokenLayerError

    hook = model.model.layers[layer_idx].register_forward_pre_hook(raise_once)
    try:
        with pytest.raises(BrokenLayerError):
            yield
    finally:
        hook.remove()


@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_forward_that_breaks_off_leaves_the_cache_as_it_was(
    model: PreTrainedModel, layer_idx: int
) -> None:
    cache, history, later = prefilled(model), suffixes(4, 4), suffixes(2, 2, seed=300)
    forward(model, cache, history)
    length, live = cache.get_seq_length(), cache.stats().cold_tokens
    with breaking(model, layer_idx):
        forward(model, cache, suffixes(5, 5, seed=400))
    assert (cache.get_seq_length(), cache.stats().cold_tokens) == (length, live)
    observed(cache)
    rows = [PREFIX + row + new for row, new in zip(history, later, strict=True)]
    want = torch.stack([logits_alone(model, row, 2) for row in rows])
    assert_logits(forward(model, cache.fork(), later), want)
    assert_logits(forward(model, cache, later), want)


@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_first_forward_that_breaks_off_does_not_fix_the_number_of_rows(
    model: PreTrainedModel, layer_idx: int
) -> None:
    cache = prefilled(model)
    with breaking(model, layer_idx):
        forward(model, cache, suffixes(5, 5, 5))
    assert (cache.get_seq_length(), cache.batch_size) == (P, -1)
    got = forward(model, cache, suffixes(2))
    assert_logits(got[0], logits_alone(model, whole(suffixes(2))[0], 2))


@pytest.mark.parametrize("after", [0, 1, 4], ids=["prompt", "first_step", "later_step"])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_generate_call_that_breaks_off_does_not_spoil_the_next(
    model: PreTrainedModel, layer_idx: int, after: int
) -> None:
    cache, rows = prefilled(model), whole(suffixes(3, 7, 0))
    with breaking(model, layer_idx, after):
        new_tokens(model, left_padded(rows), **cached(cache))
    observed(cache)
    assert new_tokens(model, left_padded(rows[:2]), **cached(cache)) == alone(model, rows[:2])


def test_a_generate_call_that_never_ran_leaves_no_trace(model: PreTrainedModel) -> None:
    """transformers refuses the call after it took the cache, before any forward."""
    cache, rows = prefilled(model), suffixes(4, 4)
    with pytest.raises(ValueError, match="batch_size"):
        new_tokens(model, left_padded(whole(rows)), prompt_lookup_num_tokens=2, **cached(cache))
    assert cache.get_seq_length() == P
    got = forward(model, cache, rows)
    assert_logits(got, torch.stack([logits_alone(model, PREFIX + row, 4) for row in rows]))
