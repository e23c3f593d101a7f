"""FSDP2 units: modules whose parameters are gathered in one collective, and whose gradients are reduced in one.

| unit | gathered (stage 3) | its gradients are reduced |
|---|---|---|
| the embedding | for the forward pass; the gradient of a lookup needs no weight | at the end of the backward pass |
| every decoder layer | for the forward and for the backward pass | after its own backward pass |
| the experts of a layer (expert parallelism) | as the layer, over the ranks that hold the same | as the layer |
| final norm and head | once, for both passes, which follow each other | at the start of the backward pass |
| the remaining parameters, as unit of the root module | once, for both passes | at the end of the backward pass |

If embedding and head share a weight, it stays in the root's unit: the root's first and last operations need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.models.decoder_layers import base_of
from pipeline.models.multi_token import modules_of


@dataclass(frozen=True)
class Units:
    """The FSDP2 units of a decoder except the root's, in the order of the forward pass.

    Attributes:
        embedding: the embedding; None on a stage without it, or if the head shares its weight.
        layers: decoder layers; layers that share parameters (Zamba's attention block) are one unit.
        end: head, with the norm before it; empty on a stage without a head, or if the embedding shares its weight.
        ahead: modules that predict more tokens, which an evaluation does not run. They need embedding and head, too,
            which then belong to the root's unit.
    """

    embedding: nn.Module | None
    layers: tuple[tuple[nn.Module, ...], ...]
    end: tuple[nn.Module, ...]
    ahead: tuple[nn.Module, ...] = ()

    def ordered(self) -> list[tuple[nn.Module, ...]]:
        """Returns all units, in the order of the forward pass."""
        first = () if self.embedding is None else ((self.embedding,),)
        return [*first, *self.layers, *((each,) for each in self.ahead), *((self.end,) if self.end else ())]


def units_of(causal: nn.Module) -> Units:
    """Finds the units of a Hugging Face causal language model, or of its pipeline stage, before sharding."""
    ahead = tuple(modules_of(causal))
    layers = [unit for unit in layer_units(causal) if not any(unit[0] in set(each.modules()) for each in ahead)]
    model: Any = causal
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    in_layers = {parameter for unit in layers for layer in unit for parameter in layer.parameters()}

    def of_their_own(module: Any, kind: type[nn.Module], other: Any) -> bool:
        if not isinstance(module, kind):
            return False
        others = set(other.parameters()) if isinstance(other, nn.Module) else set()
        return not (in_layers | others) & set(module.parameters())

    end = (*_norms_after_layers(causal), head) if of_their_own(head, nn.Linear, embedding) else ()
    first = embedding if of_their_own(embedding, nn.Embedding, head) else None
    if ahead:
        end, first = (), None
    return Units(first, tuple(tuple(unit) for unit in layers), end, ahead)


def layer_units(root: nn.Module) -> list[list[nn.Module]]:
    """Returns decoder layers as units; layers that share parameters are one unit, in the position of the last."""
    units: list[list[nn.Module]] = []
    for layer in _outermost_layers(root):
        own = set(layer.parameters())
        sharing = [unit for unit in units if any(own & set(each.parameters()) for each in unit)]
        units = [unit for unit in units if unit not in sharing]
        units.append([*(each for unit in sharing for each in unit), layer])
    return units


def prefetch_explicitly(root: nn.Module, units: Units) -> None:
    """Makes every unit start the all-gather of its successor before its own computation, in both passes.

    In a backward pass FSDP2 itself would gather the unit that ran before in the forward pass. With several
    micro-batches in flight (pipeline parallelism), for the first unit this is another micro-batch's last layer: in
    vain, and a race, since torch 2.13 frees the gathered weights without a wait of the stream that copies the next
    gather's input into the same memory. So the first unit names itself.

    Args:
        root: the root unit's module.
        units: the other units; all are sharded.
    """
    if units.embedding is not None and only_looks_up(units.embedding):
        _sharded(units.embedding).set_unshard_in_backward(False)
    if units.end:
        # otherwise FSDP2 keeps the all-gather's buffer to the end of the forward pass, through head and loss
        _sharded(units.end[0])._set_unshard_async_op(True)
    always = [unit for unit in units.ordered() if unit[0] not in units.ahead]
    chain = [_sharded(root), *(each for unit in always for each in _with_inner(unit))]
    for before, after in pairwise(chain):
        before.set_modules_to_forward_prefetch([after])
    chain = [each for unit in reversed(units.ordered()) for each in _with_inner(unit)]
    for before, after in pairwise(chain):
        before.set_modules_to_backward_prefetch([after])
    if chain:
        chain[-1].set_modules_to_backward_prefetch([chain[-1]])  # it is gathered already: gathers nothing


def reshard_within_node(unit: tuple[nn.Module, ...], mesh: DeviceMesh) -> None:
    """Makes a unit's weights stay sharded over a group of neighbours after the forward pass (hpZ).

    `fully_shard(reshard_after_forward=n)` of torch 2.13 makes a mesh of its own for every unit, so two process groups
    per layer (pytorch/pytorch#153302): on NCCL more memory than hpZ may take. Stages of a pipeline with different
    numbers of layers would also make different numbers of groups, which all ranks must make together.

    Args:
        unit: a unit sharded with `reshard_after_forward` True, before its first forward pass.
        mesh: `Mesh.nodes`, the same for all units.
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    state: Any = _sharded(unit[0])._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.post_forward_mesh_info = info
        for each in group.fsdp_params:
            each.post_forward_mesh_info = info
            each._init_sharded_post_forward_param_metadata(torch.empty(each._orig_size, device="meta"))


def _with_inner(unit: tuple[nn.Module, ...]) -> list[FSDPModule]:
    """Returns a unit's module and the units within it (experts), in the order in which both passes need them."""
    outer: set[object] = set(unit)
    inner = [each for module in unit for each in sharded_modules(module) if each not in outer]
    return [_sharded(unit[0]), *inner]


def only_looks_up(embedding: nn.Module) -> bool:
    """Whether an embedding has no parameter besides its weight, so that its backward pass needs none.

    The norm inside Inkling's embedding reads its weight in the backward pass; freed memory there caused SIGSEGV.
    """
    return len(list(embedding.parameters())) == 1


def sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Yields the modules of the FSDP2 units."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost_layers(child)


def _norms_after_layers(causal: nn.Module) -> list[nn.Module]:
    """Modules that transformers' plan of pipeline stages names after the layers; none without a plan."""
    base = base_of(causal)
    names = list(getattr(causal.config, "base_model_pp_plan", None) or ())
    lists = [index for index, name in enumerate(names) if isinstance(getattr(base, name, None), nn.ModuleList)]
    after = (getattr(base, name, None) for name in names[lists[-1] + 1 :]) if lists else ()
    return [module for module in after if isinstance(module, nn.Module) and any(True for _ in module.parameters())]


class UnitStates:
    """The states of the units of a root module, one set for each pass.

    A unit of FSDP2 (torch 2.13) has a state: IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD. In a unit's backward pass the
    forward hooks do nothing, since they belong to a recomputation; the end of a backward pass makes all units idle. So
    each of two overlapped passes has its own states, which are exchanged at every turn. The weights, of which there is
    one copy, have to stay gathered for both passes (stages 0 to 2).

    Args:
        root: the FSDP2 root module.
    """

    def __init__(self, root: nn.Module) -> None:
        states: Any = dict.fromkeys(module._get_fsdp_state() for module in sharded_modules(root))
        self._states = [*states, *(group for state in states for group in state._fsdp_param_groups)]
        self._grouped = [state for state in states if len(state._modules) > 1]
        self._root: Any = root
        self._waiting: dict[int, tuple[Any, ...]] = {}

    def switch(self, ending: int, following: int) -> None:
        """Stores the states of the pass whose turn ends, and restores those of the next pass."""
        context = self._root._get_fsdp_state()._state_ctx
        self._waiting[ending] = (
            [each._training_state for each in self._states],
            [set(each._modules_to_run_forward) for each in self._grouped],
            context.iter_forward_root,
        )
        states, grouped, forward_root = self._waiting.pop(following, self._idle)
        for each, state in zip(self._states, states, strict=True):
            each._training_state = state
        for each, modules in zip(self._grouped, grouped, strict=True):
            each._modules_to_run_forward.clear()
            each._modules_to_run_forward.update(modules)
        context.iter_forward_root = forward_root

    @property
    def _idle(self) -> tuple[Any, ...]:
        """Returns the states of a pass that has not begun."""
        return [TrainingState.IDLE] * len(self._states), [set()] * len(self._grouped), None
