"""What a device was measured to do, as JSON: one file per device."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_granikv.dispatch.roofline import BackendCost, DeviceConstants, LineCost, RateCurve

# raised when the meaning of a number changes
FORMAT = 1


class CalibrationFileError(ValueError):
    """A file cannot be used as the calibration of a device."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants, and where they were measured.

    Attributes:
        device: Name of the device.
        threads: Threads that torch used; 0 where they do not matter.
        torch: Version of torch.
        constants: What was measured.
    """

    device: str
    threads: int
    torch: str
    constants: DeviceConstants


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes a calibration; the file appears under its name only when it is complete.

    Raises:
        OSError: If it cannot be written there.
    """
    constants = asdict(calibration.constants)
    # said anew by whoever reads the file
    del constants["name"], constants["origin"]
    content = {
        "format": FORMAT,
        "device": calibration.device,
        "threads": calibration.threads,
        "torch": calibration.torch,
        "constants": _rounded(constants),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".calibrating-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            text = json.dumps(content, indent=1)
            # a point of a curve on a line
            file.write(re.sub(r"\[\s+([^\[\],]+),\s+([^\[\],]+?)\s+\]", r"[\1, \2]", text) + "\n")
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration.

    Raises:
        CalibrationFileError: If the file is no calibration of this format, or a number in it cannot
            be.
        OSError: If there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise CalibrationFileError("it holds no table")
        if content.get("format") != FORMAT:
            raise CalibrationFileError(
                f"its format is {content.get('format')!r}, this version reads {FORMAT}"
            )
        device = str(content["device"])
        return Calibration(
            device=device,
            threads=int(content["threads"]),
            torch=str(content["torch"]),
            constants=_constants(content["constants"], device),
        )
    # json's and unicode's errors are ValueErrors
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CalibrationFileError(f"{path} cannot be used: {why}") from error


def _constants(read: Mapping[str, Any], device: str) -> DeviceConstants:
    link = read["link_bytes_per_s"]
    return DeviceConstants(
        launch_s=_number(read, "launch_s"),
        bandwidth_bytes_per_s=_number(read, "bandwidth_bytes_per_s"),
        matmul={dtype: _curve(curve) for dtype, curve in _with_float32(read["matmul"]).items()},
        merge=_line(read["merge"]),
        gather=_line(read["gather"]),
        efficiency={name: _number(read["efficiency"], name) for name in read["efficiency"]},
        costs={
            dtype: {name: _cost(cost) for name, cost in costs.items()}
            for dtype, costs in read["costs"].items()
        },
        link_bytes_per_s=None if link is None else _number(read, "link_bytes_per_s"),
        name=device,
        origin="measured by granikv calibrate",
    )


def _with_float32(matmul: Mapping[str, Any]) -> Mapping[str, Any]:
    if "float32" not in matmul:
        raise CalibrationFileError("float32 was not measured")
    return matmul


def _cost(read: Mapping[str, Any]) -> BackendCost:
    return BackendCost(
        call_s=_number(read, "call_s", at_least_zero=True),
        byte_s=_number(read, "byte_s", at_least_zero=True),
        output_s=_number(read, "output_s", at_least_zero=True),
        score_s=_number(read, "score_s", at_least_zero=True),
        rate=_curve(read["rate"]),
    )


def _line(read: Mapping[str, Any]) -> LineCost:
    return LineCost(
        _number(read, "call_s", at_least_zero=True), _number(read, "byte_s", at_least_zero=True)
    )


def _curve(read: Mapping[str, Any]) -> RateCurve:
    points = [tuple(map(float, point)) for point in read["points"]]
    rows = [point[0] for point in points if len(point) == 2]
    is_ascending = all(a < b for a, b in pairwise(rows))
    if not rows or len(rows) != len(points) or not is_ascending:
        raise CalibrationFileError(f"{points} is no curve of ascending (rows, rate) pairs")
    if not all(0 < number < float("inf") for point in points for number in point):
        raise CalibrationFileError(f"the curve {points} has a number that is not positive")
    return RateCurve(tuple((rows, rate) for rows, rate in points))


def _number(read: Mapping[str, Any], name: str, *, at_least_zero: bool = False) -> float:
    number = float(read[name])
    if not (0 < number < float("inf") or (at_least_zero and number == 0)):
        raise CalibrationFileError(f"{name} is {number}")
    return number


def _rounded(content: Any) -> Any:
    """Four digits: a measurement has no more."""
    if isinstance(content, float):
        return float(f"{content:.4g}")
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_rounded(value) for value in content]
    return content
