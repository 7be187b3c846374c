"""Choosing the next tokens of several turns at once."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hf_granikv.engine.job import Job
from hf_granikv.engine.sampler import most_probable


def chosen(
    logits: Mapping[Job, Tensor], fail: Callable[[Job, BaseException], None]
) -> Iterable[tuple[Job, int]]:
    """Chooses a token for each turn, with one wait for the device.

    Args:
        logits: Per turn, `[vocab_size]` after its last id.
        fail: Takes the turns that cannot choose; they are left out.
    """
    plain = [job for job in logits if job.sampler.is_plain]
    drawn: dict[Job, Tensor] = {}
    if plain:
        drawn.update(zip(plain, most_probable([logits[job] for job in plain]), strict=True))
    for job in logits:
        if job in drawn:
            continue
        try:
            drawn[job] = job.sampler.choose(logits[job])
        except Exception as error:
            fail(job, error)
    if not drawn:
        return []
    device = next(iter(drawn.values())).device
    tokens: list[int] = torch.stack([t.to(device) for t in drawn.values()]).tolist()
    return list(zip(drawn, tokens, strict=True))
