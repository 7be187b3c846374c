"""`StaticCache` under `torch.compile`, as transformers' `generate` runs it on accelerators."""

from typing import ClassVar

import torch

from hf_granikv.bench.peers import PeerAbsent, Static
from hf_granikv.bench.workload import Workload


class StaticCompiled(Static):
    """`StaticCache`, the forward of a decode step compiled for its shapes (mode "default").

    Two steps are tried and taken back when it is prepared: one to compile, and one that must not
    compile again, or its times would be those of the compiler.
    """

    name = "StaticCache-compiled"
    has_models_time = False
    backend: ClassVar[str] = "inductor"

    def prepare(self, workload: Workload, num_steps: int) -> None:
        super().prepare(workload, num_steps)
        # what an earlier workload compiled counts against the limit of variants of one function
        torch.compiler.reset()
        self.run = torch.compile(self.model.forward, dynamic=False, backend=self.backend)
        for stance in ("default", "fail_on_recompile"):
            try:
                with torch.compiler.set_stance(stance):
                    self.step(workload.suffixes[:, :1])
            # a missing or failing C++ compiler comes as errors of many kinds
            except Exception as error:
                cause = getattr(error, "inner_exception", error)
                first_line = next(iter(str(cause).strip().splitlines()), "")
                raise PeerAbsent(f"torch.compile: {type(cause).__name__}: {first_line}") from error
            self._take_back()

    def _take_back(self) -> None:
        """Forgets the last token of every row."""
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
        self.num_columns -= 1
