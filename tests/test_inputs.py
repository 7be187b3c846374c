from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import SHARED_PATH, Family
from prompts import (
    PAD_ID,
    PREFIX,
    SUFFIX_LENGTHS,
    alone,
    cached,
    left_padded,
    logits_alone,
    middle_padded,
    new_tokens,
    prefilled,
    right_padded,
    suffix_only,
    suffixes,
    tokens,
    whole,
)
from refusals import assert_refused
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_granikv
from hf_granikv import AsymmetricPagedCache
from hf_granikv.layouts import all_tokens

P = len(PREFIX)
RAGGED = suffixes(*SUFFIX_LENGTHS)
EVEN = suffixes(4, 4)
Inputs = dict[str, Any]


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def cache(model: PreTrainedModel) -> AsymmetricPagedCache:
    return prefilled(model)


def scattered_pads(rows: list[list[int]]) -> Inputs:
    """Puts a pad before, and another behind, the first token of every suffix that has one."""
    padded = [[PAD_ID, *row[:1], PAD_ID, *row[1:]] for row in rows]
    masks = [[0, *[1] * len(row[:1]), 0, *[1] * len(row[1:])] for row in rows]
    inputs = left_padded(whole(padded))
    inputs["attention_mask"] = left_padded([[1] * P + mask for mask in masks])["input_ids"]
    return inputs


def from_the_middle_of_the_prefix(rows: list[list[int]]) -> Inputs:
    full = middle_padded(rows)
    return {**full, "input_ids": full["input_ids"][:, 7:]}


def retyped(inputs: Inputs, ids: torch.dtype, mask: torch.dtype) -> Inputs:
    return {
        "input_ids": inputs["input_ids"].to(ids),
        "attention_mask": inputs["attention_mask"].to(mask),
    }


LAYOUTS: dict[str, tuple[list[list[int]], Callable[[list[list[int]]], Inputs]]] = {
    "left_padded": (RAGGED, lambda rows: left_padded(whole(rows))),
    "left_padded_with_common_pads": (RAGGED, lambda rows: left_padded(whole(rows), extra=3)),
    "suffix_ids_and_full_mask": (suffixes(3, 7, 1), suffix_only),
    "suffix_ids_and_full_mask_with_an_exact_prefix": (RAGGED, suffix_only),
    "pads_in_the_middle": (RAGGED, middle_padded),
    "pads_anywhere": (suffixes(3, 7, 5), scattered_pads),
    "right_padded": (RAGGED, lambda rows: right_padded(whole(rows))),
    "ids_from_the_middle_of_the_prefix": (RAGGED, from_the_middle_of_the_prefix),
    "only_exact_prefixes": ([[], []], lambda rows: left_padded(whole(rows))),
    "one_exact_prefix": ([[]], lambda rows: left_padded(whole(rows))),
    "whole_ids_without_a_mask": (EVEN, lambda rows: {"input_ids": torch.tensor(whole(rows))}),
    "suffix_ids_and_a_mask_of_ones": (EVEN, suffix_only),
    "int32_ids_and_bool_mask": (
        RAGGED,
        lambda rows: retyped(left_padded(whole(rows)), torch.int32, torch.bool),
    ),
    "float_mask": (
        RAGGED,
        lambda rows: retyped(left_padded(whole(rows)), torch.int64, torch.float32),
    ),
    "pad_ids_that_are_tokens": (
        [[PAD_ID, 5, PAD_ID], [8, PAD_ID]],
        lambda rows: left_padded(whole(rows)),
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("attention", ["granikv", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tokens_of_each_row_alone(
    tiny_model: Callable[..., PreTrainedModel], layout: str, attention: str
) -> None:
    model, (rows, lay_out) = tiny_model("llama", attention), LAYOUTS[layout]
    cache = prefilled(model)
    assert new_tokens(model, lay_out(rows), **cached(cache)) == alone(model, whole(rows))
    cache.check_integrity()


class WithoutPositions(LlamaForCausalLM):
    """A model whose own preparation of inputs hands on no positions, as remote code often does."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        prepared = super().prepare_inputs_for_generation(input_ids, **kwargs)
        prepared.pop("position_ids", None)
        return prepared


@pytest.fixture
def without_positions(model: PreTrainedModel) -> PreTrainedModel:
    own = WithoutPositions._from_config(model.config, attn_implementation="granikv").eval()
    own.load_state_dict(model.state_dict())
    return own


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_that_a_model_does_not_hand_on_are_counted(
    model: PreTrainedModel, without_positions: PreTrainedModel, layout: str
) -> None:
    """A mask of ones is dropped by then: prompts looked like new tokens after the prefix."""
    rows, lay_out = LAYOUTS[layout]
    cache = prefilled(without_positions)
    want = alone(model, whole(rows))
    assert new_tokens(without_positions, lay_out(rows), **cached(cache)) == want


@pytest.mark.parametrize("rows", [EVEN, RAGGED], ids=["even", "ragged"])
def test_shared_prompts_of_such_a_model_are_its_own(
    model: PreTrainedModel, without_positions: PreTrainedModel, rows: list[list[int]]
) -> None:
    options = {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4}
    got = new_tokens(without_positions, left_padded(whole(rows)), **options)
    assert got == alone(model, whole(rows))


def test_a_forward_after_a_generate_that_gave_up_is_a_plain_one(model: PreTrainedModel) -> None:
    """generate marks the cache, and may refuse its own arguments after that."""
    cache = prefilled(model)
    with pytest.raises(ValueError, match="num_return_sequences"):
        new_tokens(model, left_padded(whole(EVEN)), num_return_sequences=3, **cached(cache))
    cache._is_user_defined = True
    positions = torch.arange(P, P + 4).expand(2, -1)
    for options in ({}, {"position_ids": positions}):
        with torch.no_grad():
            got = model(input_ids=torch.tensor(EVEN), **options, **cached(cache)).logits[:, -1]
        want = [logits_alone(model, row, 1)[0] for row in whole(EVEN)]
        torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=0)
        cache.reset()
        cache._is_user_defined = True


@pytest.mark.parametrize("lengths", [(0, 4), (0,), (3, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_prefix_of_one_token_is_served(
    tiny_model: Callable[..., PreTrainedModel], family: str, lengths: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    rows = whole(suffixes(*lengths), PREFIX[:1])
    got = new_tokens(model, left_padded(rows), **cached(prefilled(model, PREFIX[:1])))
    assert got == alone(model, rows)


def test_a_prefix_may_contain_the_pad_id(model: PreTrainedModel) -> None:
    prefix = [PAD_ID, *PREFIX[:5], PAD_ID, PAD_ID]
    rows = whole(suffixes(2, 0, 4), prefix)
    got = new_tokens(model, left_padded(rows), **cached(prefilled(model, prefix)))
    assert got == alone(model, rows)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "suffix"])
def test_embeddings_give_the_tokens_of_their_ids(
    model: PreTrainedModel, cache: AsymmetricPagedCache, is_whole: bool
) -> None:
    rows = suffixes(3, 7, 5)
    inputs = left_padded(whole(rows)) if is_whole else suffix_only(rows)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    out = model.generate(
        inputs_embeds=embeds, **inputs, max_new_tokens=10, do_sample=False, **cached(cache)
    )
    assert out.tolist() == alone(model, whole(rows))


# ---- inputs that cannot mean anything right


def replaced(row: list[int], at: int) -> list[int]:
    return [*row[:at], row[at] % 90 + 3, *row[at + 1 :]]


def with_one_wrong(row: int, at: int) -> Inputs:
    rows = whole(suffixes(3, 7, 5))
    rows[row] = replaced(rows[row], at)
    return left_padded(rows)


def contradiction(row: int, at: int) -> str:
    wrong = replaced(PREFIX, at)[at]
    return f"row {row} has token {wrong} at position {at}, the prefix has {PREFIX[at]} there"


def two_rows(**kwargs: Any) -> Inputs:
    return {**left_padded(whole(suffixes(3, 7))), **kwargs}


LOST = tokens(27, seed=9)
BAD_INPUTS: dict[str, tuple[Inputs, str]] = {
    "short_suffix_without_mask": (
        {"input_ids": torch.tensor([LOST[:5]])},
        f"row 0 has token {LOST[0]} at position 0, the prefix has {PREFIX[0]} there",
    ),
    "long_suffix_without_mask": (
        {"input_ids": torch.tensor([LOST])},
        f"row 0 has token {LOST[0]} at position 0, the prefix has {PREFIX[0]} there",
    ),
    "shorter_than_the_prefix": (
        {"input_ids": torch.tensor([PREFIX[:12]])},
        "row 0 has 12 tokens, fewer than the 20 of the prefix",
    ),
    "one_row_shorter_than_the_prefix": (
        left_padded([*whole(suffixes(3)), PREFIX[:19]]),
        "row 1 has 19 tokens, fewer than the 20 of the prefix",
    ),
    "first_token_in_a_padded_row": (with_one_wrong(0, 0), contradiction(0, 0)),
    "last_token_in_a_padded_row": (with_one_wrong(2, P - 1), contradiction(2, P - 1)),
    "first_token_in_the_longest_row": (with_one_wrong(1, 0), contradiction(1, 0)),
    "last_token_in_the_longest_row": (with_one_wrong(1, P - 1), contradiction(1, P - 1)),
    "no_cache_wanted": (two_rows(use_cache=False), "use_cache=False was given"),
    "mask_for_other_rows": (
        two_rows(attention_mask=left_padded(whole(suffixes(3, 7, 5)))["attention_mask"]),
        r"attention_mask is \(3, 27\) for 2 rows of 27 tokens",
    ),
    "mask_of_four_dimensions": (
        two_rows(attention_mask=torch.ones(2, 1, P + 7, P + 7, dtype=torch.bool)),
        "must be 2D|has 4 dimensions",
    ),
    "mask_that_takes_unknown_rows_for_granted": (
        {
            "input_ids": torch.tensor(suffixes(2, 2)),
            "attention_mask": torch.ones(2, 99, dtype=torch.int64),
        },
        r"97 tokens of row 0 before the 2 new columns, the cache holds \d+",
    ),
    "embeddings_of_the_suffix_without_mask": (
        {"inputs_embeds": torch.randn(1, 5, 32)},
        "row 0 has 5 tokens, fewer than the 20",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_generate_call_that_means_nothing_right_is_refused(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str, is_used: bool
) -> None:
    if is_used:
        new_tokens(model, left_padded(whole(suffixes(2, 6))), num_new=3, **cached(cache))
    inputs, message = BAD_INPUTS[name]

    def call() -> Any:
        return model.generate(**inputs, **cached(cache), max_new_tokens=3, do_sample=False)

    assert_refused(cache, model, call, ValueError, message)


DRAFTED: dict[str, tuple[Inputs, str]] = {
    "behind_trailing_pads": (
        {
            "input_ids": torch.tensor([[*PREFIX, *RAGGED[0], *[PAD_ID] * 3]]),
            "attention_mask": torch.tensor([[1] * (P + 3) + [0] * 3]),
        },
        "if you gave none, generate counts those of drafted tokens .* pad prompts on the left",
    ),
    "from_a_padded_suffix": (
        {
            "input_ids": torch.tensor([[PAD_ID] * 3 + RAGGED[1]]),
            "attention_mask": torch.tensor([[1] * P + [0] * 3 + [1] * 7]),
        },
        "for which generate cuts the mask",
    ),
}


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_in_a_layout_that_generate_loses_are_refused_for_that(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str
) -> None:
    """The caller was told to leave out what was not given, or to give what was."""
    inputs, message = DRAFTED[name]

    def call() -> Any:
        return new_tokens(model, inputs, prompt_lookup_num_tokens=2, **cached(cache))

    assert_refused(cache, model, call, ValueError, message)


def test_a_mask_narrower_than_its_ids_is_refused(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    inputs = two_rows(attention_mask=torch.ones(2, P, dtype=torch.int64))

    def call() -> Any:
        return model.generate(**inputs, **cached(cache), max_new_tokens=3)

    # transformers itself trips over some of these
    assert_refused(cache, model, call, (ValueError, RuntimeError, IndexError), None)


BAD_FORWARDS: dict[str, tuple[Inputs, str]] = {
    "mask_over_the_new_tokens_only": (
        {"input_ids": torch.tensor(EVEN), "attention_mask": torch.ones(2, 4, dtype=torch.int64)},
        r"shows 0 tokens of row 0 before the 4 new columns, the cache holds \d+ \(20 of the prefix",
    ),
    "mask_narrower_than_the_ids": (
        {"input_ids": torch.tensor(EVEN), "attention_mask": torch.ones(2, 3, dtype=torch.int64)},
        r"attention_mask is \(2, 3\) for 2 rows of 4 tokens",
    ),
    "mask_for_other_rows": (
        {
            "input_ids": torch.tensor(EVEN),
            "attention_mask": torch.ones(3, P + 4, dtype=torch.int64),
        },
        r"attention_mask is \(3, 24\) for 2 rows of 4 tokens",
    ),
    "mask_that_hides_a_prefix_token": (
        {
            "input_ids": torch.tensor(EVEN),
            "attention_mask": torch.tensor([[1] * (P + 4), [0] + [1] * (P + 3)]),
        },
        r"shows 19 tokens of row 1 before the 4 new columns, the cache holds 20",
    ),
    "no_cache_wanted": ({"input_ids": torch.tensor(EVEN), "use_cache": False}, "use_cache=False"),
    "no_inputs": ({}, "neither input_ids nor inputs_embeds"),
}


TYPED = ("gpt2", "gpt_neo", "gptj", "codegen")
_LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
_LIKE_GPT2 |= {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
OWN_TYPED = {"gptj": Family("GPTJConfig", base=_LIKE_GPT2)}
OWN_TYPED["codegen"] = Family("CodeGenConfig", base=_LIKE_GPT2)


@pytest.mark.nothing_shared
@pytest.mark.parametrize("token_type", [0, 5])
@pytest.mark.parametrize("family", TYPED)
def test_types_of_tokens_that_a_prefix_was_computed_without_are_refused(
    tiny_model: Callable[..., PreTrainedModel], family: str, token_type: int
) -> None:
    """These models add an embedding of the type, of type 0 too."""
    own = OWN_TYPED.get(family)
    model = own.model() if own else tiny_model(family, "eager")
    cache, inputs = prefilled(model), left_padded(whole(EVEN))
    inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], token_type)
    message = "token_type_ids came with a forward over a prefix"

    def generated() -> Any:
        return new_tokens(model, inputs, **cached(cache))

    assert_refused(cache, model, generated, ValueError, message)
    typed = {"input_ids": torch.tensor(EVEN), "token_type_ids": torch.tensor(EVEN)}
    assert_refused(cache, model, lambda: model(**typed, **cached(cache)), ValueError, message)
    options = {"custom_generate": hf_granikv.generate, "min_shared_tokens": 4}
    assert new_tokens(model, inputs, **options) == new_tokens(model, inputs, use_cache=False)


UNREAD: dict[str, Inputs] = {
    "of_another_encoder": {"encoder_hidden_states": torch.randn(2, 6, 32)},
    "of_the_attention": {"cu_seq_lens_q": torch.tensor([0, 4, 8])},
    "of_an_image_that_no_text_model_takes": {"pixel_values": torch.randn(1, 3, 8, 8)},
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_here_understands_is_refused_by_name(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str
) -> None:
    given, (argument,) = {"input_ids": torch.tensor(EVEN), **UNREAD[name]}, UNREAD[name]
    message = f"^{argument} came with a forward over a prefix.*Leave it out"
    assert_refused(cache, model, lambda: model(**given, **cached(cache)), ValueError, message)


def test_cross_attention_is_refused_for_what_it_is() -> None:
    """Its hidden states were taken for a forward of an unknown model."""
    model = SHARED_PATH["gpt2"].model(attn_implementation="granikv", add_cross_attention=True)
    cache, inputs = prefilled(model), left_padded(whole(EVEN))
    inputs["encoder_hidden_states"] = torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match="encoder_hidden_states came with a forward over a prefix"):
        new_tokens(model, inputs, **cached(cache))


def test_what_changes_no_key_may_come_along(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    ids = torch.tensor(EVEN)
    silent = {"labels": ids, "output_hidden_states": True, "return_dict": True, "use_cache": True}
    with torch.no_grad():
        out = model(input_ids=ids, logits_to_keep=0, token_type_ids=None, **silent, **cached(cache))
    want = torch.stack([logits_alone(model, row, 4) for row in whole(EVEN)])
    torch.testing.assert_close(out.logits, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BAD_FORWARDS)
def test_a_forward_that_means_nothing_right_is_refused(
    model: PreTrainedModel, cache: AsymmetricPagedCache, name: str
) -> None:
    inputs, message = BAD_FORWARDS[name]
    assert_refused(cache, model, lambda: model(**inputs, **cached(cache)), ValueError, message)


def test_a_forward_with_other_rows_than_those_held_is_refused(
    model: PreTrainedModel, cache: AsymmetricPagedCache
) -> None:
    model(input_ids=torch.tensor(EVEN), **cached(cache))
    ids = torch.tensor(suffixes(1, 1, 1))
    message = "the forward has 3 rows, the cache holds 2"
    assert_refused(cache, model, lambda: model(input_ids=ids, **cached(cache)), ValueError, message)


@pytest.mark.nothing_shared
@pytest.mark.parametrize("attention", ["granikv", "sdpa"])
@pytest.mark.parametrize("num_columns", [1, 3])
def test_pads_may_come_after_columns_that_all_rows_own(
    tiny_model: Callable[..., PreTrainedModel], num_columns: int, attention: str
) -> None:
    """Which columns are tokens is not noted until one is none."""
    model: Any = tiny_model("llama", attention)
    cache, rows = prefilled(model), whole(EVEN)
    new = [tokens(num_columns, seed=7), tokens(num_columns, seed=8)]
    columns = [[*new[0], 5, 6], [*new[1], PAD_ID, 6]]
    shown = [1, 0, 1]
    with torch.no_grad():
        mask = torch.ones(2, P + 4, dtype=torch.int64)
        model(input_ids=torch.tensor(EVEN), attention_mask=mask, **cached(cache))
        for start in range(len(columns[0])):
            stop = start + 1
            its = torch.ones(2, 1, dtype=torch.int64)
            its[1] = shown[max(0, start - num_columns + 1)]
            mask = torch.cat([mask, its], 1)
            ids = torch.tensor([row[start:stop] for row in columns])
            logits = model(input_ids=ids, attention_mask=mask, **cached(cache)).logits[:, -1]
            # a pad has the position of the token before it
            positions = cache.rows.current_step().plan.positions
            assert positions.tolist() == (mask.sum(1, keepdim=True) - 1).tolist()
    for row, ids in enumerate([[*rows[0], *columns[0]], [*rows[1], *new[1], 6]]):
        want = logits_alone(model, ids, 1)[-1]
        torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)


def test_forwards_that_share_what_all_rows_own_cannot_write_to_it() -> None:
    owned = all_tokens(2, 1)
    assert owned is all_tokens(2, 1)
    with pytest.raises(ValueError, match="read-only"):
        owned[0] = False


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_missing", [-1, 0, 1])
def test_every_token_before_a_step_is_counted(model: Any, dtype: Any, num_missing: int) -> None:
    """bfloat16 cannot tell 300 from 301."""
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, torch.tensor([tokens(300, seed=1)]))
    mask = torch.ones(1, 301 - num_missing + 1, dtype=dtype)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), attention_mask=mask[:, :301], **cached(cache))
        told = nullcontext() if num_missing == 0 else pytest.raises(ValueError, match="mask shows")
        with told:
            model(input_ids=torch.tensor([[6]]), attention_mask=mask, **cached(cache))
