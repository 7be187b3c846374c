"""Prompts and prefixes in chunks, against uncached generation of each row alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import (
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    middle_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    right_padded,
    suffix_only,
    suffixes,
    whole,
)
from refusals import assert_refused
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache
from hf_granikv.errors import ColdPoolFullError

Build = Callable[..., PreTrainedModel]

P = len(PREFIX)
SUFFIXES = suffixes(*SUFFIX_LENGTHS)
ROWS = whole(SUFFIXES)
PADS = torch.zeros(len(ROWS), 4, dtype=torch.int64)
PADDED = suffix_only(SUFFIXES)
LAYOUTS: dict[str, Any] = {
    "suffix_only_with_more_pads": {
        "input_ids": torch.cat([PADS, PADDED["input_ids"]], 1),
        "attention_mask": torch.cat(
            [PADDED["attention_mask"][:, :P], PADS, PADDED["attention_mask"][:, P:]], 1
        ),
    },
    "left_padded": left_padded(ROWS),
    "more_pads_than_needed": left_padded(ROWS, extra=3),
    "suffix_only": suffix_only(SUFFIXES),
    "middle_padded": middle_padded(SUFFIXES),
    "right_padded": right_padded(ROWS),
}


def widths(model: PreTrainedModel, call: Callable[[], Any]) -> list[int]:
    """Gives the columns of each forward pass that `call` makes."""
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _m, args, _out: seen.append(args[0].shape[1])
    )
    try:
        call()
    finally:
        hook.remove()
    return seen


# ---- prompts in generate


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_prompts_give_the_tokens_of_whole_ones(
    model: PreTrainedModel, layout: str, chunk_size: int
) -> None:
    cache, got = prefilled(model), []
    sizes = widths(
        model,
        lambda: got.extend(
            new_tokens(model, LAYOUTS[layout], prefill_chunk_size=chunk_size, **cached(cache))
        ),
    )
    assert got == alone(model, ROWS)
    # a suffix of a row that is the prefix itself is one longer than what was given
    assert max(sizes) <= chunk_size + 1
    cache.check_integrity()


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "bloom", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [(3, 7, 5), (4, 4), (0, 0), (9,)], ids=str)
def test_cut_prompts_of_other_families(
    tiny_model: Build, family: str, lengths: tuple[int, ...]
) -> None:
    model = tiny_model(family, "granikv" if family in SHARED_PATH else "eager")
    rows, cache = whole(suffixes(*lengths)), prefilled(model)
    for inputs in (left_padded(rows), {"input_ids": left_padded(rows)["input_ids"]}):
        if "attention_mask" in inputs or len(set(lengths)) == 1:
            got = new_tokens(model, inputs, prefill_chunk_size=3, **cached(cache))
            assert got == alone(model, rows)


def test_suffixes_that_repeat_the_prefix_are_not_taken_for_it(model: PreTrainedModel) -> None:
    """By its ids alone the first chunk of such a suffix looks like that of a whole prompt."""
    repeats, cache = [PREFIX[:6], PREFIX[:4]], prefilled(model)
    for inputs in (suffix_only(repeats), left_padded(whole(repeats))):
        got = new_tokens(model, inputs, prefill_chunk_size=3, **cached(cache))
        assert got == alone(model, whole(repeats))


def test_chunks_spare_what_the_prefix_holds(model: PreTrainedModel) -> None:
    """Versions that cut whole prompts from their first token get by with a column of pads there."""
    cache = prefilled(model)
    call = lambda: new_tokens(  # noqa: E731
        model, left_padded(ROWS), num_new=1, prefill_chunk_size=5, **cached(cache)
    )
    # the row that is the prefix takes its last token again
    num_computed = max(SUFFIX_LENGTHS) + 1
    assert sum(widths(model, call)) == num_computed


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_cut_prompts_in_other_modes(model: PreTrainedModel, mode: str) -> None:
    outs = []
    for cache in (prefilled(model), prefilled(model)):
        torch.manual_seed(0)
        size = 3 if outs else None
        outs.append(
            new_tokens(
                model,
                left_padded(ROWS),
                prefill_chunk_size=size,
                **{**MODES[mode], **cached(cache)},
            )
        )
    assert outs[0] == outs[1]


def test_a_conversation_goes_on_in_chunks(model: PreTrainedModel) -> None:
    cache, rows = prefilled(model), whole(suffixes(3, 3))
    out = model.generate(**left_padded(rows), **cached(cache), max_new_tokens=4, do_sample=False)
    history = [
        row + later for row, later in zip(out.tolist(), suffixes(5, 5, seed=300), strict=True)
    ]
    # the last generated token has not been computed yet
    ids = torch.tensor([row[-6:] for row in history])
    inputs = {"input_ids": ids, "attention_mask": torch.ones(2, len(history[0]), dtype=torch.int64)}
    got = new_tokens(model, inputs, prefill_chunk_size=4, **cached(cache))
    assert got == alone(model, history)


def test_several_calls_with_other_chunks_on_one_cache(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    for length, size in ((1, 4), (12, 5), (3, None), (7, 2)):
        rows = whole(suffixes(length, seed=length))
        got = new_tokens(model, left_padded(rows), prefill_chunk_size=size, **cached(cache))
        assert got == alone(model, rows)


def test_a_call_that_fails_between_chunks_leaves_nothing(model: PreTrainedModel) -> None:
    """Neither the next call nor a plain forward with the very ids of the next chunk goes on."""
    cache, count = prefilled(model), []

    def fail(*_: Any) -> None:
        count.append(1)
        if len(count) == 3:
            raise OSError

    hook = model.lm_head.register_forward_hook(fail)
    with pytest.raises(OSError):  # noqa: PT011
        new_tokens(model, suffix_only(suffixes(6, 6)), prefill_chunk_size=2, **cached(cache))
    hook.remove()
    cache.reset()
    ids = torch.tensor(suffixes(6, 6))[:, 4:]
    with torch.no_grad():
        got = model(input_ids=ids, **cached(cache)).logits
        whole_rows = torch.cat([prefix_ids().expand(2, -1), ids], 1)
        want = model(input_ids=whole_rows, use_cache=False).logits[:, P:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


def test_a_call_given_up_before_its_first_chunk_leaves_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of that chunk, in a plain forward, are tokens like any others; no pads are known."""
    cache, inputs = prefilled(model), suffix_only(suffixes(6, 3))
    # generate looks at the signature first
    give_up = wraps(model.prepare_inputs_for_generation)(lambda *_, **__: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", give_up)
        with pytest.raises(ZeroDivisionError):
            new_tokens(model, inputs, prefill_chunk_size=2, **cached(cache))
    ids = inputs["input_ids"][:, :2]
    with torch.no_grad():
        got = model(input_ids=ids, **cached(cache)).logits
        whole_rows = torch.cat([prefix_ids().expand(2, -1), ids], 1)
        want = model(input_ids=whole_rows, use_cache=False).logits[:, P:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


OTHER = [*PREFIX[:9], 3 if PREFIX[9] != 3 else 4, *PREFIX[10:], 5, 6]
BAD_PROMPTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "contradicts_the_prefix": (left_padded([OTHER]), ValueError, "at position 9, the prefix has"),
    "too_short": (left_padded([PREFIX[:15]]), ValueError, "15 tokens, fewer than the 20"),
    "embeddings": (
        {"inputs_embeds": torch.randn(1, P + 3, 32)},
        ValueError,
        "prefill_chunk_size=4 was given with inputs_embeds",
    ),
    "own_positions": (
        {**left_padded(whole(suffixes(4))), "position_ids": torch.arange(1, P + 5)[None]},
        ValueError,
        "position_ids",
    ),
    "more_than_the_pool_may_hold": (
        left_padded(whole(suffixes(40, 41))),
        ColdPoolFullError,
        "81 needed",
    ),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_refused_before_the_first_chunk(model: PreTrainedModel, name: str) -> None:
    inputs, error, message = BAD_PROMPTS[name]
    cache = prefilled(model, cold_slots=80)

    def call() -> Any:
        return model.generate(
            **inputs, **cached(cache), max_new_tokens=3, do_sample=False, prefill_chunk_size=4
        )

    assert_refused(cache, model, call, error, message)


# ---- the prefix


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 7, 20, 1000])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "deepseek_v3", "qwen3_moe"])
def test_a_prefix_in_chunks_is_the_prefix(tiny_model: Build, family: str, chunk_size: int) -> None:
    model = tiny_model(family, "granikv" if family in SHARED_PATH else "eager")
    cache, want = AsymmetricPagedCache(model.config), prefilled(model)._state.prefixes.only
    made: list[Any] = []
    sizes = widths(
        model, lambda: made.append(cache.prefill(model, prefix_ids(), chunk_size=chunk_size))
    )
    assert max(sizes) == min(chunk_size, P)
    assert sum(sizes) == P
    for got, expected in zip(
        (*made[0].keys, *made[0].values), (*want.keys, *want.values), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert new_tokens(model, left_padded(ROWS), **cached(cache)) == alone(model, ROWS)


@pytest.mark.parametrize("chunk_size", [0, -3, 2.5, True, "7"], ids=str)
def test_a_chunk_of_no_size_is_refused(model: PreTrainedModel, chunk_size: Any) -> None:
    cache = AsymmetricPagedCache(model.config)
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size!r}; give a positive number"):
        cache.prefill(model, prefix_ids(), chunk_size=chunk_size)
    assert cache.stats().hot_bytes == 0
    cache.prefill(model, prefix_ids())
