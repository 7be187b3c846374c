"""`custom_generate=hf_granikv.generate`: the tokens of the call without it, the prefix once."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import DENSE_ROUTE, REFUSED, SHARED_PATH
from prompts import PREFIX, cached, left_padded, prefilled, right_padded, suffixes, tokens, whole
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, set_seed
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from unshared import some_unshared

import hf_granikv
from hf_granikv import AsymmetricPagedCache, generation
from hf_granikv.errors import NothingSharedWarning

P = len(PREFIX)
NUM_NEW = 10
Build = Callable[..., PreTrainedModel]
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, generation.logger.name)


def stock(model: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> Any:
    set_seed(11)
    options = {"do_sample": False, "max_new_tokens": NUM_NEW, **kwargs}
    return model.generate(**inputs, **options)


def shared(model: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> Any:
    return stock(
        model, inputs, custom_generate=hf_granikv.generate, **{"min_shared_tokens": 4, **kwargs}
    )


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """Gives the list of how many tokens each forward sends through the embedding layer."""
    counts: list[int] = []
    embed = model.get_input_embeddings()
    hook = embed.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    try:
        yield counts
    finally:
        hook.remove()


def assert_stock(
    model: PreTrainedModel,
    inputs: Inputs,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    **kwargs: Any,
) -> None:
    """Checks that a call computes exactly what it would without us, and says why."""
    options = {"min_shared_tokens": 4, **kwargs}
    with counted(model) as ours, warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingSharedWarning)
        got = shared(model, inputs, **options)
    assert reason in caplog.text
    options.pop("min_shared_tokens")
    with counted(model) as theirs:
        want = stock(model, inputs, **options)
    assert ours == theirs
    assert getattr(got, "sequences", got).tolist() == getattr(want, "sequences", want).tolist()


# ---- every mode

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "three_samples_each": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam_sampling": {"num_beams": 3, "do_sample": True, "top_k": 30},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "guidance": {"guidance_scale": 1.5},
    "end_tokens": {"eos_token_id": [2, 5, 13, 44, 58]},
}
BATCHES: dict[str, Inputs] = {
    "ragged": left_padded(whole(suffixes(3, 7, 1, 5))),
    "one_row_is_the_prefix": left_padded(whole(suffixes(3, 0, 5))),
    "extra_pads": left_padded(whole(suffixes(3, 6)), extra=4),
    "one_length": left_padded(whole(suffixes(4, 4, 4))),
    "all_rows_equal": left_padded([tokens(25, seed=3)] * 4),
    "one_row": left_padded(whole(suffixes(6))),
    "nothing_shared": left_padded([tokens(9, seed=1), tokens(14, seed=2)]),
    "groups_apart": left_padded(
        [*whole(suffixes(2, 3)), *whole(suffixes(2, 6), tokens(14, seed=2)), tokens(9, seed=3)]
    ),
    "samples_of_two_prompts": left_padded(
        [PREFIX, *[tokens(14, seed=2)] * 3, PREFIX, [*PREFIX, *tokens(14, seed=2)]]
    ),
    "shorter_than_what_others_share": left_padded([*whole(suffixes(3, 7)), PREFIX[:6]]),
}
UNSHARED = ("one_row", "nothing_shared")


@pytest.mark.smoke
@pytest.mark.parametrize("batch", some_unshared(BATCHES, UNSHARED))
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_the_call_without_us(
    model: PreTrainedModel, mode: str, batch: str
) -> None:
    want = stock(model, BATCHES[batch], **MODES[mode])
    assert shared(model, BATCHES[batch], **MODES[mode]).tolist() == want.tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_scores_are_those_of_the_call_without_us(
    model: PreTrainedModel, mode: str
) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    # before 5.24, pads are among what transformers penalizes
    inputs = BATCHES["one_length" if mode == "repetition_penalty" else "ragged"]
    want = stock(model, inputs, **MODES[mode], **asked)
    got = shared(model, inputs, **MODES[mode], **asked)
    assert type(got) is type(want)
    assert list(got.keys()) == list(want.keys())
    for name in ("scores", "logits"):
        torch.testing.assert_close(got[name], want[name], atol=1e-4, rtol=0)
    if "sequences_scores" in want:
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=0)


def test_the_returned_cache_explains_itself(model: PreTrainedModel) -> None:
    got = shared(model, BATCHES["ragged"], return_dict_in_generate=True)
    assert isinstance(got.past_key_values, AsymmetricPagedCache)
    assert f"4 rows over a prefix of {P} tokens" in got.past_key_values.explain()


@pytest.mark.smoke
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_other_attentions_share_when_asked(tiny_model: Build, mode: str, attention: str) -> None:
    model = tiny_model("llama", attention)
    with counted(model) as counts:
        got = shared(model, BATCHES["ragged"], **MODES[mode])
    assert counts[0] == P
    assert got.tolist() == stock(model, BATCHES["ragged"], **MODES[mode]).tolist()


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_neox", "opt", "mixtral", *DENSE_ROUTE])
def test_families_share(tiny_model: Build, family: str) -> None:
    attention = "eager" if family in DENSE_ROUTE else "granikv"
    model = tiny_model(family, attention)
    inputs = BATCHES["one_length"]
    with counted(model) as counts:
        got = shared(model, inputs)
    assert counts[0] == P
    assert got.tolist() == stock(model, inputs).tolist()


# ---- the prefix is computed once


def test_a_prefix_goes_through_the_model_once(model: PreTrainedModel) -> None:
    with counted(model) as counts:
        shared(model, left_padded(whole(suffixes(4, 4, 4, 4))), max_new_tokens=3)
    assert counts == [P, 4 * 4, 4, 4]


@pytest.mark.parametrize("mode", ["three_samples_each", "beams", "beam_sampling"])
def test_repeated_rows_compute_only_their_last_prompt_token(
    model: PreTrainedModel, mode: str
) -> None:
    prompt = left_padded([tokens(25, seed=3)])
    with counted(model) as counts:
        shared(model, prompt, **MODES[mode], max_new_tokens=2)
    assert counts == [24, 3, 3]


def test_a_row_that_others_contain_gives_up_its_last_token(model: PreTrainedModel) -> None:
    with counted(model) as counts:
        shared(model, BATCHES["one_row_is_the_prefix"], max_new_tokens=1)
    assert counts[0] == P - 1


def test_rows_that_share_more_among_them_share_it_after_what_is_common_to_all(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with counted(model) as counts:
        shared(model, BATCHES["shorter_than_what_others_share"], max_new_tokens=1)
    assert counts[:2] == [5, P - 5]
    assert "3 rows share 2 prefixes: 5 tokens of 3 rows, 15 tokens of 2 rows." in caplog.text


def test_pads_of_the_first_row_are_not_part_of_the_prefix(model: PreTrainedModel) -> None:
    inputs = left_padded(whole(suffixes(1, 7)))
    with counted(model) as counts:
        shared(model, inputs, max_new_tokens=1)
    assert counts[0] == P


def test_the_model_is_left_as_it_was_for_other_calls(model: PreTrainedModel) -> None:
    inputs = BATCHES["ragged"]
    want = stock(model, inputs)
    shared(model, inputs)
    assert stock(model, inputs).tolist() == want.tolist()
    assert stock(model, inputs, **cached(prefilled(model))).tolist() == want.tolist()


# ---- what transformers does not hand to a callable


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


class AfterFour(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 27 + 4)


@pytest.mark.smoke
@pytest.mark.parametrize("batch", some_unshared(["ragged", "one_row"], UNSHARED))
def test_a_streamer_hears_what_it_would_without_us(model: PreTrainedModel, batch: str) -> None:
    ours, theirs = Recorder(), Recorder()
    stock(model, BATCHES[batch], streamer=theirs)
    shared(model, BATCHES[batch], streamer=ours)
    assert ours.seen == theirs.seen
    assert ours.has_ended


def test_a_streamer_is_refused_with_beams_as_without_us(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="streamer"):
        shared(model, BATCHES["ragged"], streamer=Recorder(), num_beams=2)


def test_stopping_criteria_stop(model: PreTrainedModel) -> None:
    stop = StoppingCriteriaList([AfterFour()])
    got = shared(model, BATCHES["ragged"], stopping_criteria=stop)
    assert got.shape[1] == 27 + 4
    assert got.tolist() == stock(model, BATCHES["ragged"], stopping_criteria=stop).tolist()


@pytest.mark.nothing_shared
@pytest.mark.smoke
@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_assists(model: PreTrainedModel, do_sample: bool) -> None:
    options = {"assistant_model": model, "do_sample": do_sample}
    with counted(model) as theirs:
        want = stock(model, BATCHES["one_row"], **options)
    with counted(model) as ours:
        got = shared(model, BATCHES["one_row"], **options)
    assert got.tolist() == want.tolist()
    assert ours == theirs


def test_prompt_lookup_stays_prompt_lookup(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert_stock(model, BATCHES["one_row"], caplog, "a single row", prompt_lookup_num_tokens=3)


def test_a_mode_outside_of_transformers_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError, match=r"contrastive_search.*decodes with: sample, greedy_search"
    ):
        shared(model, BATCHES["ragged"], penalty_alpha=0.6, top_k=4)


# ---- the threshold


@pytest.mark.parametrize("given", [0, -1, 2.5, True, "many"])
def test_a_threshold_that_is_no_number_of_tokens_is_refused(
    model: PreTrainedModel, given: Any
) -> None:
    with pytest.raises(ValueError, match=r"min_shared_tokens is .*; give a positive number"):
        shared(model, BATCHES["ragged"], min_shared_tokens=given)


def test_a_threshold_is_met_exactly(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = BATCHES["one_length"]
    assert_stock(
        model,
        inputs,
        caplog,
        f"{P} tokens are common to 3 rows, it takes {P + 1}",
        min_shared_tokens=P + 1,
    )
    with counted(model) as counts:
        shared(model, inputs, min_shared_tokens=P)
    assert counts[0] == P


def test_a_threshold_may_be_bound_beforehand(model: PreTrainedModel) -> None:
    bound = partial(hf_granikv.generate, min_shared_tokens=P)
    with counted(model) as counts:
        got = stock(model, BATCHES["ragged"], custom_generate=bound)
    assert counts[0] == P
    assert got.tolist() == stock(model, BATCHES["ragged"]).tolist()


WIDE = {"num_key_value_heads": 4, "head_dim": 64}


def test_a_long_prefix_of_many_rows_is_shared_unasked(tiny_model: Build) -> None:
    model, inputs = (
        tiny_model("llama", **WIDE),
        left_padded(whole(suffixes(*[3] * 16), tokens(200, seed=5))),
    )
    with counted(model) as counts:
        got = shared(model, inputs, min_shared_tokens=None)
    assert counts[0] == 200
    assert got.tolist() == stock(model, inputs).tolist()


@pytest.mark.parametrize("family", SHARED_PATH)
def test_the_reckoning_reads_the_config_of_every_family(
    tiny_model: Build, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    inputs = left_padded(whole(suffixes(3, 3), tokens(130, seed=5)))
    assert_stock(
        tiny_model(family), inputs, caplog, "would lose", min_shared_tokens=None, max_new_tokens=2
    )


UNASKED: dict[str, tuple[int, int, str, str]] = {
    "at_the_published_floor": (16, 128, "granikv", "it takes 129"),
    "where_steps_would_lose": (2, 130, "granikv", "would lose"),
    "under_sdpa": (16, 200, "sdpa", "right but slow"),
}


@pytest.mark.parametrize("case", UNASKED)
def test_nothing_is_shared_unasked(
    tiny_model: Build, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    num_rows, prefix_len, attention, reason = UNASKED[case]
    model = tiny_model("llama", attention, **WIDE)
    inputs = left_padded(whole(suffixes(*[3] * num_rows), tokens(prefix_len, seed=5)))
    assert_stock(model, inputs, caplog, reason, min_shared_tokens=None)


def test_nothing_is_shared_unasked_under_autocast(
    tiny_model: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", **WIDE)
    inputs = left_padded(whole(suffixes(*[3] * 16), tokens(200, seed=5)))
    with torch.autocast("cpu", torch.bfloat16):
        assert_stock(model, inputs, caplog, "autocast", min_shared_tokens=None)


# ---- the stock path


@pytest.mark.nothing_shared
def test_a_batch_with_nothing_to_share_meets_the_trie_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    for name in ("AsymmetricPagedCache", "ServedModel", "sharing_gain_s"):
        monkeypatch.delattr(generation, name)
    want = stock(model, BATCHES["nothing_shared"])
    assert shared(model, BATCHES["nothing_shared"]).tolist() == want.tolist()
    assert not model._forward_pre_hooks


STOCK: dict[str, tuple[Inputs, dict[str, Any], str]] = {
    "one_row": (BATCHES["one_row"], {}, "a single row"),
    "nothing_shared": (BATCHES["nothing_shared"], {}, "no tokens are common to rows"),
    "no_cache": (BATCHES["ragged"], {"use_cache": False}, "no cache"),
    "another_cache": (BATCHES["ragged"], {"cache_implementation": "static"}, "StaticCache"),
    "chunks": (BATCHES["one_length"], {"prefill_chunk_size": 8}, "prefill_chunk_size"),
    "hidden_states": (
        BATCHES["ragged"],
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "hidden states",
    ),
    "pads_on_the_right": (right_padded(whole(suffixes(2, 5))), {}, "padding_side='left'"),
    "positions_of_ones_own": (
        BATCHES["one_length"],
        {"position_ids": torch.arange(5, 29).expand(3, -1)},
        "position_ids do not count",
    ),
    "a_row_of_pads_alone": (
        left_padded([*whole(suffixes(2)), []]),
        {},
        "padding_side='left'",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", STOCK)
def test_what_cannot_be_shared_takes_the_stock_path(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    inputs, options, reason = STOCK[case]
    assert_stock(model, inputs, caplog, reason, **options)


@pytest.mark.nothing_shared
def test_embeddings_take_the_stock_path(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    embeds = model.get_input_embeddings()(BATCHES["one_length"]["input_ids"]).detach()
    got = shared(model, {"inputs_embeds": embeds})
    assert "inputs_embeds may say more" in caplog.text
    assert got.tolist() == stock(model, {"inputs_embeds": embeds}).tolist()


class PromptTuned:
    """What PEFT's prompt tuning does: inputs are prepared by somebody else, not from the ids alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.active_peft_config = SimpleNamespace(is_prompt_learning=True)
        self._embed = model.get_input_embeddings()
        self._prepare = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        prepared: dict[str, Any] = self._prepare(*args, **kwargs)
        learned = torch.linspace(-2, 2, 32)
        embeds = self._embed(prepared["input_ids"]) + learned
        return {**prepared, "input_ids": None, "inputs_embeds": embeds}


@pytest.mark.nothing_shared
def test_prompts_that_an_adapter_adds_to_take_the_stock_path(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added was dropped without a word, or the call failed."""
    plain = stock(model, BATCHES["one_length"]).tolist()
    prepare = PromptTuned(model).prepare_inputs_for_generation
    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepare)
    want = stock(model, BATCHES["one_length"]).tolist()
    assert want != plain
    assert shared(model, BATCHES["one_length"]).tolist() == want
    assert "an adapter puts embeddings or keys of its own before the prompts" in caplog.text
    with pytest.raises(ValueError, match="row 0 of inputs_embeds differs from the prefix"):
        stock(model, BATCHES["one_length"], **cached(prefilled(model)))


@pytest.mark.nothing_shared
@pytest.mark.parametrize("kind", ["dynamic", "prefilled"])
def test_a_cache_of_ones_own_is_used_as_it_is(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    own = prefilled(model) if kind == "prefilled" else DynamicCache(config=model.config)
    got = shared(model, BATCHES["ragged"], return_dict_in_generate=True, **cached(own))
    assert got.past_key_values is own
    assert "was asked for; leave the cache out" in caplog.text
    assert got.sequences.tolist() == stock(model, BATCHES["ragged"]).tolist()


@pytest.mark.parametrize("family", ["jamba"])
def test_models_that_cannot_be_served_take_the_stock_path(
    tiny_model: Build, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    assert family in REFUSED
    assert_stock(tiny_model(family, "eager"), BATCHES["one_length"], caplog, "DynamicCache")


def test_layers_on_several_devices_take_the_stock_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "meta"}
    assert_stock(model, BATCHES["one_length"], caplog, "several devices")


@pytest.mark.nothing_shared
def test_dropout_takes_the_stock_path(tiny_model: Build, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    model.train()
    try:
        shared(model, BATCHES["one_length"])
    finally:
        model.eval()
    assert "call model.eval()" in caplog.text


def test_rope_that_would_change_on_the_way_takes_the_stock_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = SHARED_PATH["llama"].model(
        attn_implementation="granikv", rope_parameters=rope, max_position_embeddings=32
    )
    assert_stock(model, BATCHES["one_length"], caplog, "RoPE", max_new_tokens=9)
    with counted(model) as counts:
        shared(model, BATCHES["one_length"], max_new_tokens=8)
    assert counts[0] == P


def test_padded_rows_of_a_model_without_positions_take_the_stock_path(
    tiny_model: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("falcon", "eager", alibi=True, new_decoder_architecture=False)
    shared(model, BATCHES["one_length"])
    assert "3 rows share a prefix" in caplog.text
    model = tiny_model("gpt_neo", "eager", window_size=30)
    assert_stock(model, BATCHES["ragged"], caplog, "padded columns cannot be right")
