"""The exchanges that `parallel.ep_exchange` can name: torch's all-to-all, DeepEP and HybridEP, and their requirements.

The kernels of DeepEP and HybridEP are in `pipeline.engines.experimental`, which only a run that names them imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from foundation.errors import ConfigError
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.experts import AllToAll, ExpertExchange, expert_modules
from pipeline.engines.parallel.fused_exchange import FusedExchange, RowKernels

_CAPABILITY = (9, 0)
"""CUDA compute capability that both packages need, since they use Hopper's instructions (TMA)."""


@dataclass(frozen=True)
class Package:
    """An exchange of a package.

    Attributes:
        kernels: class in `pipeline.engines.experimental.expert_kernels`; arguments: group, `experts`, `tokens`.
        file: file of the package deep_ep that shows, without an import, whether the exchange is installed.
        install: source from which to install the package.
        hidden: number that must divide D.
        experts: number that must divide E.
        most_chosen: the largest K; None without a limit.
    """

    kernels: str
    file: str
    install: str
    hidden: int
    experts: int = 1
    most_chosen: int | None = None


PACKAGES = {
    "deepep": Package(
        "DeepEP", "buffers/elastic.py", "github.com/deepseek-ai/DeepEP, version 2.1", hidden=256, most_chosen=32
    ),
    "hybridep": Package(
        "HybridEP", "hybrid_ep_buffer.py", "branch hybrid-ep of github.com/deepseek-ai/DeepEP", hidden=16, experts=4
    ),
}
"""Value of `parallel.ep_exchange` -> package; `all_to_all` is `AllToAll`."""

_KEY = "parallel.ep_exchange"


def exchange_of(run: ResolvedRun) -> Callable[..., ExpertExchange]:
    """Returns a function, called as `ExpertExchange`, that makes the layers' exchanges with shared kernels."""
    name, topology = expert_exchange(run.config), run.topology
    if name not in PACKAGES:
        return AllToAll
    tokens = run.batch.micro * (run.batch.sequence_length // (topology.cp * topology.tp))
    shared: dict[int, RowKernels] = {}

    def make(layer: str, group: dist.ProcessGroup, *, experts: int) -> ExpertExchange:
        if experts not in shared:
            kernels = import_module("pipeline.engines.experimental.expert_kernels")
            shared[experts] = getattr(kernels, PACKAGES[name].kernels)(group, experts=experts, tokens=tokens)
        return FusedExchange(layer, group, experts=experts, kernels=shared[experts])

    return make


def check_exchange(name: str, model: nn.Module, *, packages: bool = True) -> None:
    """Refuses an exchange whose package is missing, or whose kernels do not support a model's sizes.

    Args:
        name: `parallel.ep_exchange` in a run with expert parallelism.
        model: a full Hugging Face causal language model, on any device.
        packages: whether the package has to be installed here.

    Raises:
        ConfigError: the exchange cannot work; names one that works.
    """
    if name not in PACKAGES:
        return
    package, config = PACKAGES[name], model.config
    if packages and not _installed(package.file):
        why = f"the package deep_ep is not installed, or a version without {package.file}"
        raise ConfigError(_KEY, name, why=why, remedy=f"install it from {package.install}; all_to_all needs none")
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    if package.most_chosen is not None and chosen > package.most_chosen:
        why = f"its kernels take {package.most_chosen} experts per token, and this model has {chosen}"
        raise ConfigError(_KEY, name, why=why, remedy="use all_to_all")
    for layer, module in expert_modules(model):
        hidden = module.down_proj.shape[-1 if module.is_transposed else -2]
        sizes = ("hidden_size", hidden, package.hidden), ("experts", module.num_experts, package.experts)
        for what, size, unit in sizes:
            if size % unit:
                why = f"its kernels take multiples of {unit} {what}, and {layer} has {size}"
                raise ConfigError(_KEY, name, why=why, remedy=f"use a multiple of {unit}, or all_to_all")


def check_exchange_device(run: ResolvedRun, device: torch.device) -> None:
    """Refuses an exchange on a device that its kernels do not support, before a process group exists.

    Raises:
        ConfigError: the device is not a GPU of Hopper or later.
    """
    name = expert_exchange(run.config)
    if run.topology.ep == 1 or name not in PACKAGES:
        return
    if device.type != "cuda":
        raise ConfigError(_KEY, name, why="this machine has no GPU", remedy="use all_to_all")
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        gpu = torch.cuda.get_device_name(device)
        why = f"{gpu} has compute capability {found[0]}.{found[1]}, and its kernels need 9.0"
        raise ConfigError(_KEY, name, why=why, remedy="use all_to_all")


def _installed(file: str) -> bool:
    """Whether the package deep_ep has a file."""
    spec = find_spec("deep_ep")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / file).is_file() for folder in folders or ())
