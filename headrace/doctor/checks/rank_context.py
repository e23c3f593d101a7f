"""What the checks on ranks share: config, device, machine, rendezvous, values of all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.doctor.check import Context
from pipeline.config.load import load_config
from pipeline.config.sections.run import Config
from pipeline.runtime.launch.rendezvous import Rendezvous
from pipeline.runtime.machines.known import machine_of_device
from pipeline.runtime.machines.machine import Machine

OWN_CONFIG = Path(__file__).with_name("own_config.json")
"""The config of a check without `--config`: a small Llama with fully sharded data parallelism."""


def config_of(context: Context) -> Config:
    """Reads the config that is checked.

    Raises:
        ConfigError: the config is invalid.
    """
    return load_config(context.config or OWN_CONFIG, context.overrides if context.config else ())


def device_here() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def machine_here(device: torch.device) -> Machine | None:
    """The known machine of a GPU; None for a CPU and for an unknown GPU."""
    return machine_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def rendezvous_here(context: Context) -> Rendezvous:
    """The rendezvous of the ranks of this check, over the store of the default process group."""
    store = dist.PrefixStore(f"doctor/{context.work}", dist.distributed_c10d._get_default_store().clone())
    store.set(f"host/{dist.get_rank()}", os.uname().nodename)
    return Rendezvous(
        dist.get_rank(), dist.get_world_size(), store, context.limit_s / 3, rank_zero_host=store.get("host/0").decode()
    )


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in their order. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
