"""What rows bring is stored on the way, by whichever threads read it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decode_rows import Rows

from hf_granikv.kernels.decode_attention import DecodeAttention
from hf_granikv.part_work import ScoreRule
from hf_granikv.step_attention import Known, decoded_as_before
from hf_granikv.step_work import StepWork


@pytest.fixture(autouse=True)
def _restored(same_threads_after):
    with torch.no_grad():
        yield


class Brought:
    """Rows whose last tokens are not in their slots yet, and in no order in memory."""

    def __init__(self, rows: Rows):
        self.rows, numbers = rows, range(len(rows.lengths))
        self.slots = np.array([rows.slots[row, rows.lengths[row] - 1] for row in numbers])
        self.stored = [storage.clone() for storage in rows.storages]
        self.new = []
        for storage in rows.storages:
            new = storage[:, self.slots].transpose(0, 1).unsqueeze(2)
            # heads of every other row of something larger
            wide = torch.full((2 * len(new), *new.shape[1:]), torch.nan, dtype=new.dtype)
            wide[::2] = new
            self.new.append(wide[::2])
            storage[:, self.slots] = torch.nan

    def attention(self) -> DecodeAttention:
        return DecodeAttention(
            self.rows.query, self.rows.private(self.slots), self.rows.spans, scale=0.1
        )

    def run(self, attention: DecodeAttention, new=None):
        place = attention.place(*self.rows.storages)
        return attention.run_at(self.rows.query, place, new=new or self.new)

    def check(self, out):
        for storage, stored in zip(self.rows.storages, self.stored, strict=True):
            assert torch.equal(storage, stored)
        for row in range(len(self.rows.lengths)):
            self.rows.check(out, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("lengths", [(321,), (5, 290, 1), (200, 64, 150, 1, 129)], ids=str)
@pytest.mark.parametrize("dims", [(40, 24), (64, 64)], ids=str)
def test_is_stored_and_seen_and_nothing_else_changes(dtype, num_threads, lengths, dims):
    torch.set_num_threads(num_threads)
    dim, value_dim = dims
    brought = Brought(Rows(dtype, lengths=lengths, kv=3, dim=dim, value_dim=value_dim))

    brought.check(brought.run(brought.attention()))


def turned(tensor):
    return tensor.transpose(1, 3).contiguous().transpose(1, 3)


def negated(tensor):
    """The same numbers, whose memory has those with the other sign."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("kept", [turned, negated])
def test_the_way_numbers_are_kept_does_not_matter(kept):
    brought = Brought(Rows(torch.float32, lengths=(5, 1, 33)))
    new = [kept(tensor) for tensor in brought.new]
    assert new[0].stride(3) != 1 or new[0].is_neg()
    brought.rows.query = kept(brought.rows.query)

    brought.check(brought.run(brought.attention(), new))


def test_a_run_that_is_given_nothing_stores_nothing():
    brought = Brought(Rows(torch.float32, lengths=(5, 1, 33)))
    attention = brought.attention()
    brought.check(brought.run(attention))
    brought.rows.storages[0][:, brought.slots] = 7.0

    place = attention.place(*brought.rows.storages)
    attention.run_at(brought.rows.query, place)

    assert brought.rows.storages[0][:, brought.slots].eq(7).all()


def test_later_tokens_go_to_their_own_slots():
    rows = Rows(torch.float32, lengths=(5, 1, 33))
    attention = DecodeAttention(rows.query, rows.private(), rows.spans.copy(), scale=0.1)
    for _ in range(3):
        brought = Brought(rows)
        assert attention.renew(rows.private(brought.slots), rows.spans)
        brought.check(brought.run(attention))
        # the next one takes a free slot
        free = np.setdiff1d(np.arange(800), rows.slots)[: len(rows.lengths)]
        rows.slots[np.arange(len(free)), rows.lengths] = free
        rows.lengths = rows.lengths + 1
        rows.spans[:, 1] += 1


def test_it_says_whether_it_can():
    rows = Rows(torch.float32)
    attention = DecodeAttention(rows.query, rows.private(), rows.spans, scale=0.1)
    assert not attention.stores
    assert attention.renew(rows.private(np.arange(len(rows.lengths))), rows.spans)
    assert attention.stores


def test_a_layer_stores_first_where_the_pass_does_not_know_where_to():
    """As where a model has cut several new tokens down to one query."""
    rows = Rows(torch.float32, lengths=(5, 1, 33))
    brought = Brought(rows)
    rule = ScoreRule(0.1, None, None)

    def attend(private, new):
        attention = DecodeAttention(rows.query, private, rows.spans, scale=0.1)
        work = StepWork([], [], decode=attention, places={0: attention.place(*rows.storages)})
        known = Known(rows.query.shape, rows.query.dtype, rule, work)
        layer_step = SimpleNamespace(layer_idx=0, plan=SimpleNamespace(alike={0: known}))
        return decoded_as_before(rows.query, layer_step, 0.1, None, new)

    assert attend(rows.private(), brought.new) is None
    assert rows.storages[0][:, brought.slots].isnan().all()
    brought.check(attend(rows.private(brought.slots), brought.new))
    brought.check(attend(rows.private(), None))
