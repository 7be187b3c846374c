"""What users of other systems reported, where no other test is about that kind of fault."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agents import SHARED, byte_tokenizer, llama, new_runner
from families import SHARED_PATH, Family
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_granikv import AsymmetricPagedCache

P = len(PREFIX)
Build = Callable[..., PreTrainedModel]


# ---- text on both sides of a seam: huggingface/transformers #34164, where a long system prompt was
# ---- tokenized by itself for the cache, and with the question for the comparison

MERGING = byte_tokenizer(merges=[("Ġ", "W")])


def ids_of(text: str) -> list[int]:
    ids: list[int] = MERGING(text, add_special_tokens=False)["input_ids"]
    return ids


def test_a_runner_keeps_the_seam_that_its_tokenizer_would_merge() -> None:
    assert SHARED.endswith(" ")
    want = ids_of(SHARED) + ids_of("Why?")
    assert want != ids_of(SHARED + "Why?")
    runner = new_runner(llama(vocab_size=261), MERGING)
    assert runner.prompt_ids("ann", "Why?") == want
    reply = runner.run({"ann": "Why?"}, max_new_tokens=6, eos_token_id=-1)["ann"]
    options = {"num_new": 6, "eos_token_id": -1, "use_cache": False}
    assert [list(reply.token_ids)] == new_tokens(runner.model, left_padded([want]), **options)


def test_a_prompt_that_straddles_the_seam_is_refused_there() -> None:
    model, shared = llama(vocab_size=261), ids_of(SHARED)
    held = prefilled(model, shared)
    straddling = left_padded([ids_of(SHARED + "Why?"), shared + ids_of("Why?")])
    with pytest.raises(ValueError, match=f"row 0 has token 260 at position {len(shared) - 1}"):
        new_tokens(model, straddling, **cached(held))


# ---- positions


@pytest.mark.parametrize("lay_out", [lambda rows: left_padded(whole(rows)), suffix_only])
@pytest.mark.parametrize("lengths", [(1, 9, 4), (9, 1, 4, 9, 2, 6, 3, 9)], ids=str)
def test_the_first_own_token_of_every_row_is_at_the_length_of_the_prefix(
    model: PreTrainedModel, lengths: tuple[int, ...], lay_out: Callable[..., dict[str, Tensor]]
) -> None:
    """One vector of positions for all rows made the shorter ones wrong: unslothai/unsloth #3699
    and Blaizzy/mlx-vlm PR #1953."""
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"].expand(len(lengths), -1))

    hook = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        new_tokens(model, lay_out(suffixes(*lengths)), num_new=3, **cached(prefilled(model)))
    finally:
        hook.remove()
    # the prefix is computed first, by itself
    _, prompt, *steps = seen
    for row, length in enumerate(lengths):
        assert prompt[row, -length:].tolist() == list(range(P, P + length))
        assert [int(step[row, -1]) for step in steps] == [P + length, P + length + 1]


# ---- which path ran


@pytest.mark.parametrize("dispatch", ["auto", "cascade", "batched_gemm", "per_row"])
def test_many_copies_over_a_long_prefix_agree_and_are_counted(dispatch: str) -> None:
    """Large batches over one prefix lost accuracy (vllm-project/vllm #22103 and #17652), and nobody
    could see which path they took (vllm-project/vllm #12395 and #15647)."""
    prefix = tokens(2000, seed=6)
    one, other = whole(suffixes(4, 7), prefix)
    model = SHARED_PATH["llama"].model(attn_implementation="granikv", max_position_embeddings=4096)
    held = prefilled(model, prefix, dispatch=dispatch)
    rows = left_padded([one] * 32 + [other] * 18)
    got = new_tokens(model, rows, num_new=4, **cached(held))
    first, second = alone(model, [one, other], num_new=4)
    assert got == [first] * 32 + [second] * 18
    steps = held.stats().backend_steps
    assert sum(steps.values()) == 4
    assert dispatch == "auto" or steps == {dispatch: 4}


# ---- scores of prompts: vllm-project/vllm #3914 and #8268, NVIDIA/Model-Optimizer #1577, where they
# ---- were cut off or shifted


def test_a_loss_over_suffixes_is_that_of_whole_prompts(model: PreTrainedModel) -> None:
    ids = torch.tensor(suffixes(6, 6))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, **cached(prefilled(model))).loss
    logits = torch.stack([logits_alone(model, [*PREFIX, *row], 6) for row in ids.tolist()])
    want = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("asked", ["prompt_logprobs", "output_prompt_scores"])
def test_a_runner_refuses_scores_that_it_does_not_have(asked: str) -> None:
    runner = new_runner(llama(), byte_tokenizer())
    with pytest.raises(ValueError, match=asked):
        runner.run({"ann": "Why?"}, **{asked: 1})
    assert runner.agents["ann"].history == []


# ---- one prefix for all who serve requests


def test_forks_may_be_used_by_threads(model: PreTrainedModel) -> None:
    """Many requests over one cached prompt: huggingface/transformers #24841."""
    held, rows = prefilled(model), whole(suffixes(3, 7, 0))
    want, answers = alone(model, rows), {}

    def ask(name: int) -> None:
        fork = held.fork()
        answers[name] = [new_tokens(model, left_padded(rows), **cached(fork)) for _ in range(2)]

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == dict.fromkeys(range(3), [want] * 2)
    held.check_integrity()


# ---- a cache that is given, by a model that by itself would use none

SAY_NO = {
    "mpt": Family("MptConfig", {"n_layers": 2, "n_heads": 4, "d_model": 32}),
    # as a checkpoint saved after training with gradient checkpointing says
    "llama": Family("LlamaConfig", {"use_cache": False}),
}


@pytest.mark.nothing_shared
@pytest.mark.parametrize("family", SAY_NO)
def test_a_cache_is_used_where_the_call_says_so(family: str) -> None:
    model, rows = SAY_NO[family].model(attn_implementation="eager"), whole(suffixes(4, 4))
    assert model.generation_config.use_cache is False
    held = prefilled(model)
    got = new_tokens(model, left_padded(rows), use_cache=True, **cached(held))
    assert got == alone(model, rows)
    with torch.no_grad():
        held.reset()
        logits = model(input_ids=torch.tensor(suffixes(4)), **cached(held)).logits[0]
    torch.testing.assert_close(logits, logits_alone(model, rows[0], 4), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", SAY_NO)
def test_a_config_that_says_no_cache_is_outvoted_or_named(family: str) -> None:
    """With DynamicCache transformers stores every prompt again in each step, and goes astray."""
    model, rows = SAY_NO[family].model(attn_implementation="eager"), whole(suffixes(4, 4))
    outcome: object = "no outcome"
    try:
        outcome = new_tokens(model, left_padded(rows), **cached(prefilled(model)))
    except ValueError as error:
        outcome = "names it" if "use_cache=True" in str(error) else str(error)
    assert outcome in ("names it", alone(model, rows))


@pytest.mark.nothing_shared
@pytest.mark.parametrize("family", SAY_NO)
def test_a_refusal_for_lack_of_a_cache_says_what_the_rows_will_need_then(family: str) -> None:
    """Following it, rows of a model that counts pads met the next refusal."""
    model, rows = (
        SAY_NO[family].model(attn_implementation="eager"),
        left_padded(whole(suffixes(3, 7, 1))),
    )
    with pytest.raises(ValueError, match="pass use_cache=True") as refused:
        new_tokens(model, rows, **cached(prefilled(model)))
    later = None
    try:
        new_tokens(model, rows, use_cache=True, **cached(prefilled(model)))
    except ValueError as error:
        later = str(error).split(",")[0]
    counts_pads = "mpt takes no position_ids and counts pads as positions"
    assert later == (counts_pads if family == "mpt" else None)
    assert ("equal length" in str(refused.value)) == (later is not None)
    assert (later or "") in str(refused.value)


# ---- what models and their users do with what a cache returns


def test_a_model_that_views_its_keys_takes_the_cache_for_dynamic_cache() -> None:
    model = Family("GPTNeoXJapaneseConfig").model(attn_implementation="eager")
    rows, held = whole(suffixes(4, 4)), AsymmetricPagedCache(model.config)
    assert new_tokens(model, left_padded(rows), **cached(held)) == alone(model, rows)


@pytest.mark.slow
def test_a_layer_that_is_compiled_is_exact() -> None:
    model, row = SHARED_PATH["llama"].model(attn_implementation="granikv"), tokens(3, seed=4)
    want, held = logits_alone(model, [*PREFIX, *row], 3), prefilled(model)
    model.model.layers[0].self_attn.compile(backend="eager")
    try:
        with torch.no_grad():
            got = model(input_ids=torch.tensor([row]), **cached(held)).logits[0]
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
