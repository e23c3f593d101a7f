"""Peak FLOP/s of devices, for model FLOPs utilization (MFU).

Dense bf16 tensor-core rates from NVIDIA's data sheets (A100 2020, H100 and H200 2023, B200 2024, L40S 2023, L4 2023).
For a device that is not in the table, and for a CPU, no MFU is reported.
"""

from __future__ import annotations

import re

_BF16_DENSE_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.1,
    "L4": 121.0,
}


def peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Peak FLOP/s of a device by the name that torch reports, or None if unknown.

    Only bf16 has an entry: whether an fp32 run uses tensor cores depends on settings that the name does not show.
    """
    if not bf16:
        return None
    words = set(re.split(r"[ -]", device_name))
    if words & {"MIG", "NVL"}:  # a slice of a device, and a variant of another rate
        return None
    known = (tflops for name, tflops in _BF16_DENSE_TFLOPS.items() if set(name.split()) <= words)
    found = next(known, None)
    return None if found is None else found * 1e12
