"""One training step of a config on the fake device, by this project's engine, as one rank of its world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any

import tests.fake_gpu.device as fake  # isort: skip  before torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.torch_native import single
from pipeline.engines.torch_native.single import TorchSingle
from pipeline.models import buffers
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.meta import build_meta
from pipeline.models.values import Zeros
from pipeline.optim.small_moments import AdamWSmallMoments
from pipeline.parallel.checks import check_layout
from pipeline.parallel.mesh import build_mesh
from pipeline.parallel.vocabulary import _CrossEntropy
from pipeline.run.prepare import attention_of
from pipeline.topology import AXES, Topology
from tests.fake_gpu.attention import fused_attention
from tests.fake_gpu.cells import Case
from tests.fake_gpu.memory import Memory
from tests.fake_gpu.recorder import Recorder, pin
from tests.fake_gpu.zero import deepspeed_on_fake_device


@dataclass(frozen=True)
class Report:
    """What a step did. All figures are of one rank.

    Attributes:
        layout: in words.
        collectives: kind, axes, dtype, count, bytes of the whole tensors; sorted.
        host_reads: line -> count; the host waits.
        deferred_reads: line -> count; the host waits after it has begun the next step.
        unpinned: line of a copy from pageable memory -> count.
        flops: of matrix products and attention.
        peak: bytes.
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


def run_step(case: Case) -> dict[str, Any]:
    """Runs a case; a `Report` as a dictionary."""
    run, model = _run_and_model(case)
    hf_config: Any = model.config
    memory = Memory(_makers(), head=(hf_config.vocab_size // run.topology.tp, hf_config.hidden_size))
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(_world(run.topology, case.pp_rank))
        if run.config.engine == "deepspeed":
            stack.enter_context(deepspeed_on_fake_device(rank=rank, processes=run.topology.world_size))
        mesh = build_mesh(run, "cuda")
        recorder = Recorder(memory, axes_of=lambda ranks: axes_of(run.topology, ranks))
        with fake.fake_tensors(), _watched(memory), recorder.reading_lists(), recorder.deferring_reads(), recorder:
            values = Zeros({name: parameter.shape for name, parameter in model.named_parameters()})
            objective = CrossEntropy(z_loss=run.config.loss.z_loss)
            engine = build_engine(run, model, values, objective, device=torch.device("cuda", 0), mesh=mesh)
            roots = _modules_of(engine)
            optimizer = _optimizer_of(engine)
            held = _weights(optimizer, roots, memory)
            if isinstance(engine, TorchSingle):
                held = sum(master.weight.numel() for master in engine._masters.values())
                memory.name(
                    [each.residual for each in engine._masters.values() if each.residual is not None], "weights"
                )
            if run.config.engine == "torch":
                engine.state()  # makes the optimizer's state, which a first step would; DeepSpeed has made it
            memory.name(_state_of(optimizer), "optimizer")
            for number in range(1, case.steps + 1):
                batch = _batch(run, number)
                recorder.begin()
                engine.train_step(batch, lr=1e-4)
            peak = memory.peak()
    rows = [[*key, *value] for key, value in sorted(recorder.collectives.items())]
    waited, deferred, copies = (
        dict(sorted(each.items())) for each in (recorder.host_reads, recorder.deferred_reads, recorder.unpinned)
    )
    return asdict(Report(run.layout, rows, waited, deferred, copies, recorder.flops, peak.bytes, peak.kinds, held))


def run_compiled_step(case: Case) -> None:
    """Runs a step of a case of the native engine without counting: a mode that sees operators hides compiled ones."""
    run, model = _run_and_model(case)
    hf_config: Any = model.config
    memory = Memory(_makers(), head=(hf_config.vocab_size // run.topology.tp, hf_config.hidden_size))
    with _world(run.topology, case.pp_rank):
        mesh = build_mesh(run, "cuda")
        recorder = Recorder(memory, axes_of=lambda ranks: axes_of(run.topology, ranks))
        with fake.fake_tensors(), _watched(memory), recorder.reading_lists(), recorder.deferring_reads():
            values = Zeros({name: parameter.shape for name, parameter in model.named_parameters()})
            objective = CrossEntropy(z_loss=run.config.loss.z_loss)
            with recorder:  # which leaves a model on meta alone
                engine = build_engine(run, model, values, objective, device=torch.device("cuda", 0), mesh=mesh)
            for number in range(1, case.steps + 1):
                engine.train_step(_batch(run, number), lr=1e-4)


def _run_and_model(case: Case) -> tuple[ResolvedRun, nn.Module]:
    """The run of a case and its model on meta."""
    run = case.resolved()
    tokenizer = {"vocab_size": case.vocabulary, "bos_id": 0, "eos_id": 1, "pad_id": None}
    length = run.config.data.sequence_length
    hf_config = resolve_hf_config(run.config.model, tokenizer=tokenizer, sequence_length=length)
    model = build_meta(hf_config, dtype=model_dtype(run.config), attn_implementation=attention_of(run))
    check_layout(run, model)
    return run, model


def self_test(_case: Case) -> dict[str, Any]:
    """Makes the mistakes that a step must not make, to see that they are seen."""
    memory, topology = Memory({}, head=(1, 1)), Topology(dp=4)
    with _world(topology, 0):
        recorder = Recorder(memory, axes_of=lambda ranks: axes_of(topology, ranks))
        with fake.fake_tensors(), recorder.reading_lists(), recorder:
            recorder.begin()
            large = [torch.zeros(2**18, device="cuda") for _ in range(3)]
            try:
                mix_up = str(large[0] + torch.zeros(2**18))
            except RuntimeError as error:
                mix_up = f"{type(error).__name__}: {error}"
            peak = memory.peak().bytes
            assert bool(large[0].sum() > 0)
            large[0].sum().item()
            large.pop().cpu()
            torch.zeros(8).to("cuda", non_blocking=True)
            dist.all_reduce(torch.zeros(1024, device="cuda"))
    [counts] = recorder.collectives.values()
    reads, copies = sum(recorder.host_reads.values()), sum(recorder.unpinned.values())
    return {"mix_up": mix_up, "host_reads": reads, "unpinned": copies, "all_reduce": counts, "peak": peak}


def axes_of(topology: Topology, ranks: Sequence[int]) -> str:
    """The axes along which ranks of a group differ, e.g. "dp x cp"; "world" for all ranks."""
    if len(ranks) == topology.world_size:
        return "world"
    places = [topology.coordinates(rank) for rank in ranks]
    return " x ".join(axis for axis in AXES if len({place[axis] for place in places}) > 1) or "self"


@contextlib.contextmanager
def _world(topology: Topology, pp_rank: int) -> Iterator[int]:
    """A fake process group, in which this process is the first rank of a pipeline stage."""
    rank = topology.rank(pp=pp_rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def _batch(run: ResolvedRun, number: int) -> StepBatch:
    """A step's micro-batches, as the loader makes them: on the host, in page-locked memory."""
    batch, length = run.batch, run.batch.sequence_length
    shape = (batch.micro, length // run.topology.cp)
    masked = run.config.data.mask_documents

    def micro() -> MicroBatch:
        positions = pin(torch.zeros(shape, dtype=torch.int64)) if masked else None
        documents = pin(torch.zeros(batch.micro, length, dtype=torch.int32)) if masked else None
        ids, labels = (pin(torch.zeros(shape, dtype=torch.int64)) for _ in range(2))
        return MicroBatch(ids, labels, positions, documents)

    return StepBatch(number, [micro() for _ in range(batch.accumulation)], targets=batch.tokens)


def _modules_of(engine: Any) -> list[nn.Module]:
    found: list[nn.Module] = []
    for value in vars(engine).values():
        values = value if isinstance(value, list) else [value]
        found += [each for each in values if isinstance(each, nn.Module)]
    return found


class _Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {key: value for each in optimizers for key, value in each.state.items()}


def _optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """AdamW of an engine; ZeRO's own optimizer has it within."""
    if hasattr(engine, "_optimizer"):
        return engine._optimizer  # type: ignore[no-any-return]
    if isinstance(engine, TorchSingle):
        return _Together([update.optimizer for update in engine._updates])  # type: ignore[return-value]
    outer = engine._engine.optimizer
    return getattr(outer, "optimizer", outer)  # type: ignore[no-any-return]


def _weights(optimizer: torch.optim.Optimizer, roots: Sequence[nn.Module], memory: Memory) -> int:
    """Names weights and buffers; the number of elements of the weights."""
    weights = {id(p): p for root in roots for p in root.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    memory.name([*weights.values(), *masters], "weights")
    memory.name([buffer for root in roots for buffer in root.buffers()], "buffers")
    for weight in weights.values():
        if not isinstance(weight.data, torch.distributed.tensor.DTensor):
            # the engine's own hook may have taken it already
            weight.register_post_accumulate_grad_hook(
                lambda p: memory.name([p.grad] if p.grad is not None else [], "gradients")
            )
    return sum(p.numel() for p in masters)


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


@contextlib.contextmanager
def _watched(memory: Memory) -> Iterator[None]:
    """Attention by fused kernels; gradients are named before they are reduced or added up, and resizes followed."""
    group = _fsdp_param_group.FSDPParamGroup
    post_backward, add_gradient = group.post_backward, single._Master.add_gradient

    def named(self: Any, *args: Any) -> Any:
        with torch.no_grad():
            params = [getattr(p, "_unsharded_param", None) for p in self.fsdp_params]
            memory.name([p.grad for p in params if p is not None and p.grad is not None], "gradients")
        return post_backward(self, *args)

    def added(master: Any, weight: Tensor) -> None:
        memory.name([] if weight.grad is None else [weight.grad], "gradients")
        add_gradient(master, weight)

    group.post_backward = named  # type: ignore[method-assign]
    single._Master.add_gradient = added  # type: ignore[method-assign]
    pin_memory, torch.Tensor.pin_memory = torch.Tensor.pin_memory, pin  # type: ignore[assignment, method-assign]
    same, buffers._same = buffers._same, lambda _first, _second: True  # fakes have no values to compare
    try:
        with fused_attention(), memory.following_resizes():
            yield
    finally:
        group.post_backward = post_backward  # type: ignore[method-assign]
        single._Master.add_gradient = add_gradient  # type: ignore[method-assign]
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        buffers._same = same


def _makers() -> dict[CodeType, str]:
    """Functions whose allocations have a kind."""
    param = _fsdp_param.FSDPParam
    functions: dict[Any, str] = {
        _fsdp_collectives.foreach_all_gather: "weights",
        _fsdp_collectives.foreach_all_gather_copy_out: "weights",
        param.init_all_gather_outputs: "weights",
        param.init_unsharded_param: "weights",
        _fsdp_collectives.foreach_reduce: "gradients",
        param.to_accumulated_grad_if_needed: "gradients",
        param.accumulate_unsharded_grad_if_needed: "gradients",
        torch.optim.AdamW.step: "optimizer",
        AdamWSmallMoments.step: "optimizer",
        single._Update.run: "gradients",
        single._Master.add_gradient: "gradients",
        single._Master.values: "weights",
        _CrossEntropy.forward: "logits",
        _CrossEntropy.backward: "logits",
    }
    return {_code(function): kind for function, kind in functions.items() if function is not None}


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code
