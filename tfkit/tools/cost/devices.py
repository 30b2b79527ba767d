"""The limits of devices: dense matrix products per second by type, memory, and its bandwidth.

The figures are the makers' own, without sparsity; programs reach less. float32 runs on the tensor cores only as TF32,
if torch is told to; `float32` is without, `tf32` with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The limits of one device.

    Attributes:
        name: its name in tfkit.
        title: the maker's name for it.
        driver_name: the driver's name for it; related devices with other figures have other names.
        tera_flops: 10^12 FLOPs per second of dense matrix products, by type.
        memory: bytes.
        bandwidth: bytes per second between memory and chip.
        source: where the figures are published.
    """

    name: str
    title: str
    driver_name: str
    tera_flops: Mapping[str, float]
    memory: int
    bandwidth: float
    source: str

    def flops(self, dtype: str) -> float:
        """FLOPs per second in a type; raises ValueError if the device cannot compute in it."""
        if dtype not in self.tera_flops:
            raise ValueError(f"{self.title} does not compute in {dtype}: {', '.join(self.tera_flops)}")
        return self.tera_flops[dtype] * 1e12


def _nvidia(tf32: float, half: float, fp8: float | None, fp32: float, fp64: float) -> dict[str, float]:
    more = {} if fp8 is None else {"float8": fp8}
    return {"float64": fp64, "float32": fp32, "tf32": tf32, "bfloat16": half, "float16": half} | more


DEVICES = {
    device.name: device
    for device in (
        Device(
            "a100",
            "NVIDIA A100 SXM 80 GB",
            "NVIDIA A100-SXM4-80GB",
            _nvidia(156, 312, None, 19.5, 19.5),
            80 * 10**9,
            2.039e12,
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        Device(
            "h100",
            "NVIDIA H100 SXM",
            "NVIDIA H100 80GB HBM3",
            _nvidia(494.5, 989.5, 1979, 67, 67),
            80 * 10**9,
            3.35e12,
            "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        ),
        Device(
            "h200",
            "NVIDIA H200 SXM",
            "NVIDIA H200",
            _nvidia(494.5, 989.5, 1979, 67, 67),
            141 * 10**9,
            4.8e12,
            "https://www.nvidia.com/en-us/data-center/h200/",
        ),
        Device(
            "b200",
            "NVIDIA B200 (of a DGX B200)",
            "NVIDIA B200",
            _nvidia(1100, 2250, 4500, 75, 37),
            180 * 10**9,
            8e12,
            "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
        ),
        Device(
            "l4",
            "NVIDIA L4",
            "NVIDIA L4",
            {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121, "float8": 242.5},
            24 * 10**9,
            0.3e12,
            "https://www.nvidia.com/en-us/data-center/l4/",
        ),
        Device(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            "NVIDIA GeForce RTX 4090",
            {"float64": 1.29, "float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2, "float8": 330.3},
            24 * 10**9,
            1.008e12,
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        Device(
            "mi300x",
            "AMD Instinct MI300X",
            "AMD Instinct MI300X",
            {
                "float64": 163.4,
                "float32": 163.4,
                "tf32": 653.7,
                "bfloat16": 1307.4,
                "float16": 1307.4,
                "float8": 2614.9,
            },
            192 * 10**9,
            5.3e12,
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        ),
    )
}


def device_of_driver(name: str) -> Device | None:
    """The device by its driver's name; None if its figures are not known here."""
    return next((one for one in DEVICES.values() if one.driver_name == name), None)
