"""Sizes of a training step in a layout, and the activations and logits of its moments: what `memory` sums up.

Shapes as in `rank_model`; s bytes per element in forward and backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.assemble import DISTILLATION_CHUNK
from pipeline.engines.parallel.rank_model import RankModel, Widths
from pipeline.engines.sizes.expert_load import expert_load

MASTER = 4
"""Bytes per element of fp32 master weights."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a run that the formulas need."""

    run: ResolvedRun
    rank: RankModel
    widths: Widths
    micro: int
    pp_rank: int
    cpu: bool = False

    @cached_property
    def size(self) -> int:
        """Bytes per element in forward and backward passes (s)."""
        return 2 if self.run.config.bf16.enabled or self.run.config.fp16.enabled else 4

    @cached_property
    def states(self) -> float:
        """Bytes per parameter of optimizer states, on this rank's average."""
        section, share = self.run.config.optimizer, self.rank.matrices / self.rank.parameters
        matrix, other = (len(section.kind.of(matrix=each).states) for each in (True, False))
        return (share * matrix + (1 - share) * other) * section.moments_bytes

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.run.config.zero_optimization.stage

    @cached_property
    def shards(self) -> int:
        """Ranks that share optimizer states."""
        topology = self.run.topology
        data = topology.dp * topology.cp
        return 1 if self.stage == 0 else self.run.config.parallel.hybrid_shard_size or data

    @cached_property
    def held(self) -> float:
        """Elements whose optimizer states this rank keeps; experts are sharded over the ranks that hold the same."""
        whole, experts = (part.parameters for part in self.rank.apart())
        return whole / self.shards + experts / self.run.expert_shards

    @cached_property
    def load(self) -> float:
        """Expert rows on the fullest rank, divided by the rows that a rank sends."""
        return expert_load(self.run, self.widths).factor

    @cached_property
    def chunk(self) -> int | None:
        """Positions of each sample whose logits exist at a time; see `assemble.loss_chunk`."""
        config = self.run.config
        distils = config.distill is not None and not self.run.plain
        return config.loss.chunk or (DISTILLATION_CHUNK if distils else None)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank (B T)."""
        return self.micro * self.run.batch.sequence_length // self.run.topology.cp

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return -(-self.run.batch.samples // (self.run.topology.dp * self.micro))

    @cached_property
    def waiting(self) -> int:
        """Micro-batches whose I (gradients of inputs) is done and whose W (of weights) is not, with zero bubble."""
        config, kind = self.run.config, self.run.config.parallel.schedule_kind
        if config.engine != "torch" or self.run.topology.pp == 1 or not kind.splits_backward or kind.v_shaped:
            return 0  # DualPipeV splits backward passes where fewer activations live
        return min(self.accumulation - 1, self.pp_rank)

    @cached_property
    def backward_share(self) -> float:
        """Share of a backward pass that is done when the forward pass beside it ends (`parallel.ep_overlap`); else 1.

        The two take turns at exchanges. A layer has two in each pass, and two more where full checkpointing repeats
        them: the forward pass is ahead by as much.
        """
        memory = self.run.config.memory
        if not self.run.overlaps_exchange or memory.activation_checkpointing != "full":
            return 1.0
        return memory.every_n_layers / (memory.every_n_layers + 1)

    @cached_property
    def kept(self) -> float:
        """Micro-batches, of all layers of this rank, whose activations live at one time.

        1F1B begins with as many forward passes as there are stages after this one, interleaved 1F1B with those of
        2 (stages after) + (virtual stages - 1) pp chunks, pp of one virtual stage after pp of the one before. Source:
        Narayanan et al. 2021 (arXiv:2104.04473), 2.2. Other schedules say themselves (`config.sections.layout`).
        DualPipeV begins with 2 (stages after) + this one and the ranks before it of the first stage, and as many as
        those of the second; then it has one more of the first in each pair of passes.
        Without a pipeline it is one, which a forward pass beside it takes over layer by layer.
        """
        topology, accumulation = self.run.topology, self.accumulation
        if topology.pp == 1:
            return 2 - self.backward_share
        kind = self.run.config.parallel.schedule_kind
        if kind.v_shaped:
            first, second = self.rank.stage_layers
            return ((2 * topology.pp - self.pp_rank) * first + (self.pp_rank + 1) * second) / (first + second)
        in_flight = kind.in_flight
        if in_flight is not None:
            return in_flight(accumulation, topology.pp)
        after, virtual = topology.pp - self.pp_rank - 1, self.rank.stages
        if virtual == 1:
            return min(accumulation, after + 1)
        passes = range(2 * after + (virtual - 1) * topology.pp + 1)
        layers = sum(self.rank.stage_layers[(number // topology.pp) % virtual] for number in passes)
        return min(accumulation, layers / max(1, len(self.rank.layers)))


def loss(step: StepSizes) -> dict[str, float]:
    """Returns the bytes at the loss: all activations; logits in s bytes with fp32 exponentials.

    Fused with the head, also the gradient of a chunk's logits, and for all rows the hidden states, their gradient, and
    what the final norm keeps: an fp32 copy, and the normalized one. With an unfinished backward pass beside it, also
    the layer which that one computes again.
    """
    rows, each, beside = step.tokens, step.size + MASTER, 0.0
    chunk, run = step.chunk, step.run
    if chunk is not None:
        rows = step.micro * min(chunk, rows // step.micro)
        each += step.size
        kept = (MASTER + step.size) / run.topology.tp + 2 * step.size
        beside = step.tokens * step.widths.hidden * kept if step.rank.last else 0.0
    columns = step.widths.vocabulary / step.run.topology.tp if step.rank.last else 0
    if step.backward_share < 1:
        beside += whole_layer(step)
    return {"activations": stored(step) + beside, "logits": rows * columns * each}


def head_backward(step: StepSizes) -> dict[str, float]:
    """Returns the bytes when the fused head's gradients are scaled: all activations and the hidden states' gradient."""
    tokens = step.tokens if step.rank.last else 0
    return {"activations": loss(step)["activations"] + step.size * tokens * step.widths.hidden}


def first_backward(step: StepSizes) -> dict[str, float]:
    """Returns the bytes in the last layer's backward pass: stored and recomputed activations, gradients of the MLP.

    With a forward pass beside it, a layer of that one too.
    """
    beside = whole_layer(step) if step.run.overlaps_exchange else 0.0
    return {"activations": stored(step) + _recomputed(step) + _backward_buffers(step) + beside}


def sum_of_head(step: StepSizes) -> float:
    """Bytes of the head's gradient, made at the loss: with several chunks an fp32 sum (`parallel.fused_head`)."""
    chunk = step.chunk
    several = chunk is not None and chunk * step.micro < step.tokens
    return step.rank.head * (MASTER if several else step.size)


def stored(step: StepSizes) -> float:
    """Bytes of the activations of all layers that live when the backward pass begins."""
    memory = step.run.config.memory
    each = {"none": whole_layer, "full": _layer_input, "selective": _selected}[memory.activation_checkpointing](step)
    layers = len(step.rank.layers)
    count = -(-layers // memory.every_n_layers)
    kept = step.kept * (count * each + (layers - count) * whole_layer(step))
    return received(step) + _sent(step) + kept + step.waiting * _between_passes(step)


def _between_passes(step: StepSizes) -> float:
    """Gradients that zero bubble keeps from a micro-batch's I to its W: of the outputs of matrix products and norms.

    Gradients per layer are those of gate and up, of query, key and value, four of hidden states, and two in fp32 of the
    norms; those of the logits are added. Source: the storages at the peak of the last stage.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    inner = (w.experts * step.load or 1) * 2 * w.intermediate + 2 * w.shared
    layer = s * ((inner + w.query + 2 * w.key_value) / tp + 4 * w.hidden) + 2 * MASTER * w.hidden / tp
    logits = s * w.vocabulary / tp if step.rank.last else 0
    return step.tokens * (len(step.rank.layers) * layer + logits)


def received(step: StepSizes) -> float:
    """Messages of a pipeline: at each border of a stage of this rank one is on its way, hidden states or gradients."""
    rank = step.rank
    if step.run.topology.pp == 1 or step.run.config.engine != "torch":
        return 0.0
    borders = 2 * rank.stages - int(rank.first) - int(rank.last)
    return borders * _layer_input(step)


def _sent(step: StepSizes) -> float:
    """Outputs of stages but the last, which torch's stages keep until the backward pass of their micro-batch."""
    alone = step.rank.last and step.rank.stages == 1
    if step.run.topology.pp == 1 or step.run.config.engine != "torch" or alone:
        return 0.0
    return (step.kept - 1) * _layer_input(step)


def _recomputed(step: StepSizes) -> float:
    """The layer that is computed again for its backward pass."""
    mode = step.run.config.memory.activation_checkpointing
    if mode == "none":
        return 0.0
    return whole_layer(step) - (_selected(step) if mode == "selective" else _layer_input(step))


def _layer_input(step: StepSizes) -> float:
    return step.size * step.widths.hidden * step.tokens / step.run.topology.tp


def whole_layer(step: StepSizes) -> float:
    """Bytes that a layer's backward pass needs, eager: norms (an fp32 copy, normalized, scaled), attention, MLP."""
    w, s, tp = step.widths, step.size, step.run.topology.tp
    norms = 2 * w.hidden * ((MASTER + s) / tp + s)
    if w.head_norms:
        norms += (w.query + w.key_value) * (MASTER + s) / tp
    # fused attention in fp32 takes as many heads of keys and values as of queries
    key_value = w.query if s == MASTER else w.key_value
    outputs = 2 if step.run.topology.cp > 1 else 1  # of all positions, and of this rank's
    attention = (w.query + outputs * (w.output or w.query) + 2 * key_value) * s / tp + MASTER * w.heads / tp
    norms += w.latent * (MASTER + 2 * s)
    mlp = (_experts(step) if w.experts else 4 * w.intermediate * s / tp) + 4 * w.shared * s
    return step.tokens * (norms + attention + mlp)


def _experts(step: StepSizes) -> float:
    """Bytes per token: input, gate and up, their activation and product, and output of every chosen expert.

    With expert parallelism they are those of the rows that a rank gets, but for the outputs, which are back at the rank
    that sent the rows: there is as much of them as tokens.
    """
    w, tp = step.widths, step.run.topology.tp if step.run.topology.ep > 1 else 1
    return w.experts * (w.hidden + step.load * (w.hidden + 4 * w.intermediate)) * step.size / tp


def _selected(step: StepSizes) -> float:
    """Selective checkpointing: outputs of matrix products and of attention, and the layer's input.

    With expert parallelism, the rows of experts that came, and those that came back.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    products = (w.query + 2 * w.key_value + 2 * w.intermediate) / tp + 2 * w.hidden + 2 * w.shared + w.latent
    if step.run.topology.ep > 1:
        products += (1 + step.load) * w.experts * w.hidden / tp
    if tp > 1:  # what two reduce-scatters gave, and a sum with it; gathers are repeated
        products += 3 * w.hidden / tp
    return step.tokens * s * (products + (w.output or w.query) / tp + w.hidden / tp)


def _backward_buffers(step: StepSizes) -> float:
    """Gradients within a layer's MLP: of the product (which is freed itself), of its two factors, of the hidden states.

    A mixture of experts needs most memory when the weights' gradients exist, and gate, up and product are freed. With
    expert parallelism, earlier: when its rows are computed again and wait to be sent back, there are those that came
    and the experts' outputs in two orders; without recomputation, the outputs' gradients in two.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    if step.run.topology.ep > 1:
        orders = 2 if step.run.config.memory.activation_checkpointing == "none" else 3
        inner = orders * step.load * w.experts * w.hidden / tp
    else:
        inner = 2 * w.intermediate / tp if not w.experts else -2 * w.experts * w.intermediate
    return step.tokens * s * (inner + 2 * w.hidden)
