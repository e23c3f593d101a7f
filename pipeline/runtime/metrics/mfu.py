"""Model FLOPs utilization (MFU), and the peak FLOP/s of devices.

Peaks are dense bf16 tensor-core rates of the machines of `pipeline.runtime.machines`, from the makers' data sheets.
There is no MFU for other devices and for CPUs.
"""

from __future__ import annotations

from pipeline.runtime.machines.known import machine_of_device


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float, devices: int = 1) -> float:
    """Computes model FLOPs utilization, a fraction: the model's FLOP/s divided by the peak of the devices.

    Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B. Recomputed activations do not count.

    Args:
        tokens_per_s: tokens per second of all devices together.
        flops_per_token: FLOPs the model spends on one token, forward and backward.
        peak_flops: dense peak of one device, FLOP/s.
        devices: number of devices.
    """
    return tokens_per_s * flops_per_token / (devices * peak_flops)


def peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Returns a device's peak FLOP/s by the name that torch reports; None if unknown.

    Only bf16 has a peak: whether an fp32 run uses tensor cores depends on settings that the name does not show.
    """
    if not bf16:
        return None
    machine = machine_of_device(device_name)
    return None if machine is None else machine.peak_flops.get("bf16")
