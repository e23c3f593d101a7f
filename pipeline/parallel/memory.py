"""Peak device memory of a training step, per rank and by kind, by closed formulas from sizes alone.

The peak is the largest of a few moments of a step, each a sum of what lives then; `tests/fake_gpu` holds the formulas
to within 5 % of a step that is executed on fake tensors. Not in it: what the allocator loses to fragmentation, NCCL's
and the kernels' own buffers, and the CUDA context (together some GB).

Shapes as in `rank_model`; s bytes per element in forward and backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.layout_rules import micro_batch_constraints
from pipeline.config.rules import ResolvedRun
from pipeline.parallel.assemble import DISTILLATION_CHUNK
from pipeline.parallel.rank_model import Footprint, RankModel, Widths
from pipeline.parallel.zero_memory import ZeroSizes

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
UPDATE_ELEMENTS = 1 << 27
"""Parameters that the engine on one device updates at once (`engines.torch_native.single`)."""

TABLES = 2 * 4 * 8192
"""Bytes of the tables by which weights are drawn (`models.counter`), which stay in the host's memory."""

_MASTER = 4
"""Bytes per element of fp32 master weights."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank at one moment, by kind."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """In all."""
        return float(sum(getattr(self, kind) for kind in KINDS))


@dataclass(frozen=True)
class _Step:
    """What the formulas need of a run."""

    run: ResolvedRun
    rank: RankModel
    widths: Widths
    micro: int
    pp_rank: int
    cpu: bool = False

    @property
    def size(self) -> int:
        """s."""
        return 2 if self.run.config.bf16.enabled or self.run.config.fp16.enabled else 4

    @property
    def states(self) -> float:
        """Bytes per parameter of optimizer states."""
        section = self.run.config.optimizer
        return len(section.kind.states) * section.moments_bytes

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.run.config.zero_optimization.stage

    @property
    def shards(self) -> int:
        """Ranks that share optimizer states."""
        topology = self.run.topology
        data = topology.dp * topology.cp
        return 1 if self.stage == 0 else self.run.config.parallel.hybrid_shard_size or data

    @property
    def chunk(self) -> int | None:
        """Positions of each sample whose logits exist at a time; see `assemble.loss_chunk`."""
        config = self.run.config
        distils = config.distill is not None and not self.run.plain
        return config.loss.chunk or (DISTILLATION_CHUNK if distils else None)

    @property
    def tokens(self) -> int:
        """B T."""
        return self.micro * self.run.batch.sequence_length // self.run.topology.cp

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return -(-self.run.batch.samples // (self.run.topology.dp * self.micro))

    @property
    def waiting(self) -> int:
        """Micro-batches of zero bubble whose I (gradients of inputs) is done and whose W (of weights) is not."""
        config = self.run.config
        if config.engine != "torch" or self.run.topology.pp == 1 or config.parallel.schedule != "zero_bubble":
            return 0
        return min(self.accumulation - 1, self.pp_rank)

    @property
    def kept(self) -> float:
        """Micro-batches, of all layers of this rank, whose activations live at one time.

        1F1B begins with as many forward passes as there are stages after this one, interleaved 1F1B with those of
        2 (stages after) + (virtual stages - 1) pp chunks, pp of one virtual stage after pp of the one before. Source:
        Narayanan et al. 2021 (arXiv:2104.04473), 2.2. Zero bubble keeps those of a micro-batch until its W, on every
        rank as many as 1F1B on the first: Qi et al. 2023 (arXiv:2401.10241), 2.3, ZB-H1.
        """
        topology, accumulation = self.run.topology, self.accumulation
        if topology.pp == 1:
            return 1
        if self.run.config.parallel.schedule == "gpipe":
            return accumulation
        if self.run.config.parallel.schedule == "zero_bubble":
            return min(accumulation, topology.pp)
        after, virtual = topology.pp - self.pp_rank - 1, self.rank.stages
        if virtual == 1:
            return min(accumulation, after + 1)
        passes = range(2 * after + (virtual - 1) * topology.pp + 1)
        layers = sum(self.rank.stage_layers[(number // topology.pp) % virtual] for number in passes)
        return min(accumulation, layers / max(1, len(self.rank.layers)))


def peak_memory(
    run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0, micro: int | None = None, cpu: bool = False
) -> Bytes:
    """The peak of a training step.

    Args:
        run: the resolved config.
        footprint: sizes of its model.
        pp_rank: which rank of the pipeline.
        micro: samples per micro-batch, of the same global batch; the run's own when None.
        cpu: see `phases`.
    """
    moments = phases(run, footprint, pp_rank=pp_rank, micro=micro, cpu=cpu)
    return max(moments.values(), key=lambda moment: moment.total)


def phases(
    run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0, micro: int | None = None, cpu: bool = False
) -> dict[str, Bytes]:
    """Phase -> what lives at its largest moment; the arguments are those of `peak_memory`.

    On a CPU (`cpu`) offloaded states are in the same memory, and gloo copies the input of a reduce-scatter, which NCCL
    does not; both are among the buffers.
    """
    step = _Step(run, footprint.ranks[pp_rank], footprint.widths, micro or run.batch.micro, pp_rank, cpu)
    moments = _moments(step)
    beside = host_memory(run, footprint, pp_rank=pp_rank) + TABLES if cpu else 0.0
    return {name: replace(each, buffers=each.buffers + beside) for name, each in moments.items()}


def host_memory(run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0) -> float:
    """Bytes of host memory of a rank under DeepSpeed's offload to the CPU; 0 without."""
    step = _Step(run, footprint.ranks[pp_rank], footprint.widths, run.batch.micro, pp_rank)
    return _zero(step).host if run.config.engine == "deepspeed" else 0.0


def layer_activations(run: ResolvedRun, footprint: Footprint, *, pp_rank: int = 0) -> float:
    """Bytes that the backward pass of one decoder layer needs of a micro-batch, without activation checkpointing."""
    return _whole_layer(_Step(run, footprint.ranks[pp_rank], footprint.widths, run.batch.micro, pp_rank))


def largest_micro_batch(run: ResolvedRun, footprint: Footprint, *, memory: float, pp_rank: int = 0) -> int:
    """The largest micro-batch that divides the global batch and whose peak fits so many bytes; 0 if none does."""
    least, multiple = micro_batch_constraints(run.config, run.topology)
    samples = run.batch.samples // run.topology.dp

    def legal(micro: int) -> bool:
        accumulation, rest = divmod(samples, micro)
        return not rest and accumulation >= least and accumulation % multiple == 0

    def fits(micro: int) -> bool:
        return peak_memory(run, footprint, pp_rank=pp_rank, micro=micro).total <= memory

    return next((micro for micro in range(samples, 0, -1) if legal(micro) and fits(micro)), 0)


def _moments(step: _Step) -> dict[str, Bytes]:
    if step.run.config.engine == "deepspeed":
        return _deepspeed(step)
    if step.run.plain:
        return _plain(step)
    return _single(step) if step.run.alone else _sharded(step)


def _single(step: _Step) -> dict[str, Bytes]:
    """One device (`engines.torch_native.single`): bf16 weights and the 16 bits that they lack of their fp32 masters."""
    rank, s, several = step.rank, step.size, step.accumulation > 1
    masters = {2: 2, 4: 0}[s] if not step.run.config.fp16.enabled else _MASTER
    base = Bytes(weights=(s + masters) * rank.parameters, optimizer=step.states * rank.parameters)
    before = _MASTER * rank.parameters if several else 0  # fp32 sums of the micro-batches before
    whole = (_MASTER if several else s) * rank.parameters
    at_once = min(rank.parameters, max(UPDATE_ELEMENTS, rank.largest))
    copies = at_once * (0 if s == _MASTER else _MASTER)
    update = replace(base, weights=base.weights + (copies if masters == 2 else 0))
    ahead = 0 if several else s * rank.head  # of several micro-batches it is in the sum by then
    return {
        "loss": replace(base, gradients=before + _sum_of_head(step), **_loss(step)),
        "backward": replace(base, gradients=before + ahead + s * max(rank.layers), **_first_backward(step)),
        "update": replace(update, gradients=whole + (0 if several else copies)),
    }


def _plain(step: _Step) -> dict[str, Bytes]:
    """One process: weights in s bytes with fp32 masters, all gradients in s bytes before they are added up in fp32."""
    rank, s, mixed = step.rank, step.size, step.size < _MASTER
    weights = rank.parameters * (s + _MASTER if mixed else _MASTER)
    base = Bytes(weights=weights, optimizer=step.states * rank.parameters)
    several = step.accumulation > 1
    added = _MASTER * rank.parameters if mixed and several else 0
    if mixed:  # an fp32 copy of one gradient at a time, and of all once
        copied = _MASTER * rank.largest if several else (_MASTER - s) * rank.parameters
        accumulate = s * rank.parameters + added + copied
    else:
        accumulate = s * rank.parameters
    before = s * rank.parameters if not mixed and several else added
    return {
        "update": replace(base, gradients=accumulate),
        "loss": replace(base, gradients=before + s * rank.head, **_loss(step)),
        "backward": replace(base, gradients=before + s * (rank.head + max(rank.layers)), **_first_backward(step)),
    }


def _sharded(step: _Step) -> dict[str, Bytes]:
    """FSDP2 (`engines.torch_native.units`): fp32 shards; a stage gathers one unit ahead of the one it computes."""
    rank, s, n = step.rank, step.size, step.shards
    unit, per_layer = max(rank.layers), step.stage == 3
    several = step.accumulation > 1
    # gradients are reduced once per step by stage 0 and in pipelines, else after every micro-batch
    once = step.stage < 2 or (step.run.topology.pp > 1 and not per_layer)
    masters = _MASTER * rank.parameters / n
    held = _MASTER * _accumulated(step) / (1 if once else n) if several else 0.0
    base = Bytes(weights=masters, optimizer=step.states * rank.parameters / n)
    node = step.run.config.zero_optimization.zero_hpz_partition_size
    units = s * unit * min(2, max(rank.stage_layers))
    layers = (units if per_layer else s * sum(rank.layers)) + (s * sum(rank.layers) / node if node else 0)
    # the embedding is freed after its lookup, the head before the layers' gradients
    apart = per_layer and rank.separate
    at_loss = replace(base, weights=masters + (s * rank.head if apart else s * rank.rest + layers))
    if apart and node:
        at_loss = replace(at_loss, weights=at_loss.weights + s * sum(rank.layers) / node)
    backward = replace(base, weights=masters + layers + (0 if apart else s * rank.rest))
    # the fp32 copy of a unit's gradients lives until those of the next unit are reduced
    of_head = _MASTER * rank.head * (1 + 1 / n) if rank.separate and not once else s * rank.head
    of_layer = 0 if once else _MASTER * unit
    second = {"activations": _first_backward(step)["activations"] - _stored(step) / max(1, len(rank.layers))}
    # gathered weights are freed before their gradients are reduced
    reduced_last = rank.rest - rank.head if rank.separate else rank.rest
    reduced = _MASTER * rank.parameters / (1 if once else n) + (s + _MASTER) * reduced_last
    staged = {}
    if step.cpu and n > 1 and not once:  # gloo copies the input of a reduce-scatter
        left = _stored(step) - _received(step)
        left = left * (1 - 1 / max(1, len(rank.layers) * step.kept)) + _received(step)
        # a tied head's gradient waits for that of the embedding; the layer's own weights are free by then
        own = held + _MASTER * unit * (1 + 1 / n) + (0 if rank.separate else s * rank.head)
        free = replace(backward, weights=backward.weights - s * unit)
        staged["backward, reduction on a CPU"] = replace(free, gradients=own, buffers=_MASTER * unit, activations=left)
    return {
        **staged,
        "loss": replace(at_loss, gradients=held + _sum_of_head(step), **_loss(step)),
        "backward, head": replace(at_loss, gradients=held + _sum_of_head(step) + s * rank.head, **_head_backward(step)),
        "backward, last layer": replace(
            backward, gradients=held + of_head + _mlp_gradients(step), **_first_backward(step)
        ),
        "backward, next layer": replace(backward, gradients=held + of_layer + _mlp_gradients(step), **second),
        "reduction": replace(base, gradients=reduced),
    }


def _accumulated(step: _Step) -> int:
    """Elements whose gradients of the micro-batches before are there when most activations are.

    Of interleaved stages all micro-batches, if there are no more than stages, pass the last one before another one's
    backward pass.
    """
    rank, pp = step.rank, step.run.topology.pp
    if rank.stages == 1:  # a pipeline that keeps all micro-batches has most before the first one's backward pass
        return 0 if pp > 1 and step.accumulation <= step.kept else rank.parameters
    if step.accumulation > pp:
        return rank.parameters
    if step.run.config.parallel.schedule == "zero_bubble":
        return 0  # gradients of weights come last
    return sum(rank.layers[len(rank.layers) - rank.stage_layers[-1] :]) + rank.head


def _mlp_gradients(step: _Step) -> float:
    """Gradients of a layer that exist when most of its activations do: of the MLP, the last of its three matrices."""
    w = step.widths
    return step.size / 3 * max(step.rank.layers) if not w.experts else step.size * max(step.rank.layers)


def _deepspeed(step: _Step) -> dict[str, Bytes]:
    """ZeRO (`zero_memory`): weights in s bytes, fp32 masters and moments over the shards, gradients through buckets."""
    if step.stage == 0:
        return _plain(step)
    zero = _zero(step)
    base = Bytes(weights=zero.weights + zero.secondary, optimizer=zero.optimizer, gradients=zero.gradients)
    if step.stage == 3:
        base = replace(base, weights=base.weights + zero.gathered, buffers=zero.bucket)
        ahead = {"activations": _stored(step) - _received(step)}
        first = {"forward": replace(base, weights=base.weights + zero.prefetched, **ahead)}
    else:
        first = {}
    backward = replace(base, buffers=zero.bucket)
    at_loss = base
    if zero.unbucketed:  # gradients in bf16 of the backward passes before, until the step ends
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
        activations=rest * _first_backward(step)["activations"],
    )
    made = _sum_of_head(step) if step.chunk is not None else 0.0  # by the fused head
    if made:
        scaled = at_loss.gradients + made + step.size * step.rank.head
        first["backward, head"] = replace(at_loss, gradients=scaled, **_head_backward(step))
    return {
        **first,
        "loss": replace(at_loss, gradients=at_loss.gradients + made, **_loss(step)),
        "backward": replace(backward, **_first_backward(step)),
        "reduction": reduction,
    }


def _zero(step: _Step) -> ZeroSizes:
    return ZeroSizes(step.run, step.rank, step.widths, step.size, step.shards, step.states)


def _loss(step: _Step) -> dict[str, float]:
    """At the loss: all activations; logits in s bytes with fp32 exponentials.

    Fused with the head, the gradient of a chunk's logits too, and of all rows the hidden states, their
    gradient, and what the final norm keeps: an fp32 copy, and the normalized one.
    """
    rows, each, beside = step.tokens, step.size + _MASTER, 0.0
    chunk, run = step.chunk, step.run
    if chunk is not None:
        rows = step.micro * min(chunk, rows // step.micro)
        each += step.size
        kept = (_MASTER + step.size) / run.topology.tp + 2 * step.size
        beside = step.tokens * step.widths.hidden * kept if step.rank.last else 0.0
    columns = step.widths.vocabulary / step.run.topology.tp if step.rank.last else 0
    return {"activations": _stored(step) + beside, "logits": rows * columns * each}


def _head_backward(step: _Step) -> dict[str, float]:
    """When the gradients that the fused head made are scaled: all activations, and the hidden states' gradient."""
    tokens = step.tokens if step.rank.last else 0
    return {"activations": _loss(step)["activations"] + step.size * tokens * step.widths.hidden}


def _first_backward(step: _Step) -> dict[str, float]:
    """In the backward pass of the last layer: what is stored, what is recomputed, and the gradients of the MLP."""
    return {"activations": _stored(step) + _recomputed(step) + _backward_buffers(step)}


def _sum_of_head(step: _Step) -> float:
    """The head's gradient, made at the loss: of several chunks an fp32 sum (`parallel.fused_head`)."""
    chunk = step.chunk
    several = chunk is not None and chunk * step.micro < step.tokens
    return step.rank.head * (_MASTER if several else step.size)


def _stored(step: _Step) -> float:
    """Activations of all layers that live when the backward pass begins."""
    memory = step.run.config.memory
    each = {"none": _whole_layer, "full": _layer_input, "selective": _selected}[memory.activation_checkpointing](step)
    layers = len(step.rank.layers)
    count = -(-layers // memory.every_n_layers)
    kept = step.kept * (count * each + (layers - count) * _whole_layer(step))
    return _received(step) + kept + step.waiting * _between_passes(step)


def _between_passes(step: _Step) -> float:
    """Gradients that zero bubble keeps from a micro-batch's I to its W: of the outputs of matrix products and norms.

    Per layer: of gate and up, of query, key and value, four of hidden states, and two in fp32 of the norms; and those
    of the logits. Source: the storages at the peak of the last stage.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    inner = (w.experts or 1) * 2 * w.intermediate
    layer = s * ((inner + w.query + 2 * w.key_value) / tp + 4 * w.hidden) + 2 * _MASTER * w.hidden / tp
    logits = s * w.vocabulary / tp if step.rank.last else 0
    return step.tokens * (len(step.rank.layers) * layer + logits)


def _received(step: _Step) -> float:
    """Buffers of a pipeline: torch's stages have one for every micro-batch, for hidden states and for gradients."""
    rank = step.rank
    if step.run.topology.pp == 1 or step.run.config.engine != "torch":
        return 0.0
    borders = 2 * rank.stages - int(rank.first) - int(rank.last)
    return step.accumulation * borders * _layer_input(step)


def _recomputed(step: _Step) -> float:
    """The layer that is computed again for its backward pass."""
    mode = step.run.config.memory.activation_checkpointing
    if mode == "none":
        return 0.0
    return _whole_layer(step) - (_selected(step) if mode == "selective" else _layer_input(step))


def _layer_input(step: _Step) -> float:
    return step.size * step.widths.hidden * step.tokens / step.run.topology.tp


def _whole_layer(step: _Step) -> float:
    """What a layer's backward pass needs, eager: norms (an fp32 copy, normalized, scaled), attention, MLP."""
    w, s, tp = step.widths, step.size, step.run.topology.tp
    norms = 2 * w.hidden * ((_MASTER + s) / tp + s)
    if w.head_norms:
        norms += (w.query + w.key_value) * (_MASTER + s) / tp
    # fused attention in fp32 takes as many heads of keys and values as of queries
    key_value = w.query if s == _MASTER else w.key_value
    outputs = 2 if step.run.topology.cp > 1 else 1  # of all positions, and of this rank's
    attention = ((1 + outputs) * w.query + 2 * key_value) * s / tp + _MASTER * w.heads / tp
    # of every chosen expert: its input, gate and up, their activation and product, and its output
    experts = w.experts * (2 * w.hidden + 4 * w.intermediate) * s
    mlp = experts or 4 * w.intermediate * s / tp
    return step.tokens * (norms + attention + mlp)


def _selected(step: _Step) -> float:
    """Selective checkpointing: outputs of matrix products and of attention, and the layer's input."""
    w, s, tp = step.widths, step.size, step.run.topology.tp
    products = (w.query + 2 * w.key_value + 2 * w.intermediate) / tp + 2 * w.hidden
    if tp > 1:  # no collective is repeated: what two gathered, what two scattered, and a sum with it
        products += 2 * w.hidden + 3 * w.hidden / tp
    return step.tokens * s * (products + w.query / tp + w.hidden / tp)


def _backward_buffers(step: _Step) -> float:
    """Gradients within a layer's MLP: of the product (which is freed itself), of its two factors, of the hidden states.

    A mixture of experts needs most memory when the weights' gradients exist, and gate, up and product are freed.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    inner = 2 * w.intermediate / tp if not w.experts else -2 * w.experts * w.intermediate
    return step.tokens * s * (inner + 2 * w.hidden)
