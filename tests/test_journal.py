"""What a cache notes: each group with its path and times, and one warning where nothing is shared."""

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families import SHARED_PATH
from prompts import (
    PREFIX,
    cached,
    left_padded,
    new_tokens,
    prefilled,
    prefix_ids,
    suffixes,
    tokens,
    whole,
)
from transformers import PreTrainedModel

import hf_granikv
from hf_granikv import AsymmetricPagedCache, step_attention
from hf_granikv.errors import NothingSharedWarning
from hf_granikv.journal import ForwardNotes, GroupNote, Journal

Build = Callable[..., PreTrainedModel]


# ---- groups


def add(journal: Journal, *groups: str, name: str = "a", is_timed: bool = True) -> list[GroupNote]:
    notes = ForwardNotes(journal)
    return [notes.add(name, group, lambda g=group: g, is_timed=is_timed) for group in groups]


def test_a_backend_is_counted_once_per_forward_pass_whatever_its_groups() -> None:
    journal = Journal()
    add(journal, "x", "y", "x")
    add(journal, "x")
    assert journal.backend_steps == {"a": 2}


def test_groups_are_those_of_the_last_forward_pass() -> None:
    journal = Journal()
    add(journal, "x", "y")
    assert journal.lines()[:3] == ["backend a: 1 forward pass; last, 2 groups:", "  x", "  y"]
    add(journal, "z")
    assert journal.lines()[0] == "backend a: 2 forward passes; last: z"


def test_a_backend_that_the_last_forward_pass_did_not_run_says_so() -> None:
    journal = Journal()
    add(journal, "x")
    add(journal, "y", name="b")
    assert journal.lines()[:2] == [
        "backend a: 1 forward pass; not the latest one; its own last: x",
        "backend b: 1 forward pass; last: y",
    ]


def test_a_group_that_goes_on_keeps_its_times_and_shows_their_median() -> None:
    journal = Journal()
    for seconds in (3e-6, 1e-6, 200e-6):
        (note,) = add(journal, "x")
        assert note.is_due
        note.took(lambda s=seconds: s)
        assert not note.is_due
    assert journal.lines()[0].endswith("x; measured 3 us")
    (other,) = add(journal, "y")
    assert other.measured_s is None


def test_a_group_that_is_not_timed_is_not_due() -> None:
    (note,) = add(Journal(), "x", is_timed=False)
    assert not note.is_due


def test_the_report_shows_regime_prediction_measurement_and_origin(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=4, **cached(cache))
    report = cache.explain()
    number = r"\d+ us"
    assert re.search(
        rf"last: 2 rows x 1 token over 20, (launch|memory|compute)-bound, predicted per layer: "
        rf"cascade {number}, batched_gemm {number}, per_row {number}"
        rf"(, in one pass with the rows' own tokens)?; measured {number}\n",
        report,
    )
    assert re.search(r"^predictions: built-in table, .*granikv calibrate", report, re.MULTILINE)


def test_every_group_of_a_batch_is_shown_with_its_path(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config, dispatch="cascade")
    other = tokens(30, seed=9)
    cache.prefill(model, prefix_ids())
    cache.prefill(model, prefix_ids(other))
    rows = [*whole(suffixes(3, 5, 2)), *whole(suffixes(4), other)]
    prompts = left_padded(rows)
    new_tokens(model, prompts, num_new=3, **cached(cache.bind(**prompts)))
    lines = cache.explain().splitlines()
    at = lines.index("backend cascade: 3 forward passes; last, 2 groups:")
    assert lines[at + 1].startswith("  3 rows x 1 token over 20, ")
    assert lines[at + 2].startswith("  1 row x 1 token over 30, ")
    assert all("; measured " in line for line in lines[at + 1 : at + 3])


def test_a_bfloat16_prefix_that_is_not_read_in_tiles_has_its_reason() -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv").bfloat16()
    cache = prefilled(model, dispatch="cascade")
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=2, **cached(cache))
    assert re.search(r", not in AMX tiles \(.+\); measured", cache.explain())


def test_a_refusal_stands_with_its_reason(tiny_model: Build) -> None:
    model = tiny_model("gemma2")
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=2, **cached(cache))
    assert "cascade refused: the fused kernel has no soft-capping" in cache.explain()


def test_the_first_layer_alone_is_timed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []
    took = GroupNote.took
    monkeypatch.setattr(
        GroupNote, "took", lambda note, seconds: timed.append(note) or took(note, seconds)
    )
    cache = prefilled(model)
    new_tokens(model, left_padded(whole(suffixes(3, 7))), num_new=5, **cached(cache))
    assert model.config.num_hidden_layers > 1
    assert len(timed) == 5


def test_accelerators_are_timed_when_asked_by_events_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 0.25

    monkeypatch.setattr(torch, "Event", Event)
    (note,) = add(Journal(), "x")
    query = torch.empty(1, device="meta")
    assert step_attention._timed(lambda: order.append("run") or "state", note, query) == "state"
    assert order == ["record", "run", "record"]
    assert note.measured_s == pytest.approx(250e-6)
    assert order[-1] == "wait"


def test_time_groups_is_a_switch_of_the_cache(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    assert not cache.rows.journal.times_accelerators
    cache.time_groups()
    assert cache.rows.journal.times_accelerators
    cache.time_groups(False)
    assert not cache.rows.journal.times_accelerators


# ---- nothing shared


def unshared(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if w.category is NothingSharedWarning]


@pytest.mark.parametrize(
    ("attention", "asker"), [("sdpa", "scaled_dot_product_attention"), ("eager", "__getitem__")]
)
def test_a_prefix_that_every_row_reads_by_itself_warns_once(
    tiny_model: Build, attention: str, asker: str
) -> None:
    model = tiny_model("llama", attention)
    cache, prompts = prefilled(model), left_padded(whole(suffixes(3, 7)))
    (told,) = unshared(partial(new_tokens, model, prompts, **cached(cache)))
    assert f"{asker} needs keys and values in one piece" in told
    assert "attn_implementation='granikv'" in told
    assert unshared(partial(new_tokens, model, prompts, **cached(cache))) == []


def test_rows_that_have_nobody_to_share_with_are_told_nothing(tiny_model: Build) -> None:
    """One row over a prefix, and two over one each; then two over the same."""
    model, other = tiny_model("llama", "sdpa"), tokens(30, seed=9)
    cache = prefilled(model)
    run = partial(new_tokens, model, **cached(cache))
    assert unshared(partial(run, left_padded(whole(suffixes(3))))) == []
    cache.prefill(model, prefix_ids(other))
    apart = left_padded([*whole(suffixes(3)), *whole(suffixes(4), other)])
    cache.bind(**apart)
    assert unshared(partial(run, apart)) == []
    together = left_padded(whole(suffixes(3, 7)))
    cache.bind(**together)
    assert len(unshared(partial(run, together))) == 1


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_prefix_that_is_shared_warns_of_nothing(tiny_model: Build, name: str) -> None:
    model = tiny_model(name)
    prompts = left_padded(whole(suffixes(4, 4)))
    run = partial(new_tokens, model, prompts, **cached(prefilled(model)))
    assert unshared(run) == []


def test_a_first_forward_that_had_a_reason_of_its_own_warns_of_nothing() -> None:
    journal = Journal()

    def run() -> None:
        for layer_idx in (0, 0, 1, 1):
            journal.note_dense(layer_idx, "a mask", 2)
        add(journal, "x")
        journal.note_dense(0, "a mask", 2)

    assert unshared(run) == []


def test_rows_that_start_with_no_prefix_are_told_how_near_they_come(
    model: PreTrainedModel,
) -> None:
    cache = prefilled(model)
    near = [*PREFIX[:15], *tokens(9, seed=7)]
    prompts = left_padded([tokens(9, seed=8), near])
    (told,) = unshared(partial(cache.bind, **prompts))
    assert "no row bound, of 2, starts with a prefix that is held" in told
    assert "row 1, has its first 15 tokens in common with one of 20" in told
    assert unshared(partial(cache.bind, **prompts)) == []


def test_another_tenants_prefix_is_not_spoken_of(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix_ids(), salt="theirs")
    prompts = left_padded(whole(suffixes(3, 4)))
    (told,) = unshared(partial(cache.bind, **prompts, salt="ours"))
    assert "no prefix is held under the salt of any row bound, of 2" in told
    assert "20" not in told


CHILD, OTHER, TAG = tokens(20, seed=5), tokens(20, seed=4), tokens(8, seed=2)


def with_children(model: PreTrainedModel) -> AsymmetricPagedCache:
    cache = AsymmetricPagedCache(model.config)
    root = cache.prefill(model, prefix_ids())
    child = cache.prefill(model, prefix_ids(CHILD), parent=root)
    cache.prefill(model, prefix_ids(OTHER), parent=child)
    cache.prefill(model, prefix_ids(TAG), parent=root)
    return cache


@pytest.mark.parametrize("num_same", [19, 18])
def test_a_child_whose_last_tokens_were_cut_otherwise_is_told_of(
    model: PreTrainedModel, num_same: int
) -> None:
    cache = with_children(model)
    near = left_padded([[*PREFIX, *CHILD, 7], [*PREFIX, *CHILD[:num_same], CHILD[num_same] + 1, 7]])
    (told,) = unshared(partial(cache.bind, **near))
    assert f"after 20 tokens that it shares it has the first {num_same} of 20 more" in told
    assert "if row 1 was to begin with all of a prefix" in told
    assert unshared(partial(cache.bind, **near)) == []


@pytest.mark.parametrize(
    "row",
    [
        [*CHILD[:17], *tokens(9, seed=3)],
        CHILD[:19],
        [*TAG[:7], TAG[7] + 1, 7],
        [*OTHER[:19], OTHER[19] + 1, 7],
    ],
    ids=["another text", "a row that ends", "a tag", "what another one extends"],
)
def test_rows_that_are_to_share_no_more_are_told_nothing(
    model: PreTrainedModel, row: list[int]
) -> None:
    cache = with_children(model)
    prompts = left_padded([[*PREFIX, *CHILD, 7], [*PREFIX, *row]])
    assert unshared(partial(cache.bind, **prompts)) == []


def test_nobody_is_told_how_near_another_tenants_prefix_is(model: PreTrainedModel) -> None:
    cache = AsymmetricPagedCache(model.config)
    cache.prefill(model, prefix_ids(), salt="ours")
    cache.prefill(model, prefix_ids(CHILD), salt="theirs")
    prompts = left_padded([[*PREFIX, 7], [*CHILD[:19], CHILD[19] + 1, 7]])
    assert unshared(partial(cache.bind, **prompts, salt="ours")) == []


def test_rows_cannot_be_bound_before_anything_is_stored(model: PreTrainedModel) -> None:
    """They would go on from one `generate` call to the next, as over a `DynamicCache`."""
    cache, prompts = prefilled(model), left_padded(whole(suffixes(3, 4)))
    cache.invalidate()
    for empty in (AsymmetricPagedCache(model.config), cache):
        with pytest.raises(ValueError, match=r"holds no prefix .* call cache\.prefill first"):
            empty.bind(**prompts)


def released(cache: AsymmetricPagedCache) -> AsymmetricPagedCache:
    (prefix,) = cache.rows.prefixes.all
    cache.release(prefix)
    return cache


def invalidated(cache: AsymmetricPagedCache) -> AsymmetricPagedCache:
    cache.invalidate()
    return cache


@pytest.mark.parametrize(
    "drop",
    [
        released,
        invalidated,
        lambda cache: invalidated(invalidated(cache)),
        lambda cache: invalidated(cache).fork(),
        lambda cache: copy.deepcopy(released(cache)),
    ],
    ids=["release", "invalidate", "twice", "fork", "deepcopy"],
)
def test_rows_after_the_last_prefix_went_are_told_that_none_was_stored_anew(
    model: PreTrainedModel, drop: Callable[[Any], Any]
) -> None:
    cache, prompts = drop(prefilled(model)), left_padded(whole(suffixes(3, 4)))
    (told,) = unshared(partial(new_tokens, model, prompts, **cached(cache)))
    assert "the prefix was dropped by cache.invalidate() or release(), and none has been" in told
    assert "as over a DynamicCache, unless cache.reset() comes between" in told


def test_a_loop_that_stores_its_prefix_anew_is_told_nothing(model: PreTrainedModel) -> None:
    """Nor who never stored any."""
    cache, prompts = AsymmetricPagedCache(model.config), left_padded(whole(suffixes(3, 4)))
    never = AsymmetricPagedCache(model.config)
    never.invalidate()
    assert unshared(partial(new_tokens, model, prompts, **cached(never))) == []
    for _ in range(2):
        cache.invalidate()
        cache.prefill(model, prefix_ids())
        cache.release(cache.prefill(model, prefix_ids(OTHER)))
        assert unshared(partial(new_tokens, model, prompts, **cached(cache))) == []


def test_one_row_that_starts_with_a_prefix_is_enough(model: PreTrainedModel) -> None:
    cache = prefilled(model)
    prompts = left_padded([tokens(9, seed=8), *whole(suffixes(3))])
    assert unshared(partial(cache.bind, **prompts)) == []


def test_generate_that_finds_nothing_to_share_warns_once_for_a_model(
    tiny_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    hf_granikv.generation._TOLD.discard(model)
    prompts = left_padded([tokens(9, seed=1), tokens(9, seed=2)])
    run = partial(new_tokens, model, prompts, num_new=2, custom_generate=hf_granikv.generate)
    (told,) = unshared(run)
    assert "2 rows, nothing shared: no tokens are common to rows" in told
    assert unshared(run) == []


def test_generate_on_the_dense_route_that_was_asked_for_warns_of_nothing(
    tiny_model: Build,
) -> None:
    model = tiny_model("llama", "sdpa")
    prompts = left_padded(whole(suffixes(3, 7)))
    run = partial(
        new_tokens, model, prompts, custom_generate=hf_granikv.generate, min_shared_tokens=4
    )
    assert unshared(run) == []


def test_the_warning_that_nothing_is_shared_names_the_line_of_the_caller(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_model("llama")
    hf_granikv.generation._TOLD.discard(model)
    with pytest.warns(NothingSharedWarning) as found:
        model.generate(
            input_ids=torch.tensor([[5, 6, 7]]),
            custom_generate=hf_granikv.generate,
            max_new_tokens=2,
        )
    assert [warning.filename for warning in found] == [__file__]


def test_a_model_that_has_our_attention_is_not_told_to_take_it() -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv").double()
    prompts = left_padded(whole(suffixes(3, 4)))
    (told,) = unshared(partial(new_tokens, model, prompts, num_new=4, **cached(prefilled(model))))
    assert (
        "since granikv (parts are merged in float32, and the query is torch.float64) needs" in told
    )
    assert "attn_implementation" not in told
