"""Prepares a process for its GPU: looks whether there is one, sets the allocator, binds to the cores beside it."""

from __future__ import annotations

import os
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.gpu_drivers import refuse_unusable_gpu
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch.gpu_environment import allocator_defaults
from pipeline.runtime.launch.numa import bind_beside, pci_address


def has_gpu(config: LaunchSection | None) -> bool:
    """Whether this process computes on a GPU; refuses a GPU that does not work, which is not the same as none.

    Args:
        config: the section `launch`; None for commands that have none.

    Raises:
        ConfigError: the GPU is unusable (`refuse_unusable_gpu`); or `launch.device` is cpu, too late to hide the GPUs.
    """
    import torch  # noqa: PLC0415  so that `detect` needs no torch

    if config is not None and config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries look for GPUs by themselves
        if torch.cuda.is_available():
            why = "this process has found its GPUs already"
            raise ConfigError("launch.device", "cpu", why=why, remedy="set CUDA_VISIBLE_DEVICES= in the environment")
        return False
    if torch.cuda.is_available():
        return True
    refuse_unusable_gpu(torch, key=None if config is None else "launch.device")
    return False


def set_up_allocator(*, gpu: bool) -> list[str]:
    """Sets the allocator's environment variables, before the GPU is used; returns a line for people if it did."""
    chosen = allocator_defaults(os.environ) if gpu else {}
    os.environ.update(chosen)
    return [f"{name}={value} (set {name} yourself to change it)" for name, value in chosen.items()]


def bind_to_gpu(index: int | None, config: LaunchSection) -> list[str]:
    """Binds this process to the cores beside its GPU, unless `launch.numa_bind` is false; a line for people if it did.

    Args:
        index: index of the GPU among those this process sees; None on the CPU.
        config: the section `launch`.
    """
    if index is None or not config.numa_bind:
        return []
    import torch  # noqa: PLC0415  so that `detect` needs no torch

    gpu: Any = torch.cuda.get_device_properties(index)
    address = pci_address(domain=gpu.pci_domain_id, bus=gpu.pci_bus_id, device=gpu.pci_device_id)
    bound = bind_beside(address)
    return [f"rank 0 is {bound}; likewise each rank"] if bound else []
