"""The benchmarks' peers compute the same, on a tiny model: what is timed is the same work."""

import importlib.util
import re
from argparse import Namespace
from itertools import count

import pytest
import torch
from families import SHARED_PATH, VOCAB_SIZE
from prompts import alone, logits_alone, tokens
from torch import Tensor

from hf_granikv import disturbance
from hf_granikv.bench.agreement import TOLERANCES, ResultsDiffer
from hf_granikv.bench.compiled import CompiledSteps, FrozenSteps, StaticCompiled
from hf_granikv.bench.continuous import ContinuousBatching, continuous_unsupported
from hf_granikv.bench.decode import PEERS
from hf_granikv.bench.gguf_file import unwritable
from hf_granikv.bench.group_peers import GROUP_PEERS
from hf_granikv.bench.llama_cpp import LLAMA_CPP, LlamaCpp
from hf_granikv.bench.peers import Granikv, NoContext, Peer, PeerAbsent, Static
from hf_granikv.bench.race import chosen, compare, prepared, race
from hf_granikv.bench.trace_engines import ENGINES, Setting
from hf_granikv.bench.trace_load import Lengths, poisson_requests
from hf_granikv.bench.trace_replay import replay
from hf_granikv.bench.workload import Workload

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None,
    reason="llama-cpp-python or gguf is not installed",
)


needs_continuous = pytest.mark.skipif(
    bool(continuous_unsupported()), reason=continuous_unsupported()
)


def names_of(factories: dict[str, object]) -> list[object]:
    marks = {name: [needs_llama_cpp] for name in LLAMA_CPP}
    return [
        pytest.param(name, marks=marks.get(name, ())) for name in factories if name != "no-context"
    ]


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets compiled peers run what is traced as it is, which takes no C++ compiler."""
    for peer in (CompiledSteps, FrozenSteps):
        monkeypatch.setattr(peer, "backend", "eager")


def check_each_row(peer: Peer, work: Workload, steps: Tensor) -> None:
    """Every row's logits are those of a forward of that row alone."""
    peer.prepare(work, len(steps))
    # a graph made anew while the peer is timed would be timed as well
    stance = "fail_on_recompile" if isinstance(peer, CompiledSteps) else "default"
    with torch.compiler.set_stance(stance):
        got = [peer.step(ids).clone() for ids in steps]
    peer.model.config._attn_implementation = "granikv"
    for row, read in enumerate(work.reads):
        ids = [*work.prefixes[read][0].tolist(), *work.suffixes[row].tolist()]
        ids += steps[:, row, 0].tolist()
        want = logits_alone(peer.model, ids, len(steps))
        for step in range(len(steps)):
            torch.testing.assert_close(got[step][row], want[step], atol=1e-4, rtol=0)
    assert peer.bytes_held() > 0


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("name", names_of(GROUP_PEERS))
def test_every_group_peer_gives_the_logits_of_each_row_alone(
    name: str, is_shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_only(monkeypatch)
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    peer = GROUP_PEERS[name](model)
    if reason := peer.missing():
        pytest.skip(reason)
    work = Workload.random([64, 9, 150], 2, 5, VOCAB_SIZE, is_shuffled)
    steps = torch.randint(2, VOCAB_SIZE, (4, work.num_rows, 1))
    with torch.no_grad():
        check_each_row(peer, work, steps)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", names_of(PEERS))
def test_every_decode_peer_gives_the_logits_of_each_row_alone(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_only(monkeypatch)
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    peer = PEERS[name](model)
    if reason := peer.missing():
        pytest.skip(reason)
    work = Workload.random([70], num_rows, 5, VOCAB_SIZE, False)
    steps = torch.randint(2, VOCAB_SIZE, (4, num_rows, 1))
    with torch.no_grad():
        check_each_row(peer, work, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granikv-compiled", "granikv-frozen", "StaticCache-frozen"])
def test_what_the_compiler_makes_gives_the_same_logits(name: str) -> None:
    torch._dynamo.reset()
    model = SHARED_PATH["llama"].model(num_hidden_layers=1, attn_implementation="granikv")
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    with torch.no_grad():
        try:
            check_each_row(PEERS[name](model), work, torch.randint(2, VOCAB_SIZE, (3, 2, 1)))
        except PeerAbsent as error:
            pytest.skip(str(error))


def test_a_compiler_that_fails_is_the_reason_for_the_absence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no C++ compiler\nand more lines")

    monkeypatch.setattr(CompiledSteps, "backend", broken)
    model = SHARED_PATH["llama"].model()
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    with torch.no_grad(), pytest.raises(PeerAbsent, match=r"torch.compile: .*no C\+\+ compiler"):
        StaticCompiled(model).prepare(work, 2)


def test_a_step_that_compiles_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that counts in a Python number compiles in every step, and would be timed at that."""
    trace_only(monkeypatch)
    model = SHARED_PATH["llama"].model()
    forward, count = model.forward, [0]

    def counting(**kwargs: object) -> object:
        model.count = count[0]
        return forward(**kwargs) if model.count >= 0 else None

    class Counting(StaticCompiled):
        def take_back(self) -> None:
            super().take_back()
            count[0] += 1

    monkeypatch.setattr(model, "forward", counting)
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    with torch.no_grad(), pytest.raises(PeerAbsent, match="recompil"):
        Counting(model).prepare(work, 2)


@needs_llama_cpp
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_llama_cpp_computes_in_bfloat16_what_the_model_does(name: str) -> None:
    model = SHARED_PATH["llama"].model(hidden_size=64, head_dim=32).bfloat16()
    work = Workload.random([70], 3, 5, VOCAB_SIZE, False)
    steps = torch.randint(2, VOCAB_SIZE, (4, 3, 1))
    with torch.no_grad():
        peers: list[Peer] = [Static(model), LLAMA_CPP[name](model)]
        for peer in peers:
            peer.prepare(work, len(steps))
        agreements, differing = compare(peers, steps, TOLERANCES[torch.bfloat16])
    agreement = agreements[name]
    assert not differing
    assert agreement.num_same_best >= 0.9 * steps.numel()
    assert "llama-cpp-python" in peers[1].note


@needs_llama_cpp
@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_cpp_takes_heads_and_output_layers_of_any_kind(is_tied: bool) -> None:
    options = {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": is_tied}
    model = SHARED_PATH["llama"].model(attn_implementation="granikv", **options)
    work = Workload.random([30, 9], 2, 5, VOCAB_SIZE, True)
    with torch.no_grad():
        check_each_row(LlamaCpp(model, False), work, torch.randint(2, VOCAB_SIZE, (3, 4, 1)))


@needs_llama_cpp
def test_a_step_that_is_taken_back_leaves_no_trace() -> None:
    model = SHARED_PATH["llama"].model()
    work = Workload.random([30], 3, 5, VOCAB_SIZE, False)
    steps = torch.randint(2, VOCAB_SIZE, (4, 3, 1))
    with torch.no_grad():
        plain, warmed = LlamaCpp(model, False), LlamaCpp(model, False)
        for peer in (plain, warmed):
            peer.prepare(work, len(steps))
        for ids in steps:
            warmed.warm(ids.flip(0))
            torch.testing.assert_close(warmed.step(ids), plain.step(ids))


@pytest.mark.parametrize(
    ("family", "options", "text"),
    [
        ("qwen3", {}, "models of type llama, and this is qwen3"),
        ("llama", {"attention_bias": True}, "no place for the weight .*q_proj.bias"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type default, and this is linear",
        ),
    ],
    ids=["type", "bias", "rope"],
)
@needs_llama_cpp
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    family: str, options: dict[str, object], text: str
) -> None:
    model = SHARED_PATH[family].model(**options)
    assert re.search(text, unwritable(model))
    assert LlamaCpp(model, False).missing() == unwritable(model)


def test_without_the_package_llama_cpp_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = SHARED_PATH["llama"].model()
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    with torch.no_grad():
        peers, reasons = prepared(PEERS, ["granikv", "llama.cpp"], model, work, 2)
    assert [peer.name for peer in peers] == ["granikv"]
    assert reasons == {"llama.cpp": "the package llama-cpp-python is not installed"}
    arguments = Namespace(peers=["granikv", "llama.cpp"], default_peers=[])
    with pytest.raises(
        ValueError, match=r"--peers llama\.cpp: the package llama-cpp-python is not"
    ):
        chosen(arguments, PEERS, model)


def test_a_cache_that_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SHARED_PATH["llama"].model()
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    monkeypatch.setattr(Static, "bytes_needed", lambda *args: 6_100_000_000)
    monkeypatch.setattr("hf_granikv.bench.race.free_bytes", lambda: 7e9)
    with torch.no_grad():
        peers, reasons = prepared(PEERS, ["granikv", "StaticCache"], model, work, 2)
    assert [peer.name for peer in peers] == ["granikv"]
    assert reasons == {"StaticCache": "it would hold 6.1 of the 7.0 GB that are free"}


def test_a_dense_cache_takes_what_is_reckoned() -> None:
    model = SHARED_PATH["llama"].model()
    work = Workload.random([20], 2, 3, VOCAB_SIZE, False)
    with torch.no_grad():
        peer = Static(model)
        peer.prepare(work, 4)
    assert peer.bytes_held() == peer.bytes_needed(work, 4)


class Late(Static):
    """A peer whose new tokens are one position late."""

    name = "late"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        super().prepare(workload, num_steps)
        self.num_columns += 1


class NoNumbers(Static):
    """A peer whose logits are no numbers."""

    name = "no numbers"

    def step(self, ids: Tensor) -> Tensor:
        return super().step(ids) * torch.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Late, NoNumbers])
def test_other_work_is_not_timed(kind: type[Peer], dtype: torch.dtype) -> None:
    model = SHARED_PATH["llama"].model().to(dtype)
    work = Workload.random([20], 3, 3, VOCAB_SIZE, False)
    with torch.no_grad():
        peers = [Granikv(model), kind(model)]
        for peer in peers:
            peer.prepare(work, 3)
        with pytest.raises(ResultsDiffer, match=f"logits of {kind.name} differ from .* granikv"):
            compare(peers, torch.randint(2, VOCAB_SIZE, (3, 3, 1)), TOLERANCES[dtype])


def test_another_engine_that_rounds_otherwise_is_left_out_with_the_reason() -> None:
    class OtherEngine(Late):
        name = "other engine"
        is_other_engine = True

    model = SHARED_PATH["llama"].model()
    work = Workload.random([20], 3, 3, VOCAB_SIZE, False)
    with torch.no_grad():
        peers = [Granikv(model), Static(model), OtherEngine(model)]
        for peer in peers:
            peer.prepare(work, 3)
        tokens = torch.randint(2, VOCAB_SIZE, (3, 3, 1))
        agreements, differing = compare(peers, tokens, TOLERANCES[torch.float32])
    assert list(agreements) == ["StaticCache", "other engine"]
    assert list(differing) == ["other engine"]
    assert "logits of other engine differ from those of granikv" in differing["other engine"]


@pytest.mark.parametrize(("rotates", "order"), [(False, "abc abc abc"), (True, "abc bca cab")])
def test_peers_take_turns_step_by_step(rotates: bool, order: str) -> None:
    done: list[str] = []

    class Noting(NoContext):
        has_own_threads = False

        def __init__(self, name: str) -> None:
            self.name = name

        def step(self, ids: Tensor) -> Tensor:
            done.append(self.name)
            return ids

    peers = [Noting(name) for name in "abc"]
    timings = race(peers, torch.zeros(3, 1, 1), rotates=rotates, description="")
    assert done == list(order.replace(" ", ""))
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3, 3]


def test_a_change_of_threads_is_followed_by_a_step_that_is_not_timed() -> None:
    done: list[str] = []

    class Noting(NoContext):
        def __init__(self, name: str) -> None:
            self.name, self.has_own_threads = name, name.isupper()

        def warm(self, ids: Tensor) -> None:
            done.append(f"({self.name})")

        def step(self, ids: Tensor) -> Tensor:
            done.append(self.name)
            return ids

    peers = [Noting(name) for name in "aBCd"]
    race(peers, torch.zeros(2, 1, 1), rotates=False, description="")
    assert " ".join(done) == "a (B) B C (d) d a (B) B C (d) d"


@pytest.mark.parametrize(("steps_s", "is_told"), [(9, True), (0, False)])
def test_a_race_beside_other_work_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps_s: int,
    is_told: bool,
) -> None:
    class Idle(NoContext):
        name, has_own_threads = "idle", False

        def __init__(self) -> None:
            pass

        def step(self, ids: Tensor) -> Tensor:
            return ids

    monkeypatch.setattr(disturbance, "waited_s", count(step=steps_s).__next__)
    race([Idle()], torch.zeros(2, 1, 1), rotates=False, description="2 rows")
    told = "2 rows: DISTURBED: threads of this process waited 9 s" in capsys.readouterr().err
    assert told == is_told


@needs_continuous
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


@needs_continuous
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
