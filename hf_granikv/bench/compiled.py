"""Peers whose decode steps are compiled, as `generate` does where it is given a `compile_config`."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx

from hf_granikv import compile_decode
from hf_granikv.bench.peers import Granikv, Peer, PeerAbsent, Static
from hf_granikv.bench.workload import Workload

# variants of one function: peers and workloads of a run are told apart by their shapes and caches
_MAX_VARIANTS = 64


def frozen(*graph_and_inputs: Any) -> Any:
    """The inductor under a name of its own: graphs of one backend serve whoever has the same guards."""
    return compile_fx(*graph_and_inputs)


class CompiledSteps(Peer):
    """A peer whose decode steps are compiled for its shapes (mode "default").

    Two steps are tried and taken back when it is prepared: one to compile, and one that must not
    compile again, or its times would be those of the compiler.
    """

    has_models_time = False
    backend: ClassVar[Any] = "inductor"
    # whether weights become constants of the graph, packed for the processor
    is_frozen: ClassVar[bool] = False

    def prepare(self, workload: Workload, num_steps: int) -> None:
        super().prepare(workload, num_steps)  # type: ignore[safe-super]
        torch._dynamo.config.recompile_limit = _MAX_VARIANTS
        self.run = self.compiled()
        # strided as the tokens to come: graphs are made for strides as well
        ids = workload.suffixes.new_zeros(workload.num_rows, 1)
        for stance in ("default", "fail_on_recompile"):
            try:
                with torch.compiler.set_stance(stance), inductor.patch(freezing=self.is_frozen):
                    self.step(ids)
            # a missing or failing C++ compiler comes as errors of many kinds
            except Exception as error:
                cause = getattr(error, "inner_exception", error)
                first_line = next(iter(str(cause).strip().splitlines()), "")
                raise PeerAbsent(f"torch.compile: {type(cause).__name__}: {first_line}") from error
            self.take_back()

    def compiled(self) -> Callable[..., Any]:
        """The forward of a step."""
        return torch.compile(self.model.forward, dynamic=False, backend=self.backend)

    def take_back(self) -> None:
        """Forgets the last token of every row."""
        raise NotImplementedError


class StaticSteps(CompiledSteps):
    """Those of `StaticCache`."""

    num_columns: int

    def take_back(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
        self.num_columns -= 1


class GranikvSteps(CompiledSteps):
    """Those of `AsymmetricPagedCache`, by `compile_decode`; undone between them, for peers that are not."""

    def compiled(self) -> Callable[..., Any]:
        compiled = compile_decode(self.model, dynamic=False, backend=self.backend).forward
        del self.model.forward

        def run(**kwargs: Any) -> Any:
            self.model.forward = compiled
            try:
                return self.model(**kwargs)
            finally:
                del self.model.forward

        return run

    def take_back(self) -> None:
        self.cache.crop(-1)


class FrozenSteps(CompiledSteps):
    """Compiled with the weights frozen (`torch._inductor.config.freezing`)."""

    backend = staticmethod(frozen)
    is_frozen = True


class StaticCompiled(StaticSteps, Static):
    """`StaticCache`, its decode steps compiled."""

    name = "StaticCache-compiled"


class StaticFrozen(FrozenSteps, StaticCompiled):
    """`StaticCache`, its decode steps compiled, the weights frozen."""

    name = "StaticCache-frozen"


class GranikvCompiled(GranikvSteps, Granikv):
    """Ours, its decode steps compiled."""

    name = "granikv-compiled"

    def take_back(self) -> None:
        super().take_back()
        self.num_columns -= 1


class GranikvFrozen(FrozenSteps, GranikvCompiled):
    """Ours, its decode steps compiled, the weights frozen."""

    name = "granikv-frozen"
