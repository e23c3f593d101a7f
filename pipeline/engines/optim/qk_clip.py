"""QK-Clip: after a step, scales the queries and keys of every head whose largest attention logit was too large.

Let S be the largest logit of a key head over the step's global batch, and t the threshold. A head with S > t gets the
factor t / S, which `models.query_key_rows` divides between the weights (and biases) of its queries and keys. S is
computed with the weights before the step. Source: Kimi Team 2025, Kimi K2 (arXiv:2507.20534), section 2.1 (MuonClip).

The optimizer scales the fp32 master weights where it updates them, so that all layouts and precisions give the same
result. There is no state: the largest logits belong to one step.

Shapes: L attention modules of the full model, K key heads of the module with the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.optim.matrix_exchange import HeldShard
from pipeline.engines.parallel.mesh import Mesh
from pipeline.models.attention_logits import LARGEST
from pipeline.models.query_key_rows import HeadRows, attention_heads

_METRICS = ("largest_attention_logit", "clipped_heads")


class QkClip:
    """Largest attention logits of a step, and the scaling of weights that they cause.

    Args:
        model: the full model, on meta.
        threshold: largest logit at which a head is not clipped.
        device: this rank's device.
        tp: (size of the tp axis, this rank's coordinate on it).

    Attributes:
        rows: the parameters that may be scaled, by name.
    """

    def __init__(self, model: nn.Module, threshold: float, *, device: torch.device, tp: tuple[int, int]) -> None:
        self._threshold, self._device, (self._tp, self._tp_rank) = threshold, device, tp
        modules = attention_heads(model)
        self._modules = {each.name: (index, each.key_heads) for index, each in enumerate(modules)}
        self.rows: dict[str, HeadRows] = {}
        self._index: dict[str, int] = {}
        for index, each in enumerate(modules):
            self._index |= dict.fromkeys(each.rows, index)
            self.rows |= {
                name: replace(rows, heads=rows.heads.to(device), powers=rows.powers.to(device))
                for name, rows in each.rows.items()
            }
        self._own: list[tuple[int, Tensor]] = []
        self._largest = torch.empty((len(modules), max(each.key_heads for each in modules)), device=device)
        """Largest logits of the current step, fp32 [L, K]; after `reduce`, over all ranks."""

    def attach(self, causal: nn.Module) -> None:
        """Watches the attention modules of this rank's part of the model."""
        for name, module in causal.named_modules():
            if name in self._modules:
                index, heads = self._modules[name]
                assert heads % self._tp == 0, "refused with the layout"
                largest = torch.empty(heads // self._tp, device=self._device)
                setattr(module, LARGEST, largest)
                self._own.append((index, largest))

    def begin_step(self) -> None:
        """Resets the largest logits."""
        for _, largest in self._own:
            largest.fill_(-torch.inf)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduces the largest logits of the step's forward passes over all ranks, before the update. Collective."""
        self._largest.fill_(-torch.inf)
        for index, largest in self._own:
            self._largest[index].narrow(0, self._tp_rank * len(largest), len(largest)).copy_(largest)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)

    def scale(self, tensor: Tensor, shards: Sequence[HeldShard[HeadRows]], *, vetoed: Tensor | None) -> None:
        """Scales the queries and keys in a tensor of the optimizer, in place.

        Args:
            tensor: the optimizer's tensor, fp32, contiguous.
            shards: parts of query and key parameters in the tensor.
            vetoed: whether the step changes nothing, bool scalar; None if the step is applied.
        """
        factors = torch.where(self._clipped(vetoed), self._threshold / self._largest, 1.0)
        flat = tensor.view(-1)
        for shard in shards:
            rows, values = shard.form, flat.narrow(0, shard.offset, shard.length)
            of_module = factors[self._index[shard.name]]
            parts = NamedShard(rows.shape, start=shard.start, values=values, box=shard.box).parts
            for offsets, part in parts.items():
                first, count = offsets[rows.dim], part.shape[rows.dim]
                heads, powers = (each.narrow(0, first, count) for each in (rows.heads, rows.powers))
                shape = [-1 if dim == rows.dim else 1 for dim in range(part.ndim)]
                part.mul_(of_module[heads].pow(powers).view(shape))

    def end_step(self, *, targets: int, vetoed: Tensor | bool) -> Tensor:  # noqa: ARG002
        """Returns fp64 [2] on the device, which `parts` names. See `base.StepMeasure`."""
        kept = torch.as_tensor(vetoed, device=self._device)
        return torch.stack([self._largest.max().double(), self._clipped(kept).sum().double()])

    @staticmethod
    def parts(values: Sequence[float]) -> dict[str, float]:
        """Names the values that `end_step` returned.

        The names are `largest_attention_logit` (over all heads and the global batch, with the weights before the
        update) and `clipped_heads` (number of key heads whose weights were scaled).
        """
        return dict(zip(_METRICS, values, strict=True))

    def _clipped(self, vetoed: Tensor | None) -> Tensor:
        """Returns the heads to scale, bool [L, K]; false for a NaN logit, with which no step is applied."""
        over = self._largest > self._threshold
        return over if vetoed is None else over & ~vetoed


def make_qk_clip(
    section: OptimizerSection, model: nn.Module, *, device: torch.device, mesh: Mesh | None
) -> QkClip | None:
    """Makes the QK-Clip of a run; None for a run without QK-Clip.

    Args:
        section: the config's `optimizer`.
        model: the full model, on meta.
        device: this rank's device.
        mesh: this rank's coordinates; None for one process.
    """
    threshold = section.params.qk_clip
    if threshold is None:
        return None
    tp = (mesh.size("tp"), mesh.coordinates["tp"]) if mesh else (1, 0)
    return QkClip(model, threshold, device=device, tp=tp)


def whole_rows(parameters: Mapping[str, Tensor], clip: QkClip) -> list[tuple[Tensor, list[HeldShard[HeadRows]]]]:
    """Lists the queries and keys of a process that has all their parameters whole, for `Muon.bind_clip`."""
    return [
        (tensor, [HeldShard(name, clip.rows[name], None, 0, 0, clip.rows[name].numel)])
        for name, tensor in parameters.items()
        if name in clip.rows
    ]
