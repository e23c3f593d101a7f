"""Peak FLOP/s of devices, for model FLOPs utilization (MFU).

Dense bf16 tensor-core rates of the machines of `pipeline.runtime.machines`, from the makers' data sheets. For a device
that is not among them, and for a CPU, no MFU is reported.
"""

from __future__ import annotations

from pipeline.runtime.machines.known import machine_of_device


def peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Peak FLOP/s of a device by the name that torch reports, or None if unknown.

    Only bf16 has an entry: whether an fp32 run uses tensor cores depends on settings that the name does not show.
    """
    if not bf16:
        return None
    machine = machine_of_device(device_name)
    return None if machine is None else machine.peak_flops.get("bf16")
