"""The benchmarks' peers compute the same, on a tiny model: what is timed is the same work."""

import pytest
import torch
from continuous import ContinuousBatching
from families import SHARED_PATH, VOCAB_SIZE
from group_peers import GROUP_PEERS
from group_workload import GroupWorkload
from prompts import alone, logits_alone, tokens
from trace_engines import ENGINES, Setting
from trace_load import Lengths, poisson_requests
from trace_replay import replay


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("name", [name for name in GROUP_PEERS if name != "no-context"])
def test_every_group_peer_gives_the_logits_of_each_row_alone(name: str, is_shuffled: bool) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    work = GroupWorkload.random([64, 9, 150], 2, 5, VOCAB_SIZE, is_shuffled)
    steps = torch.randint(2, VOCAB_SIZE, (4, work.num_rows, 1))
    with torch.no_grad():
        peer = GROUP_PEERS[name](model)
        peer.prepare(work, len(steps))
        got = [peer.step(ids) for ids in steps]
        model.config._attn_implementation = "granikv"
        for row, read in enumerate(work.reads):
            ids = [*work.prefixes[read][0].tolist(), *work.suffixes[row].tolist()]
            ids += steps[:, row, 0].tolist()
            want = logits_alone(model, ids, len(steps))
            for step in range(len(steps)):
                torch.testing.assert_close(got[step][row], want[step], atol=1e-4, rtol=0)
    assert peer.bytes_held() > 0


def test_requests_find_the_pages_of_a_primed_prefix() -> None:
    model = SHARED_PATH["llama"].model()
    counted: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counted.append(args[0].numel())
    )
    served = ContinuousBatching(
        model, num_tokens=600, max_rows=2, max_batch_tokens=70, page_size=16
    )
    prefix = tokens(100, seed=1)
    served.prime([prefix])
    counted.clear()
    served.start({"a": [*prefix, 5, 6], "b": [*prefix, 7]})
    # six whole pages are found, the four tokens after them are not
    assert counted == [6 + 5]


@pytest.mark.parametrize("max_step_tokens", [6, 256])
def test_every_engine_answers_a_trace_as_each_request_alone(max_step_tokens: int) -> None:
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    prefixes = tuple(torch.tensor([tokens(length, seed=length)]) for length in (70, 9))
    requests = poisson_requests(
        12,
        200.0,
        num_prefixes=2,
        suffixes=Lengths(6, 1.0, 30),
        outputs=Lengths(5, 1.0, 20),
        vocab_size=VOCAB_SIZE,
        seed=1,
    )
    setting = Setting(model, prefixes, requests, 4, max_step_tokens)
    with torch.no_grad():
        logs = replay([ENGINES[n](setting) for n in ("granikv", "continuous-4")], requests)
    model.config._attn_implementation = "granikv"
    rows = [[*prefixes[r.prefix_idx][0].tolist(), *r.suffix] for r in requests]
    for request, row in zip(requests, rows, strict=True):
        want = alone(model, [row], num_new=request.num_new)[0]
        for log in logs.values():
            assert log.tokens[request.name] == want
    for log in logs.values():
        assert min(log.first_token_s(requests)) > 0
        assert min(log.between_tokens_s()) > 0
        assert log.tokens_per_s() * log.clock_s == pytest.approx(sum(r.num_new for r in requests))
