"""The exchanges that `parallel.ep_exchange` names: torch's all-to-all, DeepEP and HybridEP, and where each works.

The packages are imported when the first layer runs, by none but a run that names them. This was reviewed against their
source, and has not run: DeepEP (github.com/deepseek-ai/DeepEP) at dd758caf, `deep_ep/buffers/elastic.py` and
`csrc/elastic/buffer.hpp`; HybridEP, its branch hybrid-ep, at 94a9f8f6, `deep_ep/hybrid_ep_buffer.py` and
`csrc/hybrid_ep/config.cuh`.

Shapes: as in `experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.base.errors import ConfigError
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.experts import AllToAll, ExpertExchange, expert_modules
from pipeline.engines.parallel.fused_exchange import FusedExchange, Handle, RowKernels

_CAPABILITY = (9, 0)
"""CUDA compute capability that both need: they are written for Hopper's instructions (TMA)."""


class DeepEP:
    """DeepEP's version 2, with one row for each of a token's experts (`do_expand`), in an order that does not vary.

    A rank adds up a token's rows before it sends them (`allow_multiple_reduction`, the default), as it has to where
    gradients of weights go with them.

    Args:
        group: the ranks.
        experts: E.
        tokens: the largest N.
    """

    dtype = torch.bfloat16

    def __init__(self, group: dist.ProcessGroup, *, experts: int, tokens: int) -> None:
        self._group, self._experts, self._tokens = group, experts, tokens
        self._made: Any = None

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """See `RowKernels.dispatch`. The host reads the counts."""
        package = _package()
        if self._made is None:
            sizes = {"num_max_tokens_per_rank": self._tokens, "hidden": hidden.shape[1], "num_topk": chosen.shape[1]}
            self._made = package.ElasticBuffer(self._group, **sizes, deterministic=True)
        rows, _, here, handle, _ = self._made.dispatch(
            hidden,
            topk_idx=chosen.to(package.topk_idx_t).contiguous(),
            topk_weights=weights,
            num_experts=self._experts,
            expert_alignment=1,
            do_expand=True,
        )
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list, device=hidden.device)
        return rows, here, counts, tuple(part for pair in vars(handle).items() for part in pair)

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        """See `RowKernels.dispatch_again`. By handle, the package computes no `num_sms` of its own."""
        record = _record(handle)
        found: Tensor = self._made.dispatch(hidden, handle=record, num_sms=record.num_sms, do_expand=True)[0]
        assert len(found) == rows, (len(found), rows)
        return found

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """See `RowKernels.combine`."""
        combined: tuple[Tensor, Tensor | None] = self._made.combine(rows, _record(handle), topk_weights=weights)[:2]
        return combined


def _record(handle: Handle) -> Any:
    """DeepEP's object of a handle."""
    record = object.__new__(_package().EPHandle)
    vars(record).update(zip(handle[::2], handle[1::2], strict=True))
    return record


class HybridEP:
    """NVIDIA's HybridEP, with its permutation of rows to experts. Every rank gives the same number of tokens.

    Args:
        group: the ranks.
        experts: E.
        tokens: the largest N.
    """

    dtype = torch.bfloat16

    def __init__(self, group: dist.ProcessGroup, *, experts: int, tokens: int) -> None:
        self._group, self._experts, self._tokens = group, experts, -(-tokens // _CHUNK) * _CHUNK
        self._local = experts // dist.get_world_size(group)
        self._made: Any = None

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """See `RowKernels.dispatch`. The host waits for the counts; tokens that fill up go to no expert."""
        if self._made is None:
            self._made = _package().HybridEPBuffer(
                group=self._group,
                hidden_dim=hidden.shape[1],
                max_num_of_tokens_per_rank=self._tokens,
                num_local_experts=self._local,
            )
        dense = weights.new_zeros(self._tokens, self._experts)
        routed = torch.zeros_like(dense, dtype=torch.bool)
        dense[: len(hidden)].scatter_(1, chosen, weights)
        routed[: len(hidden)].scatter_(1, chosen, True)
        rows, here, _, counts, record = self._made.dispatch_with_permute(
            hidden=self._filled(hidden), routing_map=routed, probs=dense, num_of_experts_per_rank=self._local
        )
        return rows, here, counts.to(hidden.device, torch.int64), (chosen, *record)

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        """See `RowKernels.dispatch_again`."""
        found: Tensor = self._made.dispatch_with_permute(
            hidden=self._filled(hidden), handle=handle[1:], num_permuted_tokens=rows
        )[0]
        return found

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """See `RowKernels.combine`."""
        chosen, *record = handle
        hidden, dense = self._made.combine_with_unpermute(hidden=rows, probs=weights, handle=tuple(record))
        count = len(chosen)
        return hidden[:count], None if weights is None else dense[:count].gather(1, chosen)

    def _filled(self, hidden: Tensor) -> Tensor:
        return F.pad(hidden, (0, 0, 0, self._tokens - len(hidden)))


_CHUNK = 64
"""HybridEP's tokens per chunk, which divide those of a rank."""


@dataclass(frozen=True)
class Package:
    """An exchange of a package.

    Attributes:
        kernels: makes the kernels from a group, `experts` and `tokens`.
        file: file of the package deep_ep that shows, without an import, whether the exchange is installed.
        install: source to install it from.
        hidden: number of which D has to be a multiple.
        experts: number of which E has to be a multiple.
        most_chosen: the largest K; None without one.
    """

    kernels: Callable[..., RowKernels]
    file: str
    install: str
    hidden: int
    experts: int = 1
    most_chosen: int | None = None


PACKAGES = {
    "deepep": Package(
        DeepEP, "buffers/elastic.py", "github.com/deepseek-ai/DeepEP, version 2.1", hidden=256, most_chosen=32
    ),
    "hybridep": Package(
        HybridEP, "hybrid_ep_buffer.py", "branch hybrid-ep of github.com/deepseek-ai/DeepEP", hidden=16, experts=4
    ),
}
"""Exchanges by `parallel.ep_exchange`; `all_to_all` is `AllToAll`."""

_KEY = "parallel.ep_exchange"


def exchange_of(run: ResolvedRun) -> Callable[..., ExpertExchange]:
    """Makes the exchanges of a model's layers, which share their kernels; called as `ExpertExchange`."""
    name, topology = expert_exchange(run.config), run.topology
    if name not in PACKAGES:
        return AllToAll
    tokens = run.batch.micro * (run.batch.sequence_length // (topology.cp * topology.tp))
    shared: dict[int, RowKernels] = {}

    def make(layer: str, group: dist.ProcessGroup, *, experts: int) -> ExpertExchange:
        if experts not in shared:
            shared[experts] = PACKAGES[name].kernels(group, experts=experts, tokens=tokens)
        return FusedExchange(layer, group, experts=experts, kernels=shared[experts])

    return make


def check_exchange(name: str, model: nn.Module, *, packages: bool = True) -> None:
    """Refuses an exchange whose package is missing, or whose kernels do not take a model's sizes.

    Args:
        name: `parallel.ep_exchange`, of a run with expert parallelism.
        model: a full Hugging Face causal language model, on any device.
        packages: whether the package has to be installed here.

    Raises:
        ConfigError: says what works.
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
    """Refuses an exchange on a device that its kernels are not for, before a process group exists.

    Raises:
        ConfigError: the device is no GPU of Hopper or later.
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


def _package() -> Any:
    """Imports the package that has both exchanges, which few machines have."""
    return import_module("deep_ep")


def _installed(file: str) -> bool:
    """Whether the package deep_ep has a file."""
    spec = find_spec("deep_ep")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / file).is_file() for folder in folders or ())
