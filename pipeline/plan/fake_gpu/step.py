"""One training step of a config on the fake device, by this project's engine, as one rank of its world."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import pipeline.plan.fake_gpu.device as fake  # isort: skip  before torch

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config.batch import BatchSizes
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import AXES, Topology
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.experts import exchanges
from pipeline.engines.parallel.mesh import build_mesh
from pipeline.engines.parallel.multi_token import training_loss
from pipeline.engines.parallel.rank_model import widths_of
from pipeline.engines.sizes.expert_load import expert_load
from pipeline.engines.torch_native.single import TorchSingle
from pipeline.models.attention import attention_of
from pipeline.models.construction.initial_values import Zeros
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.plan.fake_gpu.case import StepCase
from pipeline.plan.fake_gpu.kinds import makers, modules_of, name_weights, optimizer_of, state_of, watched
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.recorder import StepRecorder
from pipeline.plan.fake_gpu.submissions import pin


@dataclass(frozen=True)
class StepReport:
    """Counts of a step on one rank.

    Attributes:
        layout: layout of the run, in words.
        collectives: rows of kind, axes, dtype, count and bytes of the whole tensors, sorted.
        host_reads: line of code -> number of reads for which the host waits at once.
        deferred_reads: line of code -> number of reads for which the host waits after beginning the next step.
        unpinned: line of code -> number of copies from pageable memory.
        flops: FLOPs of matrix products and attention.
        peak: peak of the device's memory, in bytes.
        kinds: kind -> bytes at the peak.
        parameters: elements of the weights that this rank holds between steps.
    """

    layout: str
    collectives: list[list[Any]] = field(default_factory=list)
    host_reads: dict[str, int] = field(default_factory=dict)
    deferred_reads: dict[str, int] = field(default_factory=dict)
    unpinned: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    parameters: int = 0


def run_step(case: StepCase) -> dict[str, Any]:
    """Runs a case; returns a `StepReport` as a dictionary."""
    run, model = _run_and_model(case)
    hf_config: Any = model.config
    memory = Memory(makers(), head=(hf_config.vocab_size // run.topology.tp, hf_config.hidden_size))
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(world(run.topology, case.pp_rank))
        if run.config.engine == "deepspeed":
            stack.enter_context(deepspeed_on_fake_device(rank=rank, processes=run.topology.world_size))
        mesh = build_mesh(run.topology, device_type="cuda", shard_size=run.shard_size, node=run.node_size)
        section = run.config.zero_optimization
        offloads = "cpu" in (section.offload_optimizer.device, section.offload_param.device)
        recorder = StepRecorder(
            memory,
            axes_of=lambda ranks: axes_of(run.topology, ranks),
            gloo=case.cpu,
            host=case.cpu and offloads,
        )
        with fake.fake_tensors(), watched(memory), recorder.reading_lists(), recorder.deferring_reads(), recorder:
            values = Zeros({name: parameter.shape for name, parameter in model.named_parameters()})
            objective = training_loss(run.config.loss)
            engine = build_engine(run, model, values, objective, device=torch.device("cuda", 0), mesh=mesh)
            roots = modules_of(engine)
            _route(roots, run, model)
            optimizer = optimizer_of(engine)
            held = name_weights(optimizer, roots, memory)
            if isinstance(engine, TorchSingle):
                held = sum(master.weight.numel() for master in engine._masters.values())
                memory.name(
                    [each.residual for each in engine._masters.values() if each.residual is not None], "weights"
                )
            if run.config.engine == "torch":
                engine.state()  # makes the optimizer's state, as a first step would; DeepSpeed has made its own already
            memory.name(state_of(optimizer), "optimizer")
            for number in range(1, case.steps + 1):
                batch = _batch(run.batch, number, cp=run.topology.cp, masked=run.config.data.mask_documents)
                recorder.begin()
                # in the first step, pipeline stages tell each other shapes
                recorder.forbids_reads = run.config.engine == "torch" and (number > 1 or run.topology.pp == 1)
                engine.train_step(batch, lr=1e-4)
            recorder.forbids_reads = False
            peak = memory.peak()
    rows = [[*key, *value] for key, value in sorted(recorder.collectives.items())]
    waited, deferred, copies = (
        dict(sorted(each.items())) for each in (recorder.host_reads, recorder.deferred_reads, recorder.unpinned)
    )
    return asdict(StepReport(run.layout, rows, waited, deferred, copies, recorder.flops, peak.bytes, peak.kinds, held))


def run_compiled_step(case: StepCase) -> None:
    """Runs a step of the native engine without counting, because a mode that sees operators hides compiled layers."""
    run, model = _run_and_model(case)
    hf_config: Any = model.config
    memory = Memory(makers(), head=(hf_config.vocab_size // run.topology.tp, hf_config.hidden_size))
    with world(run.topology, case.pp_rank):
        mesh = build_mesh(run.topology, device_type="cuda", shard_size=run.shard_size, node=run.node_size)
        recorder = StepRecorder(memory, axes_of=lambda ranks: axes_of(run.topology, ranks))
        with fake.fake_tensors(), watched(memory), recorder.reading_lists(), recorder.deferring_reads():
            values = Zeros({name: parameter.shape for name, parameter in model.named_parameters()})
            objective = training_loss(run.config.loss)
            with recorder:  # it leaves a model on meta alone
                engine = build_engine(run, model, values, objective, device=torch.device("cuda", 0), mesh=mesh)
            _route(modules_of(engine), run, model)
            for number in range(1, case.steps + 1):
                batch = _batch(run.batch, number, cp=run.topology.cp, masked=run.config.data.mask_documents)
                engine.train_step(batch, lr=1e-4)


def _run_and_model(case: StepCase) -> tuple[ResolvedRun, nn.Module]:
    """The run of a case and its model on meta."""
    run = case.resolved()
    tokenizer = {"vocab_size": case.vocabulary, "bos_id": 0, "eos_id": 1, "pad_id": None}
    length = run.config.data.sequence_length
    hf_config = resolve_hf_config(run.config.model, tokenizer=tokenizer, sequence_length=length)
    how: dict[str, Any] = {"attn_implementation": attention_of(run), "ahead": run.config.loss.ahead}
    model = build_meta(hf_config, dtype=model_dtype(run.config), **how)
    check_layout(run, model)
    return run, model


def _route(roots: Sequence[nn.Module], run: ResolvedRun, model: nn.Module) -> None:
    """Sets how many rows each exchange of experts returns: fake tensors have no numbers to read."""
    found = [exchange for root in roots for exchange in exchanges(root)]
    widths = widths_of(model.config) if found else None
    for exchange in found:
        exchange.imbalance = (run.imbalance or 1.0) if widths is None else expert_load(run, widths).factor


def axes_of(topology: Topology, ranks: Sequence[int]) -> str:
    """The axes along which ranks of a group differ, e.g. "dp x cp"; "world" for all ranks.

    A part of the ranks along these axes gives "ep" if it holds different experts, "edp" if it holds the same.
    """
    if len(ranks) == topology.world_size:
        return "world"
    places = [topology.coordinates(rank) for rank in ranks]
    axes = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
    if topology.ep > 1 and math.prod(topology.sizes[AXES.index(axis)] for axis in axes) > len(ranks) > 1:
        first, last = min(ranks), max(ranks)
        if last - first + 1 == len(ranks) == topology.ep:
            return "ep"
        if (last - first) % topology.ep == 0:
            return "edp"
    return " x ".join(axes) or "self"


@contextlib.contextmanager
def world(topology: Topology, pp_rank: int) -> Iterator[int]:
    """Opens a fake process group in which this process is the first rank of a pipeline stage."""
    rank = topology.rank(pp=pp_rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def _batch(batch: BatchSizes, number: int, *, cp: int, masked: bool) -> StepBatch:
    """A step's micro-batches, as the loader makes them: on the host, in page-locked memory."""
    length = batch.sequence_length
    shape = (batch.micro, length // cp)

    def micro() -> MicroBatch:
        positions = pin(torch.zeros(shape, dtype=torch.int64)) if masked else None
        documents = pin(torch.zeros(batch.micro, length, dtype=torch.int32)) if masked else None
        ids, labels = (pin(torch.zeros(shape, dtype=torch.int64)) for _ in range(2))
        return MicroBatch(ids, labels, positions, documents)

    return StepBatch(number, [micro() for _ in range(batch.accumulation)], targets=batch.tokens)


@contextlib.contextmanager
def deepspeed_on_fake_device(*, rank: int, processes: int) -> Iterator[None]:
    """Makes DeepSpeed take the fake device for CUDA within the block; the process must run only one layout.

    Two functions are replaced. Moving a model to the device where it already is cannot replace fake parameters in
    place. Comparisons of numbers between ranks have no other ranks.
    """
    launcher = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({"DS_ACCELERATOR": "cuda", **{key: str(value) for key, value in launcher.items()}})
    import deepspeed.runtime.zero.parameter_offload as offload  # noqa: PLC0415  it looks for the device at import
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator  # noqa: PLC0415
    from deepspeed.runtime.zero import utils  # noqa: PLC0415

    compared = ("assert_lst_len_same_as_other_ranks", "assert_ints_same_as_other_ranks")
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "to", _already_there))
        for module in (utils, coordinator, offload):
            for name in compared:
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_args, **_kwargs: None))
        yield


def _already_there(module: nn.Module, *_args: Any, **_kwargs: Any) -> nn.Module:
    return module
