"""Peak device memory of a training step, per rank and by kind, by closed formulas from sizes alone.

The peak is the largest of a few moments of a step; each moment is the sum of the tensors that live then.
`tests/plan/fake_gpu` checks that the formulas are within 5 % of a step executed on fake tensors. They do not include
fragmentation of the allocator, buffers of NCCL and kernels, and the CUDA context (together some GB).

Shapes are those of `rank_model`; s is the bytes per element in forward and backward passes. See also `activations`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.rules.layout import micro_batch_constraints
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.rank_model import Footprint
from pipeline.engines.sizes.activations import (
    MASTER,
    StepSizes,
    first_backward,
    head_backward,
    loss,
    received,
    stored,
    sum_of_head,
    whole_layer,
)
from pipeline.engines.sizes.zero_memory import ZeroSizes

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
UPDATE_ELEMENTS = 1 << 27
"""Number of parameters that the engine on one device updates at once (`engines.torch_native.single`)."""

MATRIX_ELEMENTS, MATRIX_COPIES = 1 << 27, 6
"""Elements in a round of Muon's exchange (`optim.matrix_exchange`), and copies of them: sent, received, whole, and
three in the iteration."""

TABLES = 2 * 4 * 8192
"""Bytes of the tables for drawing weights (`models.construction.counter`), which stay in the host's memory."""


@dataclass(frozen=True)
class Bytes:
    """Memory of a rank at one moment in bytes, by kind."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return float(sum(getattr(self, kind) for kind in KINDS))


def caveat(run: ResolvedRun) -> str | None:
    """Returns a note on known errors of the formulas for a run; None where none is known."""
    if run.topology.pp > 1 and run.config.parallel.schedule_kind.v_shaped:
        name = run.config.parallel.schedule
        return f"The formulas are too low for the first rank of {name} (34.6 GB for 53.7): headrace check --exact."
    return None


def peak_memory(
    run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0, micro: int | None = None, cpu: bool = False
) -> Bytes:
    """Computes the peak of a training step.

    Args:
        run: the resolved config.
        footprint: sizes of the run's model.
        pp_rank: rank in the pipeline.
        micro: samples per micro-batch, with the same global batch; None for the run's own.
        cpu: whether the device is a CPU; see `phases`.
    """
    moments = phases(run, footprint, pp_rank=pp_rank, micro=micro, cpu=cpu)
    return max(moments.values(), key=lambda moment: moment.total)


def phases(
    run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0, micro: int | None = None, cpu: bool = False
) -> dict[str, Bytes]:
    """Computes the bytes of each phase at its largest moment; arguments as in `peak_memory`.

    On a CPU (`cpu`) offloaded states are in the same memory, and gloo, unlike NCCL, copies the input of a
    reduce-scatter. Both count as buffers.
    """
    step = StepSizes(run, footprint.ranks[pp_rank], footprint.widths, micro or run.batch.micro, pp_rank, cpu)
    moments = {**_moments(step), **_matrices(step)}
    if not cpu:
        return moments
    beside = host_memory(run, footprint, pp_rank=pp_rank) + TABLES
    return {name: replace(each, buffers=each.buffers + beside) for name, each in moments.items()}


def host_memory(run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0) -> float:
    """Computes a rank's bytes of host memory with DeepSpeed's offload to the CPU; 0 without offload."""
    step = StepSizes(run, footprint.ranks[pp_rank], footprint.widths, run.batch.micro, pp_rank)
    return _zero(step).host if run.config.engine == "deepspeed" else 0.0


def layer_activations(run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0) -> float:
    """Computes a micro-batch's bytes for the backward pass of a decoder layer, without activation checkpointing."""
    return whole_layer(StepSizes(run, footprint.ranks[pp_rank], footprint.widths, run.batch.micro, pp_rank))


def largest_micro_batch(run: ResolvedRun, footprint: Footprint, *, memory: float, pp_rank: int = 0) -> int:
    """Finds the largest micro-batch that divides the global batch and whose peak fits `memory` bytes, or 0."""
    least, multiple = micro_batch_constraints(run.config.parallel, run.topology)
    samples = run.batch.samples // run.topology.dp

    def legal(micro: int) -> bool:
        accumulation, rest = divmod(samples, micro)
        return not rest and accumulation >= least and accumulation % multiple == 0

    def fits(micro: int) -> bool:
        return peak_memory(run, footprint, pp_rank=pp_rank, micro=micro).total <= memory

    return next((micro for micro in range(samples, 0, -1) if legal(micro) and fits(micro)), 0)


def _moments(step: StepSizes) -> dict[str, Bytes]:
    if step.run.config.engine == "deepspeed":
        return _deepspeed(step)
    if step.run.plain:
        return _plain(step)
    return _single(step) if step.run.alone else _sharded(step)


def _matrices(step: StepSizes) -> dict[str, Bytes]:
    """Muon: besides the sharded state, the sent part of every matrix, and a round of the exchange with its products."""
    rank, width = step.rank, 4 if step.cpu else 2
    if not rank.matrices:
        return {}
    held, (whole, experts) = step.held, rank.apart()
    mine = whole.matrices / step.shards + experts.matrices / step.run.expert_shards
    masters = (step.size - MASTER) * held if step.run.alone and not step.run.plain and step.size < MASTER else 0.0
    unsharded = step.size * rank.parameters if step.run.config.engine == "deepspeed" and step.stage < 3 else 0.0
    sent = width * (mine + MATRIX_COPIES * min(mine, MATRIX_ELEMENTS))
    return {
        "matrices": Bytes(
            weights=MASTER * held + masters + unsharded,
            gradients=MASTER * held,
            optimizer=step.states * held,
            buffers=sent,
        )
    }


def _single(step: StepSizes) -> dict[str, Bytes]:
    """One device (`engines.torch_native.single`): bf16 weights, and the other 16 bits of their fp32 masters."""
    rank, s, several = step.rank, step.size, step.accumulation > 1
    masters = {2: 2, 4: 0}[s] if not step.run.config.fp16.enabled else MASTER
    base = Bytes(weights=(s + masters) * rank.parameters, optimizer=step.states * rank.parameters)
    before = MASTER * rank.parameters if several else 0  # fp32 sums of earlier micro-batches
    whole = (MASTER if several else s) * rank.parameters
    at_once = min(rank.parameters, max(UPDATE_ELEMENTS, rank.largest))
    copies = at_once * (0 if s == MASTER else MASTER)
    update = replace(base, weights=base.weights + (copies if masters == 2 else 0))
    ahead = 0 if several else s * rank.head  # with several micro-batches it is already in the sum
    return {
        "loss": replace(base, gradients=before + sum_of_head(step), **loss(step)),
        "backward": replace(base, gradients=before + ahead + s * max(rank.layers), **first_backward(step)),
        "update": replace(update, gradients=whole + (0 if several else copies)),
    }


def _plain(step: StepSizes) -> dict[str, Bytes]:
    """One process: weights in s bytes with fp32 masters; all gradients in s bytes until they are added up in fp32."""
    rank, s, mixed = step.rank, step.size, step.size < MASTER
    weights = rank.parameters * (s + MASTER if mixed else MASTER)
    base = Bytes(weights=weights, optimizer=step.states * rank.parameters)
    several = step.accumulation > 1
    added = MASTER * rank.parameters if mixed and several else 0
    if mixed:  # an fp32 copy of one gradient at a time, and once of all gradients
        copied = MASTER * rank.largest if several else (MASTER - s) * rank.parameters
        accumulate = s * rank.parameters + added + copied
    else:
        accumulate = s * rank.parameters
    before = s * rank.parameters if not mixed and several else added
    return {
        "update": replace(base, gradients=accumulate),
        "loss": replace(base, gradients=before + s * rank.head, **loss(step)),
        "backward": replace(base, gradients=before + s * (rank.head + max(rank.layers)), **first_backward(step)),
    }


def _sharded(step: StepSizes) -> dict[str, Bytes]:
    """FSDP2 (`torch_native.fsdp_units`): fp32 shards; a stage gathers the next unit while it computes one.

    With expert parallelism, experts are separate units; beside them the next layer's other parameters are gathered.
    """
    rank, s, n = step.rank, step.size, step.shards
    unit, per_layer = max(rank.layers), step.stage == 3
    ahead = max(whole - own for whole, own in zip(rank.layers, rank.experts, strict=True))
    several = step.accumulation > 1
    # gradients are reduced once per step at stages 0 and 1 and in pipelines, else after every micro-batch
    once = step.stage < 2 or (step.run.topology.pp > 1 and not per_layer)
    masters, sharing = MASTER * step.held, rank.parameters / step.held
    held = MASTER * _accumulated(step) / (1 if once else sharing) if several else 0.0
    base = Bytes(weights=masters, optimizer=step.states * step.held)
    node = step.run.config.zero_optimization.zero_hpz_partition_size
    units = s * (unit + ahead * (max(rank.stage_layers) > 1))
    layers = (units if per_layer else s * sum(rank.layers)) + (s * sum(rank.layers) / node if node else 0)
    # the embedding is freed after its lookup, the head before the layers' gradients
    apart = per_layer and rank.separate
    at_loss = replace(base, weights=masters + (s * rank.head if apart else s * rank.rest + layers))
    if apart and node:
        at_loss = replace(at_loss, weights=at_loss.weights + s * sum(rank.layers) / node)
    backward = replace(base, weights=masters + layers + (0 if apart else s * rank.rest))
    # the fp32 copy of a unit's gradients lives until those of the next unit are reduced
    of_head = MASTER * rank.head * (1 + 1 / n) if rank.separate and not once else s * rank.head
    of_layer = 0 if once else MASTER * unit
    second = {"activations": first_backward(step)["activations"] - stored(step) / max(1, len(rank.layers))}
    # gathered weights are freed before their gradients are reduced
    reduced_last = rank.rest - rank.head if rank.separate else rank.rest
    reduced = MASTER * rank.parameters / (1 if once else sharing) + (s + MASTER) * reduced_last
    staged = {}
    if step.cpu and n > 1 and not once:  # gloo copies the input of a reduce-scatter
        left = stored(step) - received(step)
        left = left * (1 - 1 / max(1, len(rank.layers) * step.kept)) + received(step)
        # a tied head's gradient waits for the embedding's; the layer's own weights are already freed
        own = held + MASTER * unit * (1 + 1 / n) + (0 if rank.separate else s * rank.head)
        free = replace(backward, weights=backward.weights - s * unit)
        staged["backward, reduction on a CPU"] = replace(free, gradients=own, buffers=MASTER * unit, activations=left)
    return {
        **staged,
        "loss": replace(at_loss, gradients=held + sum_of_head(step), **loss(step)),
        "backward, head": replace(at_loss, gradients=held + sum_of_head(step) + s * rank.head, **head_backward(step)),
        "backward, last layer": replace(
            backward, gradients=held + of_head + _mlp_gradients(step), **first_backward(step)
        ),
        "backward, next layer": replace(backward, gradients=held + of_layer + _mlp_gradients(step), **second),
        "reduction": replace(base, gradients=reduced),
    }


def _accumulated(step: StepSizes) -> int:
    """Returns the number of elements with gradients of earlier micro-batches when most activations exist.

    With interleaved stages and at most as many micro-batches as pipeline ranks, all micro-batches pass the last stage
    before the backward pass of another stage.
    """
    rank, pp = step.rank, step.run.topology.pp
    if rank.stages == 1:  # a pipeline that keeps all micro-batches has most activations before the first backward pass
        return 0 if pp > 1 and step.accumulation <= step.kept else rank.parameters
    if step.accumulation > pp:
        return rank.parameters
    if step.run.config.parallel.schedule_kind.splits_backward:
        return 0  # gradients of weights are computed last
    return sum(rank.layers[len(rank.layers) - rank.stage_layers[-1] :]) + rank.head


def _mlp_gradients(step: StepSizes) -> float:
    """Returns bytes of a layer's gradients when most of its activations exist: those of the MLP's last matrix.

    Experts under expert parallelism have no gradients then; see `activations`.
    """
    w = step.widths
    if step.run.topology.ep > 1:
        return 0.0
    return step.size / 3 * max(step.rank.layers) if not w.experts else step.size * max(step.rank.layers)


def _deepspeed(step: StepSizes) -> dict[str, Bytes]:
    """ZeRO (`zero_memory`): weights in s bytes, fp32 masters and moments over the shards, gradients through buckets."""
    if step.stage == 0:
        return _plain(step)
    zero = _zero(step)
    base = Bytes(weights=zero.weights + zero.secondary, optimizer=zero.optimizer, gradients=zero.gradients)
    if step.stage == 3:
        base = replace(base, weights=base.weights + zero.gathered, buffers=zero.bucket)
        ahead = {"activations": stored(step) - received(step)}
        first = {"forward": replace(base, weights=base.weights + zero.prefetched, **ahead)}
    else:
        first = {}
    backward = replace(base, buffers=zero.bucket)
    at_loss = base
    if zero.unbucketed:  # bf16 gradients of earlier backward passes, until the step ends
        before = step.size * step.rank.parameters if step.accumulation > step.kept else 0.0
        at_loss = replace(base, gradients=base.gradients + before)
        own = before or step.size * step.rank.head + _mlp_gradients(step)
        backward = replace(base, gradients=base.gradients + own)
        last = base.gradients + step.size * step.rank.parameters
    else:  # a tied head's gradient waits for that of the embedding
        waits = 0 if step.rank.separate else step.size * step.rank.head
        backward = replace(backward, gradients=backward.gradients + waits)
        last = base.gradients
    rest = 1 - zero.reduced_share
    staged = zero.reduced if step.cpu and step.stage == 3 else 0.0
    reduction = replace(
        backward,
        gradients=last,
        buffers=backward.buffers + zero.reduced + staged,
        activations=rest * first_backward(step)["activations"],
    )
    made = sum_of_head(step) if step.chunk is not None else 0.0  # by the fused head
    if made:
        scaled = at_loss.gradients + made + step.size * step.rank.head
        first["backward, head"] = replace(at_loss, gradients=scaled, **head_backward(step))
    return {
        **first,
        "loss": replace(at_loss, gradients=at_loss.gradients + made, **loss(step)),
        "backward": replace(backward, **first_backward(step)),
        "reduction": reduction,
    }


def _zero(step: StepSizes) -> ZeroSizes:
    return ZeroSizes(step.run, step.rank, step.widths, step.size, step.held, step.states)
