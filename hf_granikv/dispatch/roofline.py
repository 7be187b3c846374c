"""Predicts how long a backend takes: plain arithmetic, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """What one backend has to do for one group in one layer.

    Attributes:
        flops: Multiplications and additions of the matrix products.
        bytes: Bytes moved from and to memory.
        launches: Torch operations started.
        tile_rows: Query rows that share one read of a key, per matrix product.
    """

    flops: float
    bytes: float
    launches: int
    tile_rows: int


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """What a device can do.

    Attributes:
        peak_flops_per_s: Rate of a large matrix product.
        bandwidth_bytes_per_s: Rate at which memory is read.
        launch_s: Fixed cost of one torch operation, Python included.
        half_rate_rows: Query rows at which a product reaches half its peak rate.
        efficiency: Fraction of the peak that a backend reaches; 1 where it is not named.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    launch_s: float
    half_rate_rows: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)

    @property
    def ridge_flops_per_byte(self) -> float:
        """Intensity above which arithmetic, not memory, sets the time."""
        return self.peak_flops_per_s / self.bandwidth_bytes_per_s


def predict_s(work: Work, constants: DeviceConstants, backend_name: str = "") -> float:
    """Predicts the time of one backend's work in seconds."""
    filled = work.tile_rows / (work.tile_rows + constants.half_rate_rows)
    rate = constants.peak_flops_per_s * constants.efficiency.get(backend_name, 1.0) * filled
    busy_s = max(work.flops / rate, work.bytes / constants.bandwidth_bytes_per_s)
    return work.launches * constants.launch_s + busy_s


# fitted to 52 shapes, 2 threads of an AVX2 CPU, float32 and bfloat16: the pick is within 12 % of the
# best; a launch stands for a torch operation with its share of views and thread wake-ups
CPU = DeviceConstants(
    peak_flops_per_s=130e9,
    bandwidth_bytes_per_s=18e9,
    launch_s=25e-6,
    half_rate_rows=12.0,
    efficiency={"batched_gemm": 0.6, "per_row": 0.9},
)
# not measured: round figures of a data-centre card
GPU = DeviceConstants(
    peak_flops_per_s=400e12,
    bandwidth_bytes_per_s=2e12,
    launch_s=5e-6,
    half_rate_rows=16.0,
)
CONSTANTS: Mapping[str, DeviceConstants] = {"cpu": CPU, "cuda": GPU}


def constants_for(device_type: str) -> DeviceConstants:
    """Gives the built-in constants of a device type; an unknown one counts as a GPU."""
    return CONSTANTS.get(device_type, GPU)
