"""What devices can do that have not been measured here: fitted tables and vendors' figures."""

from hf_granikv.dispatch.roofline import DeviceConstants

BUILT_IN = "built-in table, not measured here; granikv calibrate measures this device"
_ON_PAPER = "predicted on paper, not measured"

# not measured: round figures of a data-centre card
GPU = DeviceConstants.from_peaks(
    {"float32": 60e12, "bfloat16": 400e12, "float16": 400e12},
    bandwidth_bytes_per_s=2e12,
    launch_s=5e-6,
    half_rate_rows=16.0,
    name="a data-centre GPU",
    origin=BUILT_IN,
)


def _on_paper(
    name: str, *, dense_flops_per_s: float, float32: float, bandwidth: float, link: float
) -> DeviceConstants:
    """A card as its datasheet has it; what a launch costs is a guess for torch without graphs."""
    return DeviceConstants.from_peaks(
        {"float32": float32, "bfloat16": dense_flops_per_s, "float16": dense_flops_per_s},
        bandwidth_bytes_per_s=bandwidth,
        launch_s=5e-6,
        half_rate_rows=16.0,
        link_bytes_per_s=link,
        name=name,
        origin=_ON_PAPER,
    )


# peak dense tensor-core rates (those with sparsity are twice as high), memory bandwidth, and one
# direction of NVLink
ON_PAPER: dict[str, DeviceConstants] = {
    # NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM: BF16 312 TFLOPS, FP32 19.5 TFLOPS,
    # 2,039 GB/s, NVLink 600 GB/s in both directions
    "a100": _on_paper(
        "NVIDIA A100 80GB SXM",
        dense_flops_per_s=312e12,
        float32=19.5e12,
        bandwidth=2.039e12,
        link=300e9,
    ),
    # NVIDIA H100 Tensor Core GPU datasheet, H100 SXM: BF16 1,979 TFLOPS with sparsity, FP32 67
    # TFLOPS, 3.35 TB/s, NVLink 900 GB/s in both directions
    "h100": _on_paper(
        "NVIDIA H100 SXM",
        dense_flops_per_s=989.5e12,
        float32=67e12,
        bandwidth=3.35e12,
        link=450e9,
    ),
    # NVIDIA H200 Tensor Core GPU datasheet, H200 SXM: BF16 1,979 TFLOPS with sparsity, FP32 67
    # TFLOPS, 4.8 TB/s, NVLink 900 GB/s in both directions
    "h200": _on_paper(
        "NVIDIA H200 SXM",
        dense_flops_per_s=989.5e12,
        float32=67e12,
        bandwidth=4.8e12,
        link=450e9,
    ),
}
