"""Predicts how long a backend takes: plain arithmetic, no torch."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import log

# the name, among those of backends, of attention to a row's own tokens
PRIVATE = "private tokens"
# torch operations of one merge, where it has not been measured
_MERGE_LAUNCHES = 6


@dataclass(frozen=True, slots=True)
class Work:
    """What one backend has to do for one group in one layer.

    Attributes:
        flops: Multiplications and additions of the matrix products.
        bytes: Bytes moved from and to memory, each read of the prefix counted.
        launches: Torch operations started.
        tile_rows: Query rows that share one read of a key, per matrix product.
        stored_bytes: Bytes of what is read, however often: the first time they are in no cache.
        num_scores: Scores that go through a softmax.
        num_outputs: Numbers of the result.
        comm_bytes: Bytes that each rank receives from others.
    """

    flops: float
    bytes: float
    launches: int
    tile_rows: int
    stored_bytes: float = 0.0
    num_scores: float = 0.0
    num_outputs: float = 0.0
    comm_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Rate of matrix products over the query rows that share one read of a key.

    Attributes:
        points: `(tile_rows, flops_per_s)`, rows ascending. Between two of them the time of a flop
            is linear in the logarithm of the rows, beyond the last ones it stays.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def half_at(cls, peak_flops_per_s: float, rows: float) -> "RateCurve":
        """Gives the curve that comes near a peak, and reaches half of it at so many rows."""
        tiles = [float(2**i) for i in range(14)]
        return cls(tuple((tile, peak_flops_per_s * tile / (tile + rows)) for tile in tiles))

    @property
    def peak_flops_per_s(self) -> float:
        """The highest rate."""
        return max(rate for _, rate in self.points)

    def at(self, tile_rows: float) -> float:
        """Gives the rate in flops per second."""
        points = self.points
        after = bisect_left(points, (tile_rows,))
        if after == 0 or after == len(points):
            return points[min(after, len(points) - 1)][1]
        (rows, rate), (more_rows, next_rate) = points[after - 1], points[after]
        share = log(tile_rows / rows) / log(more_rows / rows)
        return 1.0 / ((1.0 - share) / rate + share / next_rate)


@dataclass(frozen=True, slots=True)
class BackendCost:
    """What one backend was measured to cost for numbers of one dtype.

    Attributes:
        call_s: Of a call over next to nothing.
        byte_s: Per byte that is read for the first time.
        output_s: Per number of the result: packing queries, unpacking outputs.
        score_s: Per score.
        rate: Of its matrix products, later reads included.
    """

    call_s: float
    byte_s: float
    output_s: float
    score_s: float
    rate: RateCurve

    def predict_s(self, work: Work) -> float:
        """Predicts the time of some work in seconds."""
        return (
            self.call_s
            + self.byte_s * work.stored_bytes
            + self.output_s * work.num_outputs
            + self.score_s * work.num_scores
            + work.flops / self.rate.at(work.tile_rows)
        )


@dataclass(frozen=True, slots=True)
class LineCost:
    """Cost of an operation that moves bytes: a fixed part, and a part per byte, in seconds."""

    call_s: float
    byte_s: float

    def predict_s(self, num_bytes: float) -> float:
        """Predicts the time for so many bytes in seconds."""
        return self.call_s + self.byte_s * num_bytes


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """What a device can do.

    Attributes:
        launch_s: Fixed cost of one torch operation, Python included.
        bandwidth_bytes_per_s: Rate at which memory is read.
        matmul: Rate of a matrix product, by dtype; an unknown dtype counts as `"float32"`.
        merge: Of merging two partial results, over the bytes of one.
        gather: Of reading tokens through an index, over their bytes.
        efficiency: Fraction of `matmul` that a backend reaches where its cost was not measured; 1
            where it is not named.
        costs: Measured, by dtype and backend.
        link_bytes_per_s: Rate at which a rank receives from others; None on a single one.
        name: The device.
        origin: Where the numbers come from.
    """

    launch_s: float
    bandwidth_bytes_per_s: float
    matmul: Mapping[str, RateCurve]
    merge: LineCost
    gather: LineCost
    efficiency: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, BackendCost]] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    name: str = ""
    origin: str = ""

    @classmethod
    def from_peaks(
        cls,
        peaks: Mapping[str, float],
        *,
        bandwidth_bytes_per_s: float,
        launch_s: float,
        half_rate_rows: float = 0.0,
        efficiency: Mapping[str, float] | None = None,
        link_bytes_per_s: float | None = None,
        name: str = "",
        origin: str = "",
    ) -> "DeviceConstants":
        """Gives what follows from a few figures of a device.

        Args:
            peaks: Flops per second of a large matrix product, by dtype.
            bandwidth_bytes_per_s: See above, as the others.
            launch_s: Likewise.
            half_rate_rows: Query rows at which a product reaches half its peak rate.
            efficiency: Likewise.
            link_bytes_per_s: Likewise.
            name: Likewise.
            origin: Likewise.
        """
        return cls(
            launch_s=launch_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            matmul={x: RateCurve.half_at(peak, half_rate_rows) for x, peak in peaks.items()},
            # two parts are read, one is written
            merge=LineCost(_MERGE_LAUNCHES * launch_s, 3 / bandwidth_bytes_per_s),
            gather=LineCost(launch_s, 2 / bandwidth_bytes_per_s),
            efficiency=efficiency or {},
            link_bytes_per_s=link_bytes_per_s,
            name=name,
            origin=origin,
        )

    def products(self, dtype: str) -> RateCurve:
        """Gives the rate of a matrix product of this dtype."""
        return self.matmul.get(dtype) or self.matmul["float32"]

    def knows(self, backend_names: Iterable[str], dtype: str) -> bool:
        """Tells whether the cost of all these backends was measured."""
        return self.costs.get(dtype, {}).keys() >= set(backend_names)

    def unmeasured(self) -> "DeviceConstants":
        """Gives the constants without the costs of backends, to compare with a new one fairly."""
        return replace(self, costs={})


def predict_s(
    work: Work, constants: DeviceConstants, backend_name: str = "", dtype: str = "float32"
) -> float:
    """Predicts the time of one backend's work in seconds.

    Raises:
        ValueError: If bytes go between ranks and nobody has measured the link.
    """
    cost = constants.costs.get(dtype, {}).get(backend_name)
    if cost is not None:
        return cost.predict_s(work) + _comm_s(work, constants)
    rate = constants.products(dtype).at(work.tile_rows)
    rate *= constants.efficiency.get(backend_name, 1.0)
    busy_s = max(work.flops / rate, work.bytes / constants.bandwidth_bytes_per_s)
    return work.launches * constants.launch_s + busy_s + _comm_s(work, constants)


def call_s(
    work: Work, constants: DeviceConstants, backend_name: str = "", dtype: str = "float32"
) -> float:
    """Gives the part of `predict_s` that does not grow with the work."""
    cost = constants.costs.get(dtype, {}).get(backend_name)
    return work.launches * constants.launch_s if cost is None else cost.call_s


def predict_all(
    works: Mapping[str, Work], constants: DeviceConstants, dtype: str
) -> dict[str, float]:
    """Predicts the time of every backend in seconds, all of them by the same reckoning.

    Args:
        works: By backend.
        constants: Of the device. What it knows of single backends counts if it knows all of these.
        dtype: Of the stored numbers.
    """
    if not constants.knows(works, dtype):
        constants = constants.unmeasured()
    return {name: predict_s(work, constants, name, dtype) for name, work in works.items()}


def regime_of(work: Work, constants: DeviceConstants, backend_name: str, dtype: str) -> str:
    """Names what limits a backend: `"launch"`, `"compute"`, `"memory"` or `"communication"`."""
    fixed_s = call_s(work, constants, backend_name, dtype)
    if fixed_s > predict_s(work, constants, backend_name, dtype) / 2:
        return "launch"
    bounds = {
        "compute": work.flops / constants.products(dtype).peak_flops_per_s,
        "memory": work.bytes / constants.bandwidth_bytes_per_s,
        "communication": _comm_s(work, constants),
    }
    return max(bounds, key=bounds.__getitem__)


def _comm_s(work: Work, constants: DeviceConstants) -> float:
    if not work.comm_bytes:
        return 0.0
    if constants.link_bytes_per_s is None:
        raise ValueError(
            f"{work.comm_bytes:.0f} bytes go between ranks, and the rate of the link is not known of "
            f"{constants.name or 'this device'}; run granikv calibrate under torchrun with as many "
            "ranks."
        )
    return work.comm_bytes / constants.link_bytes_per_s
