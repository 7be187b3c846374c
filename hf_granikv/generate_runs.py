"""Answers of agents that `model.generate` gives in padded batches: beams and other modes."""

from collections import Counter
from typing import Any, cast

from torch import Tensor

from hf_granikv.agent import Reply
from hf_granikv.announce import device_of_ids
from hf_granikv.batches import in_batches
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.prompts import left_padded
from hf_granikv.report import RunReport
from hf_granikv.settings import GenerationSettings, padding_id
from hf_granikv.shares import Share
from hf_granikv.timing import StepTimer

Answered = tuple[dict[str, Reply], RunReport]


def generated(
    model: Any,
    tokenizer: Any,
    share: Share,
    prompts: dict[str, list[int]],
    settings: GenerationSettings,
) -> Answered:
    """Answers prompts over one shared text, in one batch where pads can be right.

    Args:
        model: The model; nobody else may be using it.
        tokenizer: Makes text of the answers.
        share: What the prompts begin with.
        prompts: Whole prompts by name.
        settings: Of all of them.

    Raises:
        ColdPoolFullError: The batch needs more private tokens than there may be.
    """
    width = max(map(len, prompts.values()))
    limit = settings.max_new_tokens(width)
    num_columns = None if limit is None else width + limit
    replies: dict[str, Reply] = {}
    reports: list[RunReport] = []
    try:
        for batch in in_batches(model, prompts, num_columns):
            batch_replies, report = _batch(model, tokenizer, share, batch, settings)
            replies.update(batch_replies)
            reports.append(report)
    finally:
        # histories are not kept in rows of generate
        share.cache.reset()
    return replies, RunReport.of_batches(reports)


def _batch(
    model: Any,
    tokenizer: Any,
    share: Share,
    turn: dict[str, list[int]],
    settings: GenerationSettings,
) -> Answered:
    prompts, cache = list(turn.values()), share.cache
    ids, mask = left_padded(prompts, padding_id(tokenizer))
    width, device = ids.shape[1], device_of_ids(model)
    limit = settings.max_new_tokens(width)
    cache.rows.prefixes.bind([share.prefix] * len(prompts))

    timer = StepTimer(settings.kwargs.get("streamer"), limit)
    heard = {"streamer": timer} if settings.takes_streamer else {}
    steps_before = dict(cache.stats().backend_steps)
    with timer:
        output = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            **{**settings.kwargs, **heard, CACHE_ARGUMENT: cache},
        )
    sequences = output if isinstance(output, Tensor) else output.sequences
    answers = sequences[:, width:].tolist()
    replies = {
        name: _reply(tokenizer, name, answer, len(prompt), limit, settings)
        for name, answer, prompt in zip(turn, answers, prompts, strict=True)
    }
    stats = cache.stats()
    generated_tokens = sum(len(reply.token_ids) for reply in replies.values())
    report = RunReport(
        num_agents=len(turn),
        prefix_tokens=len(share.ids),
        suffix_tokens=sum(map(len, prompts)) - len(prompts) * len(share.ids),
        generated_tokens=generated_tokens,
        decode_steps=timer.decode_steps,
        decoded_tokens=None if timer.decode_steps is None else generated_tokens - len(turn),
        prefix_prefill_s=share.prefill_s,
        suffix_prefill_s=timer.prefill_s,
        decode_s=timer.decode_s,
        generate_s=timer.total_s,
        hot_bytes=sum(level.num_bytes for level in share.prefix.chain),
        cold_bytes=stats.cold_bytes,
        dense_equivalent_bytes=stats.dense_equivalent_bytes,
        backend_steps=dict(Counter(stats.backend_steps) - Counter(steps_before)),
    )
    return replies, report


def _reply(
    tokenizer: Any,
    name: str,
    generated: list[int],
    prompt_tokens: int,
    limit: int | None,
    settings: GenerationSettings,
) -> Reply:
    ids, has_end = settings.answer_ids(generated)
    is_cut = not has_end and (limit is None or len(ids) >= limit)
    text = cast("str", tokenizer.decode(ids, skip_special_tokens=True))
    return Reply(name, text, tuple(ids), prompt_tokens, "length" if is_cut else "stop")
