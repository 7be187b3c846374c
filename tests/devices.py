"""A device for tests: what they choose by does not change when a built-in table is measured anew."""

from hf_granikv.dispatch.known_devices import BUILT_IN
from hf_granikv.dispatch.roofline import DeviceConstants

# fitted to 52 shapes, 2 threads of an AVX2 CPU; a launch stands for a torch operation with its share of
# views and thread wake-ups
CPU_TABLE = DeviceConstants.from_peaks(
    {"float32": 130e9, "bfloat16": 130e9, "float16": 130e9},
    bandwidth_bytes_per_s=18e9,
    launch_s=25e-6,
    half_rate_rows=12.0,
    efficiency={"batched_gemm": 0.6, "per_row": 0.9},
    name="a CPU",
    origin=BUILT_IN,
)
