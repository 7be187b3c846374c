"""One batch over several prefixes: the tokens of each row alone, whatever the others read."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from families import DENSE_ROUTE, HYBRIDS, LOCAL, SHARED_PATH
from prompts import alone, cached, left_padded, logits_alone, new_tokens, prefix_ids, tokens
from transformers import PreTrainedModel
from trees import CHAINS, LEFT, READ, ROOT, ROWS, planted

ALL = {**SHARED_PATH, **LOCAL, **DENSE_ROUTE}
# what transformers refuses, and what brings no attention interface
WITHOUT = {
    **dict.fromkeys(("gemma2", "gpt_oss"), ("sdpa",)),
    **dict.fromkeys(("bloom", "gpt_neo"), ("sdpa", "granikv")),
    "falcon": ("granikv",),
}
CELLS = [
    (name, attention)
    for name in ALL
    for attention in ("granikv", "sdpa", "eager")
    if attention not in WITHOUT.get(name, ())
]
PROMPTS = left_padded(ROWS)


@pytest.fixture
def llama(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


def bound(model: PreTrainedModel, **options: Any) -> Any:
    return planted(model, **options)[0].bind(**PROMPTS)


@lru_cache
def wanted(name: str) -> list[list[int]]:
    attention = "eager" if "sdpa" in WITHOUT.get(name, ()) else "sdpa"
    return alone(ALL[name].model(attn_implementation=attention), ROWS, num_new=6)


@pytest.mark.parametrize(("name", "attention"), CELLS)
def test_every_row_gets_its_own_tokens(
    tiny_model: Callable[..., PreTrainedModel], name: str, attention: str
) -> None:
    model = tiny_model(name, attention)
    cache, held = planted(model)
    assert cache.bind(**PROMPTS) is cache
    leaves = cache._state.prefixes.bound.leaves
    assert leaves == tuple(held.get(read) for read in READ)
    for _ in range(2):
        assert new_tokens(model, PROMPTS, num_new=6, **cached(cache)) == wanted(name)
        cache.check_integrity()
    if attention == "granikv" and name in SHARED_PATH:
        assert not cache._state.journal.dense_reads


@pytest.mark.parametrize("backend", ["cascade", "batched_gemm", "per_row"])
def test_every_backend_serves_groups(llama: PreTrainedModel, backend: str) -> None:
    cache = bound(llama, dispatch=backend)
    assert new_tokens(llama, PROMPTS, **cached(cache)) == alone(llama, ROWS)
    assert set(cache.stats().backend_steps) == {backend}


def test_nothing_is_computed_or_stored_twice(llama: PreTrainedModel) -> None:
    counted: list[int] = []
    llama.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counted.append(args[0].numel())
    )
    cache, held = planted(llama)
    num_distinct = sum(prefix.num_tokens for prefix in held.values())
    assert sum(counted) == num_distinct
    token_bytes = 2 * 2 * 2 * 8 * 4
    assert cache.stats().hot_bytes == num_distinct * token_bytes
    counted.clear()
    with torch.no_grad():
        new_tokens(llama, PROMPTS, num_new=1, **cached(cache.bind(**PROMPTS)))
    # the longest suffix is that of the row that reads nothing; nobody computes more columns for it
    assert sum(counted) == len(ROWS) * 8
    suffix_tokens = sum(
        max(1, len(row) - len(CHAINS[read])) for row, read in zip(ROWS, READ, strict=True)
    )
    assert cache.stats().cold_tokens == suffix_tokens
    assert cache.stats().prefix_groups == 6


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 5},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_modes(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    cache = bound(llama)
    got, want = [], []
    for held, out in ((cached(cache), got), ({}, want)):
        torch.manual_seed(0)
        out.append(new_tokens(llama, PROMPTS, **held, **options))
    assert got == want
    cache.check_integrity()


def test_embeddings_of_whole_prompts(llama: PreTrainedModel) -> None:
    embeds = llama.get_input_embeddings()(PROMPTS["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": PROMPTS["attention_mask"]}
    # a row that is exactly its prefix has no embedding of its own
    rows = [row for row, read in zip(ROWS, READ, strict=True) if row != tuple(CHAINS[read])]
    kept = [i for i, row in enumerate(ROWS) if row in rows]
    inputs = {name: tensor[kept] for name, tensor in inputs.items()}
    cache = planted(llama)[0].bind(**{name: t[kept] for name, t in PROMPTS.items()})
    out = llama.generate(**inputs, **cached(cache), max_new_tokens=10, do_sample=False)
    assert out.tolist() == alone(llama, rows)


def test_suffix_only_ids(llama: PreTrainedModel) -> None:
    reads = ["left", "other", "tip"]
    suffix = [tokens(n, seed=n) for n in (2, 6, 4)]
    rows = [[*CHAINS[read], *row] for read, row in zip(reads, suffix, strict=True)]
    cache = planted(llama)[0].bind(**left_padded(rows))
    chains = left_padded([CHAINS[read] for read in reads])["attention_mask"]
    own = left_padded(suffix)
    inputs = {
        "input_ids": own["input_ids"],
        "attention_mask": torch.cat([chains, own["attention_mask"]], dim=1),
    }
    assert new_tokens(llama, inputs, **cached(cache)) == alone(llama, rows)


@pytest.mark.parametrize("option", [{"repetition_penalty": 2.5}, {"no_repeat_ngram_size": 2}])
def test_processors_see_the_ids_of_every_chain(
    llama: PreTrainedModel, option: dict[str, Any]
) -> None:
    reads = ["left", "other", "tip"]
    suffix = [tokens(n, seed=n) for n in (2, 6, 4)]
    rows = [[*CHAINS[read], *row] for read, row in zip(reads, suffix, strict=True)]
    want = alone(llama, rows, num_new=20, **option)
    assert want != alone(llama, rows, num_new=20)
    cache, whole = planted(llama)[0], left_padded(rows)
    cache.bind(**whole)
    chains = left_padded([CHAINS[read] for read in reads])["attention_mask"]
    own = left_padded(suffix)
    mask = torch.cat([chains, own["attention_mask"]], dim=1)
    for inputs in (whole, {"input_ids": own["input_ids"], "attention_mask": mask}):
        assert new_tokens(llama, inputs, num_new=20, **cached(cache), **option) == want


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "deepseek_v3"])
def test_plain_forwards_and_crops(tiny_model: Callable[..., PreTrainedModel], name: str) -> None:
    model = tiny_model(name)
    reads = ["left", "other", "tip", "none"]
    rows = [[*CHAINS[read], *tokens(3, seed=30 + i)] for i, read in enumerate(reads)]
    cache = planted(model)[0].bind(**left_padded(rows))
    ids = torch.tensor([row[-3:] for row in rows])
    with torch.no_grad():
        for _ in range(2):
            got = model(input_ids=ids, **cached(cache)).logits
            want = torch.stack([logits_alone(model, row, 3) for row in rows])
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
            assert cache.get_seq_length() == len(CHAINS["tip"]) + 3
            cache.crop(-3)
        if name == "mistral":
            return  # its windows have left what a crop into the prefix would need
        cache.crop(-2)
        assert cache.get_seq_length() == len(CHAINS["tip"]) - 2
        again = [[*CHAINS[read][:-2], *row[-3:]] for read, row in zip(reads, rows, strict=True)]
        got = model(input_ids=ids, **cached(cache)).logits
        want = torch.stack([logits_alone(model, row, 3) for row in again])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_rows_that_move_keep_their_prefixes(llama: PreTrainedModel) -> None:
    cache = bound(llama)
    with torch.no_grad():
        llama(**_last_tokens(cache), **cached(cache))
        order = [6, 0, 4, 4, 2]
        cache.batch_select_indices(torch.tensor(order))
        cache.check_integrity()
        ids = torch.full((len(order), 1), 9)
        got = llama(input_ids=ids, **cached(cache)).logits[:, -1]
    rows = [[*ROWS[i][: len(CHAINS[READ[i]])], 5, 9] for i in order]
    want = torch.stack([logits_alone(llama, row, 1)[0] for row in rows])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def _last_tokens(cache: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((len(ROWS), 1), 5)}


def test_forks_share_the_tree(llama: PreTrainedModel) -> None:
    cache = bound(llama)
    want, hot = alone(llama, ROWS), cache.stats().hot_bytes
    twin = cache.fork()
    assert new_tokens(llama, PROMPTS, **cached(twin)) == want
    cache.invalidate()
    assert cache.stats().hot_bytes == 0
    assert twin.stats().hot_bytes == hot
    assert new_tokens(llama, PROMPTS, **cached(twin)) == want


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_go_on_from_a_chain(tiny_model: Callable[..., PreTrainedModel], name: str) -> None:
    model = tiny_model(name)
    cache, _ = planted(model)
    rows = [[*CHAINS["tip"], *tokens(5, seed=seed)] for seed in range(3)]
    prompts = left_padded(rows)
    assert new_tokens(model, prompts, **cached(cache.bind(**prompts))) == alone(model, rows)
    exact = left_padded([CHAINS["tip"]])
    assert new_tokens(model, exact, **cached(cache.bind(**exact))) == alone(model, [CHAINS["tip"]])
    with pytest.raises(ValueError, match="all rows of a batch must read the same"):
        cache.bind(**left_padded([[*ROOT, *LEFT, 5], [*CHAINS["right"], 5]]))


def test_prefixes_of_chunks_are_the_same(llama: PreTrainedModel) -> None:
    _, held = planted(llama)
    other, _ = planted(llama)
    other.invalidate()
    root = other.prefill(llama, prefix_ids(ROOT), chunk_size=5)
    left = other.prefill(llama, prefix_ids(LEFT), parent=root, chunk_size=4)
    for ours, theirs in zip(left.tensors(), held["left"].tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
