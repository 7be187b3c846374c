"""A token whose keys and values are no numbers spoils its own row, and no other."""

import pytest
import torch
from families import SHARED_PATH
from prompts import cached, left_padded, new_tokens, prefilled, suffixes, whole
from transformers import PreTrainedModel

from hf_granikv.kernels import compiled

SPOILT = 5


@pytest.fixture(params=["granikv", "sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = SHARED_PATH["llama"].model(attn_implementation=request.param)
    with torch.no_grad():
        model.get_input_embeddings().weight[SPOILT] = torch.nan
    return model


@pytest.fixture(params=["compiled", "in torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in torch":
        monkeypatch.setattr(compiled, "load", lambda name: "switched off")


def clean(*lengths: int) -> list[list[int]]:
    return [[7 if t == SPOILT else t for t in row] for row in whole(suffixes(*lengths))]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("lengths", [(3, 1, 9), (3, 9), (9, 1), (3, 3, 3), (1, 40, 2)])
def test_a_row_that_is_no_number_spoils_no_other(
    model: PreTrainedModel, lengths: tuple[int, ...]
) -> None:
    rows = clean(*lengths)
    cache = prefilled(model)
    alone = new_tokens(model, left_padded(rows[1:]), num_new=4)
    rows[0][-1] = SPOILT

    got = new_tokens(model, left_padded(rows), num_new=4, **cached(cache))
    again = new_tokens(model, left_padded(clean(*lengths)[1:]), num_new=4, **cached(cache))

    assert got[1:] == alone
    assert again == alone
