"""Which constants a device has: those measured on it, or those of the nearest built-in table."""

import platform
import re
import warnings
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch

from hf_granikv.config import user_folder
from hf_granikv.dispatch.calibration_file import CalibrationFileError, read_calibration
from hf_granikv.dispatch.known_devices import BUILT_IN, GPU
from hf_granikv.dispatch.roofline import DeviceConstants
from hf_granikv.processor import has_tiles, is_avx512


def constants_for(device: str | torch.device) -> DeviceConstants:
    """Gives what a device can do: its calibration if there is one, else a built-in table.

    Read once per process, device and number of threads.

    Args:
        device: Such as `"cpu"` or `"cuda:1"`; an unknown kind counts as a GPU.
    """
    device = torch.device(device)
    return _constants(str(device), threads_of(device))


def device_name(device: torch.device) -> str:
    """Gives the name under which a device is calibrated."""
    if device.type == "cpu":
        return _cpu_name()
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def threads_of(device: torch.device) -> int:
    """Gives the number of threads that torch uses on a CPU; 0 on other devices."""
    return torch.get_num_threads() if device.type == "cpu" else 0


def calibration_path(device: torch.device) -> Path:
    """Gives the file that the calibration of a device is kept in."""
    words = [device.type, device_name(device)]
    if threads := threads_of(device):
        words.append(f"{threads} threads")
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return user_folder() / "calibration" / f"{name}.json"


def built_in_constants(device: torch.device) -> DeviceConstants:
    """Gives the table for devices of this kind, chosen by what the processor has."""
    if device.type != "cpu":
        return GPU
    if has_tiles():
        return amx_table()
    return avx512_table() if is_avx512() else avx2_table()


@lru_cache
def _constants(device_str: str, threads: int) -> DeviceConstants:
    device = torch.device(device_str)
    path = calibration_path(device)
    try:
        if not path.is_file():
            return built_in_constants(device)
        found = read_calibration(path)
        want = (device_name(device), threads, _release(torch.__version__))
        if (found.device, found.threads, _release(found.torch)) != want:
            raise CalibrationFileError(
                f"{path} is of {found.device}, {found.threads} threads, torch {found.torch}; this is "
                f"{want[0]}, {want[1]} threads, torch {torch.__version__}"
            )
    except (CalibrationFileError, OSError) as error:
        warnings.warn(
            f"{error}. A built-in table is used in its place; run granikv calibrate to measure this "
            "device anew.",
            stacklevel=2,
        )
        return built_in_constants(device)
    return found.constants


@lru_cache
def amx_table() -> DeviceConstants:
    """Gives the table of a CPU with AMX: a calibration of one, with two threads."""
    return _calibrated("amx.json", "a CPU with AMX")


@lru_cache
def avx512_table() -> DeviceConstants:
    """Gives the table of a CPU with AVX-512 and without AMX: a calibration of one, with two threads."""
    return _calibrated("avx512.json", "a CPU with AVX-512")


@lru_cache
def avx2_table() -> DeviceConstants:
    """Gives the table of other CPUs: a calibration of one whose libraries were kept to AVX2, two threads."""
    return _calibrated("avx2.json", "a CPU with AVX2")


def _calibrated(file_name: str, name: str) -> DeviceConstants:
    with resources.as_file(resources.files("hf_granikv.dispatch") / file_name) as path:
        return replace(read_calibration(path).constants, name=name, origin=BUILT_IN)


def _release(version: str) -> tuple[str, ...]:
    # a patch release keeps the kernels
    return tuple(version.split(".")[:2])


@lru_cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    model = ""
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")
    tiles = ", AMX" if has_tiles() else ""
    # under a hypervisor the model is often no more than "Xeon Processor"
    return f"{model or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}{tiles}"
