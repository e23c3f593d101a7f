"""What the checks on ranks share: config, device, machine, rendezvous, and findings made of errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from foundation.errors import HeadraceError
from foundation.section import parse
from headrace.doctor.check import Context, Finding
from pipeline.config.load import load_config
from pipeline.config.sections.run import Config
from pipeline.runtime.launch.rendezvous import Rendezvous
from pipeline.runtime.machines.known import machine_of_device
from pipeline.runtime.machines.machine import Machine

OWN_CONFIG: Mapping[str, Any] = {
    "engine": "torch",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        }
    },
    "data": {"sources": [{"path": "replaced"}], "sequence_length": 32},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "run": {"dir": "replaced", "steps": 20},
}
"""The config of a check without `--config`: fully sharded data parallelism."""


def config_of(context: Context) -> Config:
    """Reads the config that is checked.

    Raises:
        ConfigError: the config is invalid.
    """
    if context.config is None:
        return parse(Config, OWN_CONFIG)
    return load_config(context.config, context.overrides)


def device_here() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def machine_here(device: torch.device) -> Machine | None:
    """The known machine of a GPU; None for a CPU and for an unknown GPU."""
    return machine_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def rendezvous_here(context: Context) -> Rendezvous:
    """The rendezvous of the ranks of this check, over the store of the default process group."""
    store = dist.PrefixStore(f"doctor/{context.work}", dist.distributed_c10d._get_default_store().clone())
    rank, world = dist.get_rank(), dist.get_world_size()
    store.set(f"host/{rank}", os.uname().nodename)
    store.wait(["host/0"])
    zero = store.get("host/0").decode()
    return Rendezvous(rank, world, store, context.limit_s / 3, zero)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in their order. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def failure(error: HeadraceError, meaning: str, *, where: str = "") -> Finding:
    """A failed check from an error, whose first line says what was seen and whose `try:` says what to do."""
    lines = [line.strip() for line in str(error).splitlines()]
    remedy = next(
        (line.removeprefix("try: ") for line in lines if line.startswith("try: ")), "see the log of the check"
    )
    return Finding(False, lines[0], meaning, remedy, where=where)
