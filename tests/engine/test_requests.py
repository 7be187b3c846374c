"""Processors, criteria and draws of one turn, against `generate` for that row alone."""

import warnings

import pytest
import torch
from agents import byte_tokenizer, llama
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StopStringCriteria, WatermarkingConfig

from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.engine.requests import Asked
from hf_granikv.engine.sampler import most_probable

PROMPT = "The tide table of Vaskelo. When is high water? The tide table"


@pytest.fixture(scope="module")
def model():
    return llama("sdpa")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def alone(model, ids, *, seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    out = model.generate(torch.tensor([ids]), use_cache=False, **kwargs)
    out = out if isinstance(out, torch.Tensor) else out.sequences
    return out[0, len(ids) :].tolist()


def sampled(model, tokenizer, ids, *, seed=None, **kwargs):
    """The loop of an engine with one row and no cache; gives ids and the reason for their end."""
    sampler = Asked(model, kwargs).sampler(ids, tokenizer, seed)
    ids, reason, num_prompt = list(ids), None, len(ids)
    with torch.no_grad():
        while reason is None:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            token = sampler.choose(logits)
            assert not sampler.is_plain or token == most_probable([logits.flip(0), logits])[1]
            ids.append(int(token))
            reason = sampler.take(ids[-1])
    return ids[num_prompt:], reason


GREEDY = {
    "plain": {},
    "max_length": {"max_length": 70, "max_new_tokens": None},
    "config": {"generation_config": GenerationConfig(max_new_tokens=7), "max_new_tokens": None},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": [[[97], 9.0], [[98, 99], 30.0]]},
    "bad_words": {"bad_words_ids": [[97], [100, 101]]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(4, 150))},
    "min_length": {"min_length": 66, "eos_token_id": list(range(4, 150))},
    "forced_bos": {"forced_bos_token_id": 77},
    "forced_eos": {"forced_eos_token_id": 88},
    "remove_invalid": {"remove_invalid_values": True},
    "length_penalty": {"exponential_decay_length_penalty": (3, 4.0), "eos_token_id": [2]},
    "suppress": {"suppress_tokens": list(range(4, 100))},
    "begin_suppress": {"begin_suppress_tokens": list(range(4, 200))},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [70 + row, 80 + len(ids) % 7]},
    "eos": {"eos_token_id": list(range(4, 60))},
    "no_eos": {"eos_token_id": None},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash")},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "stop_strings": {"stop_strings": ["\u00e4", "e", "o", "B"]},
}
SAMPLING = {
    "plain": {},
    "temperature": {"temperature": 3.0},
    "cold": {"temperature": 0.2},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "top_h": {"top_h": 0.4},
    "min_p": {"min_p": 0.2},
    "typical": {"typical_p": 0.4},
    "epsilon": {"epsilon_cutoff": 0.01},
    "eta": {"eta_cutoff": 0.01},
    "normalized": {"renormalize_logits": True, "top_k": 5},
    "all": {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 2.0},
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_generate(model, tokenizer, name):
    if GREEDY[name].keys() - {*GenerationConfig().to_dict(), "generation_config", *FUNCTIONS}:
        pytest.skip("another transformers version has it")
    kwargs = {"max_new_tokens": 10, "eos_token_id": None, **GREEDY[name]}
    for without in ("max_new_tokens", "eos_token_id"):
        if name in ("config", "max_length") and kwargs[without] is None:
            del kwargs[without]
    ids = tokenizer(PROMPT)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, reason = sampled(model, tokenizer, ids, **kwargs)
        wanted = alone(model, ids, tokenizer=tokenizer, **kwargs)
    assert given == wanted
    assert reason in ("stop", "length")


FUNCTIONS = {"prefix_allowed_tokens_fn", "watermarking_config"}


@pytest.mark.smoke
@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("name", SAMPLING)
def test_draws_are_those_of_generate_with_that_seed(model, tokenizer, name, seed):
    if SAMPLING[name].keys() - GenerationConfig().to_dict().keys():
        pytest.skip("another transformers version has it")
    kwargs = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": None, **SAMPLING[name]}
    ids = tokenizer(PROMPT)["input_ids"]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    given, _ = sampled(model, tokenizer, ids, seed=seed, **kwargs)
    assert torch.equal(torch.get_rng_state(), before)
    assert given == alone(model, ids, seed=seed, **kwargs)


def test_without_a_seed_torch_gives_one(model, tokenizer):
    ids = tokenizer(PROMPT)["input_ids"]
    torch.manual_seed(5)
    first, second = (sampled(model, tokenizer, ids, do_sample=True)[0] for _ in range(2))
    torch.manual_seed(5)
    assert [sampled(model, tokenizer, ids, do_sample=True)[0] for _ in range(2)] == [first, second]
    assert first != second


def test_criteria_of_ones_own_see_ids_and_scores(model, tokenizer):
    seen = []

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append((input_ids.shape[1], None if scores is None else len(scores)))
            return torch.tensor([len(seen) == 3])

    ids = tokenizer(PROMPT)["input_ids"]
    given, reason = sampled(model, tokenizer, ids, stopping_criteria=[AfterThree()])
    assert (len(given), reason) == (3, "stop")
    assert seen == [(len(ids) + i, None) for i in (1, 2, 3)]
    seen.clear()
    options = {"return_dict_in_generate": True, "output_scores": True}
    sampled(model, tokenizer, ids, stopping_criteria=[AfterThree()], **options)
    assert seen == [(len(ids) + i, i) for i in (1, 2, 3)]


def test_a_processor_of_ones_own_sees_the_whole_row(model, tokenizer):
    class Seen(LogitsProcessor):
        ids = None

        def __call__(self, input_ids, scores):
            self.ids = input_ids
            return scores

    processor, ids = Seen(), tokenizer(PROMPT)["input_ids"]
    options = {"max_new_tokens": 4, "eos_token_id": None}
    processors = LogitsProcessorList([processor])
    given, reason = sampled(model, tokenizer, ids, logits_processor=processors, **options)
    assert processor.ids.tolist() == [[*ids, *given[:3]]]
    assert reason == "length"


@pytest.mark.parametrize("place", ["call", "config", "model", "criterion"])
def test_stop_strings_work_from_everywhere(model, tokenizer, place):
    ids = tokenizer(PROMPT)["input_ids"]
    full, _ = sampled(model, tokenizer, ids, max_new_tokens=20, suppress_tokens=[2])
    text = tokenizer.decode(full)
    string = next(char for char in text[2:] if char.isascii())
    kwargs = {"max_new_tokens": 20, "suppress_tokens": [2]}
    own = model.generation_config.stop_strings
    if place == "call":
        kwargs["stop_strings"] = [string]
    elif place == "config":
        kwargs = {"generation_config": GenerationConfig(**kwargs, stop_strings=string)}
    elif place == "criterion":
        kwargs["stopping_criteria"] = [StopStringCriteria(tokenizer, [string])]
    else:
        model.generation_config.stop_strings = string
    try:
        given, reason = sampled(model, tokenizer, ids, **kwargs)
    finally:
        model.generation_config.stop_strings = own
    assert (given, reason) == (full[: len(given)], "stop")
    assert tokenizer.decode(given).index(string) == len(tokenizer.decode(given)) - 1


def test_the_callers_model_and_config_stay_as_they_are(model, tokenizer):
    config = GenerationConfig(max_new_tokens=3, stop_strings=["x"], cache_implementation="static")
    before = (config.to_dict(), model.generation_config.to_dict(), dict(model._forward_hooks))
    Asked(model, {"generation_config": config}).sampler([5, 6], tokenizer, None)
    after = (config.to_dict(), model.generation_config.to_dict(), dict(model._forward_hooks))
    assert after == before


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=2"),
        ({"assistant_model": "small"}, "assistant_model='small'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"dola_layers": "low"}, "dola_layers='low'"),
        ({"token_healing": True}, "token_healing=True"),
        ({"streamer": "screen"}, "streamer='screen'"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),
        ({"token_type_ids": [1]}, "token_type_ids, an argument of the forward"),
        ({"num_beams": 2, "guidance_scale": 2}, "num_beams=2; guidance_scale=2, and runs greedy"),
        ({"input_ids": [1]}, "given input_ids, which the engine sets itself"),
        ({CACHE_ARGUMENT: None}, "which the engine sets itself"),
        ({"cache_implementation": "paged"}, "which the engine sets itself"),
        ({"max_length": 3}, "max_length"),
        ({"temperature": 0.0, "do_sample": True}, "temperature"),
    ],
)
def test_what_the_engine_cannot_run_is_refused(model, tokenizer, kwargs, text):
    with pytest.raises(ValueError, match=text):
        Asked(model, kwargs).sampler([5, 6, 7, 8], tokenizer, None)


def test_what_is_switched_off_is_no_reason(model):
    off = {"num_beams": 1, "guidance_scale": 1.0, "num_return_sequences": 1, "streamer": None}
    assert Asked(model, off).reasons_against() == []
