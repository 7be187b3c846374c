"""What `granikv calibrate` does: measures the device and keeps the result for every later run."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.backends import BACKENDS
from hf_granikv.backends.base import Attend, private_work
from hf_granikv.backends.per_row import PerRowBackend
from hf_granikv.config import check_out
from hf_granikv.dispatch.calibration import LayerRun, calibrate, measured_link
from hf_granikv.dispatch.calibration_file import Calibration, write_calibration
from hf_granikv.dispatch.device_constants import calibration_path
from hf_granikv.dispatch.roofline import PRIVATE, Work
from hf_granikv.dispatch.stopwatch import Run
from hf_granikv.disturbance import Disturbance
from hf_granikv.kernels.decode_attention import (
    DecodeAttention,
    GroupStates,
    Segment,
    unsupported_reasons,
)
from hf_granikv.kernels.merge_states import merge_states
from hf_granikv.kernels.suffix_attention import suffix_attention
from hf_granikv.views import AttentionState, GroupShape, PrivateTokens

# rows of the table: one, a few, and many query rows that share a read
_SHOWN_TILES = (1, 8, 64, 512)


def usable_device(name: str | None) -> torch.device:
    """Gives the device of this name; None takes the accelerator if there is one, else the CPU.

    Raises:
        ValueError: If it cannot be used.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    # a build without the device asserts
    except (AssertionError, RuntimeError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"--device {name} cannot be used here ({first_line}); give cpu, or leave it out."
        ) from error
    return device


def run_calibration(device: torch.device, budget_s: float, out: str | None) -> list[str]:
    """Measures a device and writes its file; under torchrun, the link between the ranks as well.

    Where other processes had the processors meanwhile, only a file that was asked for is written.

    Args:
        device: The device.
        budget_s: Seconds to spend, about.
        out: File to write; None for the one that is read automatically.

    Returns:
        The report, a fact a line; nothing on ranks after the first, which only answer it.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If there is no folder for it, or it is one.
    """
    if out is not None:
        check_out(out)
    start = time.perf_counter()
    link, has_ranks = None, int(os.environ.get("WORLD_SIZE", "1")) > 1
    if has_ranks:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        torch.distributed.init_process_group()
        link = measured_link(device)
    report: list[str] = []
    if not has_ranks or torch.distributed.get_rank() == 0:
        disturbance = Disturbance()
        calibration = calibrate(
            device,
            backends={**BACKENDS, PerRowPath.name: PerRowPath(), PRIVATE: PrivatePath()},
            merging=merging,
            anyway={PerRowPath.name: pass_alone},
            budget_s=budget_s,
            link_bytes_per_s=link,
        )
        disturbed, lasted = disturbance.described(), time.perf_counter() - start
        taken = f"measured in {lasted:.0f} s"
        path = calibration_path(device) if out is None else Path(out)
        report = _described(calibration)
        if disturbed:
            report.append(disturbed)
        if disturbed and out is None:
            report.append(
                f"{taken}, not saved; --out {path} keeps it all the same, for later runs."
            )
        else:
            write_calibration(path, calibration)
            used = ", which is used from now on" if out is None else ""
            report.append(f"{taken}, saved as {path}{used}")
    if has_ranks:
        # the others wait, so that they do not run beside what is measured
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return report


class PrivatePath:
    """Attention of rows to private tokens, as a decode step has it, in the place of a backend.

    The tokens of a prefix are dealt out to the rows.
    """

    def unsupported_reasons(self, shape: GroupShape) -> list[str]:
        """Refuses what no decode step asks for."""
        if shape.q_len > 1 or shape.prefix_len < shape.num_rows:
            return ["it takes one query per row, and a token for each"]
        return []

    def work(self, shape: GroupShape) -> Work:
        """Counts one read of each row's own."""
        return private_work(shape._replace(prefix_len=shape.prefix_len // shape.num_rows))

    def planned(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None
    ) -> LayerRun:
        """Gives the compiled pass, or torch where there is none."""
        num_rows, length = len(query), keys.shape[1] // len(query)
        step = _pass_over(length, query, keys, values, scale=scale)
        if step is not None:
            return partial(step.run, states=[])

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> object:
            dealt = (t[:, : num_rows * length] for t in (keys, values))
            tokens = [t.unflatten(1, (num_rows, length)).transpose(0, 1) for t in dealt]
            return suffix_attention(query, *tokens, scale=scale, mask=None)

        return attend


class PerRowPath(PerRowBackend):
    """The plain path as a decode step has it: within the compiled pass where there is one."""

    def planned(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None,
        rows: NDArray[np.int64] | None = None,
    ) -> Attend:
        """Gives a pass over the prefix, and nothing that is the rows' own."""
        assert rows is None, "what is measured is a whole batch"
        num_tokens = keys.shape[1]
        step = _pass_over(0, query, keys, values, scale=scale, num_segment_tokens=[num_tokens])
        if step is None:
            return super().planned(query, keys, values, scale=scale, softcap=softcap)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Any:
            return step.run(query, keys, values, [], segments=[Segment(keys, values, None)])

        return Attend(attend)


def pass_alone(query: Tensor, keys: Tensor, values: Tensor) -> LayerRun | None:
    """Gives the compiled pass without the prefix; None where there is none."""
    step = _pass_over(0, query, keys, values, scale=1.0)
    return None if step is None else partial(step.run, states=[])


def _pass_over(
    length: int, query: Tensor, keys: Tensor, values: Tensor, **options: Any
) -> DecodeAttention | None:
    """The compiled pass over so many tokens of each row, row after row; None where there is none."""
    num_rows = len(query)
    slots = np.arange(num_rows * max(1, length)).reshape(num_rows, -1)
    private = PrivateTokens((keys, values), slots, length, lambda: (keys, values))
    if unsupported_reasons(query, private):
        return None
    return DecodeAttention(query, private, np.tile([0, length], (num_rows, 1)), **options)


def merging(state: AttentionState) -> tuple[Run, Run]:
    """Gives two runs that differ in one merge of a state: within the compiled pass where there is one.

    Args:
        state: out `[rows, num_kv_heads, 1, head_dim]` and lse `[rows, num_kv_heads, 1]`.
    """
    num_rows, num_heads, _, head_dim = state.out.shape
    keys = torch.randn(num_heads, num_rows, head_dim, device=state.out.device)
    attend = _pass_over(1, state.out, keys, keys, scale=1.0)
    if attend is None:
        return lambda: None, partial(merge_states, [state, state])
    group = GroupStates(state.out[None], state.lse[None], None)
    run = partial(attend.run, state.out, keys, keys)
    return partial(run, []), partial(run, [group])


def _described(calibration: Calibration) -> list[str]:
    found = calibration.constants
    threads = f", {calibration.threads} threads" if calibration.threads else ""
    lines = [
        f"{calibration.device}{threads}, torch {calibration.torch}",
        f"launch         {1e6 * found.launch_s:.1f} us",
        f"reading        {found.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
        f"merging        {1e6 * found.merge.call_s:.0f} us + {_gb_per_s(found.merge.byte_s)}",
        f"gathering      {1e6 * found.gather.call_s:.0f} us + {_gb_per_s(found.gather.byte_s)}",
    ]
    if found.link_bytes_per_s is not None:
        lines.append(f"between ranks  {found.link_bytes_per_s / 1e9:.2f} GB/s")
    heads = "".join(f"{tile:>8}" for tile in _SHOWN_TILES)
    lines.append(f"\n{'GFLOP/s at so many query rows':<32}{heads}{'a call':>12}")
    for dtype, products in found.matmul.items():
        rates = "".join(f"{products.at(tile) / 1e9:>8.0f}" for tile in _SHOWN_TILES)
        lines.append(f"{dtype + ', matrix product':<32}{rates}")
        for name, cost in found.costs.get(dtype, {}).items():
            rates = "".join(f"{cost.rate.at(tile) / 1e9:>8.0f}" for tile in _SHOWN_TILES)
            lines.append(f"{'  ' + name:<32}{rates}{1e6 * cost.call_s:>9.0f} us")
    return lines


def _gb_per_s(byte_s: float) -> str:
    return f"{1e-9 / byte_s:.1f} GB/s" if byte_s else "nothing per byte"
