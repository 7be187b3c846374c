"""Compiled kernels of prefixes and the pass over the rows' own tokens, in one parallel region."""

import numpy as np
import pytest
import torch
from decode_rows import Rows

from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention import DecodeAttention, GroupStates, Prefix
from hf_granikv.kernels.shared_attention import COMPILED, unsupported_reasons

LENGTHS = (5, 0, 300, 40, 1)
# neighbours, others, all; more tokens than a piece
READERS = [([0, 1], 700), ([0, 2, 4], 33), (range(5), 513), ([3], 40)]


@pytest.fixture(autouse=True)
def _restored(same_threads_after):
    with torch.no_grad():
        yield


def kernels(rows):
    """Those that this CPU has for such rows."""
    for kernel in COMPILED:
        if not unsupported_reasons(kernel, rows.query, *rows.storages):
            yield kernel


class Chained:
    """A pass over own tokens with kernels of prefixes, as attention plans it."""

    def __init__(self, rows: Rows, kernel, readers=READERS, *, segments=()):
        self.rows, self.stored, prefixes = rows, [], []
        for group, prefix_len in readers:
            rows.add_prefix(group, prefix_len)
            keys, values = rows.prefixes[-1][1:]
            of_rows = None if len(group) == len(rows.lengths) else np.array(group)
            attention = kernel(rows.query, keys, values, scale=0.1, rows=of_rows)
            sizes = (len(group), rows.gqa)
            states = (t.unflatten(2, sizes).transpose(1, 2) for t in attention.states)
            row_map = np.full(len(rows.lengths), -1)
            row_map[list(group)] = np.arange(len(group))
            prefixes.append(Prefix(attention, GroupStates(*states, row_map)))
            self.stored.append((keys, values))
        lengths = [segment.keys.shape[1] for segment in segments]
        self.attention = DecodeAttention(
            rows.query,
            rows.private(),
            rows.spans,
            scale=0.1,
            num_segment_tokens=lengths,
            prefixes=prefixes,
        )
        self.place = self.attention.place(*rows.storages, segments, self.stored)

    def run(self, *states, **options):
        return self.attention.run_at(self.rows.query, self.place, states, **options)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def rows(request):
    return Rows(request.param, lengths=LENGTHS)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_equals_attention_over_all_that_a_row_reads(rows, num_threads):
    torch.set_num_threads(num_threads)
    for kernel in kernels(rows):
        rows.prefixes.clear()
        chained = Chained(rows, kernel)
        for _ in range(2):
            out = chained.run()
            for row in range(len(LENGTHS)):
                rows.check(out, row)


def test_other_states_and_segments_come_to_it(rows):
    for kernel in kernels(rows):
        rows.prefixes.clear()
        segments = [rows.add_segment([1, 2], 70)]
        chained = Chained(rows, kernel, READERS[:2], segments=segments)
        state, sinks = rows.add_prefix([0, 3], 50, num_pieces=2), torch.linspace(-3, 4, 6)
        for _ in range(2):
            out = chained.run(state, sinks=sinks)
            for row in range(len(LENGTHS)):
                rows.check(out, row, sinks)
        # a layer that has none
        rows.prefixes.pop()
        out = chained.run()
        for row in range(len(LENGTHS)):
            rows.check(out, row)


def test_layers_take_turns_in_one_plan(rows):
    """Keys elsewhere and with other strides, and queries in another order."""
    for kernel in kernels(rows):
        rows.prefixes.clear()
        chained = Chained(rows, kernel)
        expected = chained.run()
        moved = [
            tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in its)
            for its in (rows.storages, *chained.stored)
        ]
        elsewhere = chained.attention.place(*moved[0], (), moved[1:])
        for query in (rows.query, rows.query.transpose(1, 3).contiguous().transpose(1, 3)):
            assert torch.equal(chained.attention.run_at(query, elsewhere), expected)
            assert torch.equal(chained.run(), expected)


def test_one_by_one_gives_the_same_and_says_what_each_took(rows):
    for kernel in kernels(rows):
        chained, seconds = Chained(rows, kernel), []
        expected = chained.run()
        assert torch.equal(chained.run(seconds=seconds), expected)
        assert len(seconds) == len(READERS) + 1
        assert min(seconds) > 0


def test_all_run_in_one_region_of_any_number_of_threads(rows, monkeypatch):
    torch.set_num_threads(8)
    run, regions = compiled.run, []
    for kernel in kernels(rows):
        rows.prefixes.clear()
        chained = Chained(rows, kernel)
        for team in (1, 3, 8):

            def alone(task, numbers, threads, team=team):
                regions.append(threads)
                run(task, numbers, team)

            with monkeypatch.context() as patch:
                patch.setattr(compiled, "run", alone)
                out = chained.run()
            for row in range(len(LENGTHS)):
                rows.check(out, row)
        assert len(regions) == 3
        assert max(regions) <= 8
        regions.clear()
