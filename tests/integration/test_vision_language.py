"""Vision-language models over a prefix of text: text alone is exact; images are exact or refused."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from prompts import (
    alone,
    cached,
    left_padded,
    logits_alone,
    middle_padded,
    new_tokens,
    prefilled,
    suffix_only,
    suffixes,
    whole,
)
from torch import Tensor
from transformers import PreTrainedModel
from vision import (
    COUNTING,
    COUNTING_HYBRID,
    IMAGE_ID,
    NO_MARKS,
    TEXT,
    gemma3,
    llava,
    patches,
    pixels,
    with_types,
)

Rows = Sequence[Sequence[int]]
RAGGED = (3, 7, 0, 5)
# a question behind an image, in the marks of the models of `COUNTING`
ILLUSTRATED = [*TEXT, 92, *[IMAGE_ID] * 4, 93, 5, 6, 7]
# the same, with the image in the midst of what is shared
SHARED_IMAGE = [*TEXT[:5], 92, *[IMAGE_ID] * 4, 93, *TEXT[5:]]

each_family = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
NUM_NEW = 5
TEXT_LAYOUTS: dict[str, Callable[[Rows], dict[str, Tensor]]] = {
    "suffix_ids": suffix_only,
    "pads_in_the_middle": middle_padded,
}


@cache
def text_alone(family: str, *lengths: int) -> list[list[int]]:
    return alone(COUNTING[family].model("eager"), whole(suffixes(*lengths)), num_new=NUM_NEW)


def call(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    return new_tokens(model, inputs, num_new=NUM_NEW, **options)


def exact_or_refused(act: Callable[[], Any], want: Any) -> bool:
    """Whether a call gives what it should, or says that it cannot serve images."""
    try:
        return bool(act() == want)
    except (ValueError, NotImplementedError) as error:
        return "image" in str(error) or "pixel_values" in str(error)


# ---- text alone


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((f, "granikv") for f in COUNTING), ("qwen2_5_vl", "sdpa"), ("qwen3_vl", "eager")],
)
def test_text_alone_gives_each_row_alone(family: str, attention: str) -> None:
    model = COUNTING[family].model(attention)
    held = prefilled(model)
    got = call(model, left_padded(whole(suffixes(*RAGGED))), **cached(held))
    assert got == text_alone(family, *RAGGED)
    assert ("dense route" in held.explain()) == (attention != "granikv")


@each_family
@pytest.mark.parametrize("layout", TEXT_LAYOUTS)
def test_every_layout_of_text_is_understood(family: str, layout: str) -> None:
    model = COUNTING[family].model("granikv")
    got = call(model, TEXT_LAYOUTS[layout](suffixes(*RAGGED)), **cached(prefilled(model)))
    assert got == text_alone(family, *RAGGED)


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompt_in_chunks": {"prefill_chunk_size": 4},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
}


@each_family
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_no_cache(family: str, mode: str) -> None:
    model, inputs = COUNTING[family].model("granikv"), left_padded(whole(suffixes(6)))
    options = MODES["beams"] if mode == "beams" else {}
    want = call(COUNTING[family].model("eager"), inputs, use_cache=False, **options)
    assert call(model, inputs, **cached(prefilled(model)), **MODES[mode]) == want


@each_family
def test_forwards_by_hand_are_exact(family: str) -> None:
    model, rows = COUNTING[family].model("granikv"), suffixes(3, 6)
    with torch.no_grad():
        got = model(**suffix_only(rows), **cached(prefilled(model))).logits
    for row, ids in enumerate(rows):
        want = logits_alone(model, whole(rows)[row], len(ids))
        torch.testing.assert_close(got[row, -len(ids) :], want, atol=1e-4, rtol=1e-4)


@each_family
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole_ids", "new_ids_and_full_mask"])
def test_a_second_turn_goes_on_from_the_first(family: str, is_whole: bool) -> None:
    model, first = COUNTING[family].model("granikv"), left_padded(whole(suffixes(3, 6)))
    held = prefilled(model)
    out = model.generate(**first, **cached(held), max_new_tokens=4, do_sample=False)
    ids = torch.cat([out, torch.tensor(suffixes(3, 3, seed=300))], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(2, 4 + 3, dtype=torch.int64)], 1)
    history = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    # the last token of an answer has not been computed yet
    inputs = {"input_ids": ids if is_whole else ids[:, -4:], "attention_mask": mask}
    want = alone(COUNTING[family].model("eager"), history, num_new=NUM_NEW)
    assert call(model, inputs, **cached(held)) == want


@pytest.mark.smoke
def test_text_of_one_length_is_served_by_a_hybrid() -> None:
    model, rows = COUNTING_HYBRID.model("granikv"), whole(suffixes(4, 4))
    want = alone(COUNTING_HYBRID.model("eager"), rows, num_new=NUM_NEW)
    assert call(model, left_padded(rows), **cached(prefilled(model))) == want
    with pytest.raises(ValueError, match="rows of equal length"):
        call(model, left_padded(whole(suffixes(4, 2))), **cached(prefilled(model)))


@each_family
@pytest.mark.parametrize("sizes", [((2, 2), (3, 7, 5)), ((3, 7, 5), (4,))], ids=["more", "fewer"])
def test_batches_of_any_size_follow_one_prefill(
    family: str, sizes: tuple[tuple[int, ...], ...]
) -> None:
    """Cf. huggingface/transformers #32657: a cache made for one batch, used for a smaller one."""
    model = COUNTING[family].model("granikv")
    held = prefilled(model)
    for lengths in sizes:
        got = call(model, left_padded(whole(suffixes(*lengths))), **cached(held))
        assert got == text_alone(family, *lengths)


@each_family
def test_text_is_exact_after_a_call_with_an_image(family: str) -> None:
    """Positions counted for the image must not move those of the next call, as they did in
    huggingface/transformers PR #47597 for caches that were filled elsewhere."""
    model, rows = COUNTING[family].model("granikv"), whole(suffixes(3), TEXT)
    want = alone(COUNTING[family].model("eager"), rows, num_new=NUM_NEW, **NO_MARKS)
    held = prefilled(model, TEXT)
    call(model, with_types([ILLUSTRATED]), **patches(model), use_cache=False, **NO_MARKS)
    assert call(model, left_padded(rows), **cached(held), **NO_MARKS) == want


# ---- images


@each_family
def test_an_image_behind_the_prefix_is_exact_or_refused(family: str) -> None:
    model, inputs = COUNTING[family].model("granikv"), with_types([ILLUSTRATED])
    options = {**patches(model), **NO_MARKS}
    want = call(COUNTING[family].model("eager"), inputs, use_cache=False, **options)
    held = prefilled(model, TEXT)
    assert exact_or_refused(lambda: call(model, inputs, **options, **cached(held)), want)


@each_family
def test_an_image_inside_the_prefix_is_refused(family: str) -> None:
    """A prefix is computed from ids alone; what stands in for an image is then no image."""
    model = COUNTING[family].model("granikv")
    held = prefilled(model, SHARED_IMAGE)
    inputs = with_types([[*SHARED_IMAGE, 5, 6]])
    with pytest.raises(ValueError, match=r"(?i)image"):
        call(model, inputs, **patches(model), **cached(held))


def image_logits(model: PreTrainedModel, size: int, **options: Any) -> Tensor:
    row = [*TEXT, *[IMAGE_ID] * 4, 5, 6, 7]
    inputs = left_padded([row]) if size == 8 else with_types([row], "token_type_ids")
    out = model.generate(
        **inputs,
        **pixels(size),
        **{"max_new_tokens": 4, "do_sample": False, **NO_MARKS},
        **{"return_dict_in_generate": True, "output_logits": True, **options},
    )
    return torch.stack(out.logits, 1)


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_an_image_that_is_a_run_of_tokens_is_exact_behind_a_prefix(attention: str) -> None:
    model = llava(attention)
    got = image_logits(model, 8, **cached(prefilled(model, TEXT)))
    torch.testing.assert_close(got, image_logits(model, 8, use_cache=False), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
def test_an_image_whose_tokens_see_each_other_is_exact_or_refused(attention: str) -> None:
    model = gemma3(attention)
    want = image_logits(model, 16, use_cache=False)
    held = prefilled(model, TEXT)
    close = exact_or_refused(
        lambda: torch.allclose(image_logits(model, 16, **cached(held)), want, atol=1e-4, rtol=1e-4),
        True,
    )
    assert close
