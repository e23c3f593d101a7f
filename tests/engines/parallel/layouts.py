"""Loss and gradients of a tiny model under a layout on the processes of `ranks`, and of the full model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.config.topology import sequence_chunks
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.assemble import LocalModel, ShardedValues, assemble
from pipeline.engines.parallel.mesh import Mesh
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import InitByName, OwnBuffers
from pipeline.models.construction.rectangle import Rectangle, part
from tests.models.architectures import V, batch_of, enlarged, family_meta, gradients, meta_of, plain_decoder
from tests.sweeps.families import tiny_fields

T = 32
Z = 0.01
Borders = tuple[tuple[int, ...], ...] | None


class EnlargedValues(OwnBuffers):
    """Initial values as in the full model of the tests."""

    def __init__(self, values: InitByName) -> None:
        self._values = values

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        return part(enlarged(name, self._values.value(name)), box).to(device)


def resolved(*, world_size: int, **sections: Any) -> ResolvedRun:
    """A resolved run on the native engine; keyword arguments are sections of the config."""
    config = {
        "engine": "torch",
        "model": {"config": {"model_type": "llama", "vocab_size": V}},
        "data": {"sources": [{"path": "nowhere"}], "sequence_length": T},
        "run": {"dir": "nowhere", "steps": 1},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        **sections,
    }
    return resolve(Config.model_validate(config), world_size=world_size)


def check_family(
    kind: str, *, eager: bool = False, world_size: int = 2, fields: dict[str, Any] | None = None, **sections: Any
) -> None:
    """Checks the tiny model of a family of the sweep over families in a layout."""
    own, attention = fields or {}, "eager" if eager else "sdpa"
    model = {"config": {**tiny_fields(kind), **own}, "attn_implementation": attention}
    run = resolved(world_size=world_size, model=model, **sections)
    check_layout(run, family_meta(kind, attention="eager" if eager else ATTENTION_NAME, **own))


def full_model_gradients(name: str, borders: Borders = None, **fields: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the full model on one process."""
    decoder, batch = plain_decoder(name, **fields), batch_of(length=T, borders=borders)
    total = decoder(batch.input_ids, batch, CrossEntropy(z_loss=Z))[0]
    total.backward()
    return float(total.detach()), gradients(decoder)


def layout_gradients(
    _rank: int, name: str, sections: dict[str, Any], borders: Borders, fields: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the layout, combined over the ranks: every rank returns the full ones."""
    run = resolved(world_size=dist.get_world_size(), **sections)
    mesh = Mesh(run.topology, device_type="cpu")
    model = meta_of(name, **fields)
    local_model = assemble(run, model, mesh)
    fill_weights(local_model, model)
    micro = sequence_shard(batch_of(length=T, borders=borders), run, rank=mesh.coordinates["cp"])
    total = local_model.decoder(micro.input_ids, micro, CrossEntropy(z_loss=Z))[0]
    total.backward()
    loss = total.detach().clone()
    cp = mesh.group("cp")
    if cp is not None:
        dist.all_reduce(loss, group=cp)
    found = {n: full_gradient(n, g, local_model, cp) for n, g in gradients(local_model.decoder).items()}
    return float(loss), found


def fill_weights(local_model: LocalModel, model: nn.Module) -> None:
    """Gives this rank's part of the model its shards of the weights of `full_model_gradients`."""
    values, device = ShardedValues(EnlargedValues(InitByName(model, seed=3)), local_model), torch.device("cpu")
    fill_buffers(local_model.decoder.causal, device)
    for name in local_model.decoder.parameters_by_name():
        local_model.decoder.set_parameter(name, nn.Parameter(values.value(name)))


def sequence_shard(batch: MicroBatch, run: ResolvedRun, *, rank: int, length: int = T) -> MicroBatch:
    chunks = sequence_chunks(length, cp=run.topology.cp, cp_rank=rank, zigzag=run.zigzag)
    own = torch.tensor([position for chunk in chunks for position in chunk])
    positions = None if batch.positions is None else batch.positions[:, own]
    return MicroBatch(batch.input_ids[:, own], batch.labels[:, own], positions, batch.documents)


def full_gradient(name: str, gradient: Tensor, local_model: LocalModel, cp: dist.ProcessGroup | None) -> Tensor:
    if cp is not None:
        dist.all_reduce(gradient, group=cp)
    tensor, box = local_model.tensor, local_model.box(name)
    if tensor is None:
        return gradient
    if box is None:
        assert name in tensor.partial_gradients
        dist.all_reduce(gradient, group=tensor.group)
        return gradient
    full = torch.zeros(local_model.shapes[name])
    full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = gradient
    dist.all_reduce(full, group=tensor.group)
    return full
