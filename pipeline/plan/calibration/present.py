"""The machine of a plan where the command names none."""

from __future__ import annotations

import torch

from pipeline.runtime.machines.known import load_machine, machine_of_device
from pipeline.runtime.machines.machine import Machine


def present_machine(default: str) -> Machine:
    """The shipped machine of this machine's GPU; the default without a GPU, or with one that is not known."""
    found = machine_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return found or load_machine(default)
