import time
from dataclasses import dataclass, field

import pytest
from devices import CPU_TABLE

from hf_granikv.backends import BACKENDS
from hf_granikv.dispatch import Dispatcher
from hf_granikv.dispatch.device_constants import amx_table, avx2_table, avx512_table
from hf_granikv.dispatch.roofline import DeviceConstants, Work
from hf_granikv.views import GroupShape

SHAPE = GroupShape(
    num_rows=16, q_len=1, prefix_len=1000, num_kv_heads=3, gqa_ratio=3, head_dim=64, dtype_bytes=4
)


def device(flops_per_s: float, bytes_per_s: float, launch_s: float) -> DeviceConstants:
    return DeviceConstants.from_peaks(
        {"float32": flops_per_s}, bandwidth_bytes_per_s=bytes_per_s, launch_s=launch_s
    )


ONE_FLOP_A_SECOND = device(1.0, 1e30, 0.0)


@dataclass
class Fake:
    """A backend whose time is looked up by prefix length."""

    seconds: dict[int, float]
    reasons: list[str] = field(default_factory=list)
    asked: int = 0

    def unsupported_reasons(self, shape: GroupShape) -> list[str]:
        self.asked += 1
        return self.reasons

    def work(self, shape: GroupShape) -> Work:
        return Work(self.seconds[shape.prefix_len], 0.0, 0, 1)


def fakes(*backends: Fake, choice: str = "auto") -> Dispatcher:
    named = dict(zip("abc", backends, strict=False))
    return Dispatcher(choice, backends=named, constants=ONE_FLOP_A_SECOND)


def test_the_fastest_backend_is_chosen():
    decision = fakes(Fake({1000: 3.0}), Fake({1000: 2.0})).choose(SHAPE, "cpu")

    assert decision.backend_name == "b"
    assert decision.predicted_s == {"a": 3.0, "b": 2.0}
    assert decision.refused == {}


def test_a_backend_that_cannot_run_is_refused_with_its_reasons():
    dispatcher = fakes(Fake({1000: 1.0}, reasons=["too narrow", "too old"]), Fake({1000: 2.0}))

    decision = dispatcher.choose(SHAPE, "cpu")

    assert decision.backend_name == "b"
    assert decision.refused == {"a": ["too narrow", "too old"]}
    assert decision.predicted_s == {"b": 2.0}


@pytest.mark.parametrize(("gain", "expected"), [(0.09, "a"), (0.11, "b")])
def test_the_earlier_choice_stays_unless_another_is_a_tenth_faster(gain, expected):
    dispatcher = fakes(Fake({1000: 1.0, 2000: 1.0}), Fake({1000: 2.0, 2000: 1.0 - gain}))
    assert dispatcher.choose(SHAPE, "cpu").backend_name == "a"

    assert dispatcher.choose(SHAPE._replace(prefix_len=2000), "cpu").backend_name == expected


def test_groups_of_another_size_have_no_earlier_choice():
    dispatcher = fakes(Fake({1000: 1.0, 2000: 1.0}), Fake({1000: 2.0, 2000: 0.95}))
    dispatcher.choose(SHAPE, "cpu")

    other = SHAPE._replace(prefix_len=2000, num_rows=17)

    assert dispatcher.choose(other, "cpu").backend_name == "b"


def test_a_growing_prefix_asks_the_backends_once_per_length_bucket():
    backend = Fake(dict.fromkeys(range(1024, 1153), 1.0))
    dispatcher = fakes(backend)

    first, *others = [
        dispatcher.choose(SHAPE._replace(prefix_len=length), "cpu") for length in range(1024, 1152)
    ]

    assert all(decision is first for decision in others)
    assert backend.asked == 1


def test_an_explicit_choice_is_kept_whatever_it_costs():
    dispatcher = fakes(Fake({1000: 1.0}), Fake({1000: 99.0}), choice="b")

    assert dispatcher.choose(SHAPE, "cpu").backend_name == "b"


def test_an_explicit_choice_that_cannot_run_raises_with_all_reasons():
    refusing = Fake({1000: 1.0}, reasons=["too narrow", "too old"])

    with pytest.raises(ValueError, match=r"'a'.*too narrow, too old.*Usable here: b"):
        fakes(refusing, Fake({1000: 2.0}), choice="a").choose(SHAPE, "cpu")


def test_no_usable_backend_raises_with_the_reasons_of_all():
    backends = Fake({}, reasons=["too narrow"]), Fake({}, reasons=["too old"])

    with pytest.raises(ValueError, match="a: too narrow; b: too old"):
        fakes(*backends).choose(SHAPE, "cpu")


def test_an_unknown_choice_names_the_known_ones():
    with pytest.raises(ValueError, match="'fast' is unknown; known: auto, cascade, batched_gemm"):
        Dispatcher("fast", backends=BACKENDS)


@pytest.mark.parametrize(
    ("constants", "regime"),
    [
        (device(1.0, 1e30, 0.0), "compute"),
        (device(1e30, 1.0, 0.0), "memory"),
        (device(1e30, 1e30, 1.0), "launch"),
    ],
    ids=["compute", "memory", "launch"],
)
def test_the_regime_names_the_bound(constants, regime):
    dispatcher = Dispatcher("cascade", backends=BACKENDS, constants=constants)

    assert dispatcher.choose(SHAPE, "cpu").regime == regime


@pytest.mark.parametrize(
    ("rows", "prefix_len", "expected"),
    [(1, 128, "per_row"), (1, 4096, "per_row"), (16, 4096, "cascade"), (64, 512, "cascade")],
)
def test_a_cpu_with_avx2_shares_from_a_few_rows_on(rows, prefix_len, expected):
    shape = SHAPE._replace(num_rows=rows, prefix_len=prefix_len)

    dispatcher = Dispatcher(backends=BACKENDS, constants=CPU_TABLE)

    assert dispatcher.choose(shape, "cpu").backend_name == expected


@pytest.mark.parametrize(
    ("rows", "prefix_len", "dtype", "expected"),
    [
        (1, 16, "float32", "per_row"),
        (1, 128, "bfloat16", "per_row"),
        (1, 8192, "bfloat16", "cascade"),
        (4, 4096, "float32", "cascade"),
        (16, 4096, "float32", "cascade"),
        (16, 4096, "bfloat16", "cascade"),
        (64, 1024, "bfloat16", "cascade"),
    ],
)
def test_the_table_of_a_cpu_with_amx_shares_where_that_was_measured(
    rows, prefix_len, dtype, expected
):
    shape = SHAPE._replace(num_rows=rows, prefix_len=prefix_len, dtype=dtype)

    dispatcher = Dispatcher(backends=BACKENDS, constants=amx_table())

    assert dispatcher.choose(shape, "cpu").backend_name == expected


@pytest.mark.parametrize(
    ("rows", "prefix_len", "expected"),
    [(1, 128, "per_row"), (2, 64, "per_row"), (4, 1024, "cascade"), (16, 4096, "cascade")],
)
def test_the_table_of_a_cpu_with_avx512_shares_where_that_was_measured(rows, prefix_len, expected):
    shape = SHAPE._replace(num_rows=rows, prefix_len=prefix_len, dtype="float32", dtype_bytes=4)

    dispatcher = Dispatcher(backends=BACKENDS, constants=avx512_table())

    assert dispatcher.choose(shape, "cpu").backend_name == expected


def test_another_prefix_altogether_is_no_earlier_choice():
    dispatcher = fakes(Fake({64: 1.0, 4096: 2.0}), Fake({64: 2.0, 4096: 1.95}))
    assert dispatcher.choose(SHAPE._replace(prefix_len=64), "cpu").backend_name == "a"

    assert dispatcher.choose(SHAPE._replace(prefix_len=4096), "cpu").backend_name == "b"


def test_a_decision_says_where_its_numbers_come_from():
    dispatcher = Dispatcher(backends=BACKENDS, constants=avx2_table())

    assert dispatcher.choose(SHAPE, "cpu").origin.startswith("built-in table")


@pytest.mark.parametrize(
    "constants", [avx2_table(), avx512_table(), amx_table()], ids=lambda found: found.name
)
def test_a_choice_takes_less_than_fifty_microseconds(constants):
    """The fastest of many: what else runs on the machine is not the dispatcher's."""
    new_us, known_us = [], []
    for i in range(300):
        dispatcher = Dispatcher(backends=BACKENDS, constants=constants)
        for taken in (new_us, known_us):
            start = time.perf_counter()
            dispatcher.choose(SHAPE._replace(prefix_len=1000 + i), "cpu")
            taken.append(1e6 * (time.perf_counter() - start))

    assert min(new_us) < 50
    assert min(known_us) < 25
