"""Sizes of a training step in a layout, and its activations and logits at several moments, as inputs of `memory`.

Shapes are those of `rank_model`; s is the bytes per element in forward and backward passes.
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
        """Bytes of optimizer states per parameter, averaged over this rank's parameters."""
        section, share = self.run.config.optimizer, self.rank.matrices / self.rank.parameters
        matrix, other = (len(section.kind.of(matrix=each).states) for each in (True, False))
        ema = 4 * (self.run.config.run.ema is not None)
        return (share * matrix + (1 - share) * other) * section.moments_bytes + ema

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.run.config.zero_optimization.stage

    @cached_property
    def shards(self) -> int:
        """Number of ranks over which optimizer states are sharded."""
        topology = self.run.topology
        data = topology.dp * topology.cp
        return 1 if self.stage == 0 else self.run.config.parallel.hybrid_shard_size or data

    @cached_property
    def held(self) -> float:
        """Number of elements whose optimizer states this rank has; an expert is sharded over the ranks that have it."""
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
        """Number of micro-batches in a step."""
        return -(-self.run.batch.samples // (self.run.topology.dp * self.micro))

    @cached_property
    def waiting(self) -> int:
        """With zero bubble, number of micro-batches with gradients of inputs (I), but not yet of weights (W)."""
        config, kind = self.run.config, self.run.config.parallel.schedule_kind
        if config.engine != "torch" or self.run.topology.pp == 1 or not kind.splits_backward or kind.v_shaped:
            return 0  # DualPipeV splits backward passes only when fewer activations live
        return min(self.accumulation - 1, self.pp_rank)

    @cached_property
    def backward_share(self) -> float:
        """Share of a backward pass that is done when the forward pass beside it ends (`parallel.ep_overlap`); else 1.

        The two passes take turns at exchanges. A layer has two exchanges in each pass, and two more if full
        checkpointing repeats them; by these the forward pass is ahead.
        """
        memory = self.run.config.memory
        if not self.run.overlaps_exchange or memory.activation_checkpointing != "full":
            return 1.0
        return memory.every_n_layers / (memory.every_n_layers + 1)

    @cached_property
    def kept(self) -> float:
        """Number of micro-batches whose activations, in all layers of this rank, live at one time.

        1F1B begins with as many forward passes as there are stages after this one. Interleaved 1F1B begins with the
        forward passes of 2 (stages after) + (virtual stages - 1) pp chunks: pp of one virtual stage, then pp of the
        next. Source: Narayanan et al. 2021 (arXiv:2104.04473), 2.2. DualPipeV begins with 2 (stages after) + (this rank
        and the ranks before it) passes of the first stage, and (this rank and the ranks before it) of the second;
        later, a pair of passes has one more of the first. Other schedules define the number themselves
        (`config.sections.layout`). Without a pipeline it is one micro-batch, whose activations a forward pass beside it
        replaces layer by layer.
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

    For a loss fused with the head, they include the gradient of a chunk's logits. For all rows they then also include
    the hidden states, their gradient, and the final norm's stored tensors (an fp32 copy and the normalized one). With
    an unfinished backward pass beside it, they include the layer that this pass recomputes.
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

    With a forward pass beside it, they include a layer of the forward pass.
    """
    beside = whole_layer(step) if step.run.overlaps_exchange else 0.0
    return {"activations": stored(step) + _recomputed(step) + _backward_buffers(step) + beside}


def sum_of_head(step: StepSizes) -> float:
    """Returns the bytes of the head's gradient at the loss; with several chunks an fp32 sum (`parallel.fused_head`)."""
    chunk = step.chunk
    several = chunk is not None and chunk * step.micro < step.tokens
    return step.rank.head * (MASTER if several else step.size)


def stored(step: StepSizes) -> float:
    """Returns the bytes of all layers' activations that live when the backward pass begins."""
    memory = step.run.config.memory
    each = {"none": whole_layer, "full": _layer_input, "selective": _selected}[memory.activation_checkpointing](step)
    layers = len(step.rank.layers)
    count = -(-layers // memory.every_n_layers)
    kept = step.kept * (count * each + (layers - count) * whole_layer(step))
    return received(step) + _sent(step) + kept + step.waiting * _between_passes(step)


def _between_passes(step: StepSizes) -> float:
    """Returns the bytes of gradients (of matrix products' and norms' outputs) that zero bubble stores from I to W.

    Each layer has gradients of gate and up, of query, key and value, four of hidden states, and two fp32 gradients of
    the norms. The logits' gradients are added. Source: the storages at the peak of the last stage.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    inner = (w.experts * step.load or 1) * 2 * w.intermediate + 2 * w.shared
    layer = s * ((inner + w.query + 2 * w.key_value) / tp + 4 * w.hidden) + 2 * MASTER * w.hidden / tp
    logits = s * w.vocabulary / tp if step.rank.last else 0
    return step.tokens * (len(step.rank.layers) * layer + logits)


def received(step: StepSizes) -> float:
    """Bytes of pipeline messages (hidden states or gradients): one in flight at each border of this rank's stages."""
    rank = step.rank
    if step.run.topology.pp == 1 or step.run.config.engine != "torch":
        return 0.0
    borders = 2 * rank.stages - int(rank.first) - int(rank.last)
    return borders * _layer_input(step)


def _sent(step: StepSizes) -> float:
    """Bytes of outputs, of all but the last stage, that torch's stages keep until the micro-batch's backward pass."""
    alone = step.rank.last and step.rank.stages == 1
    if step.run.topology.pp == 1 or step.run.config.engine != "torch" or alone:
        return 0.0
    return (step.kept - 1) * _layer_input(step)


def _recomputed(step: StepSizes) -> float:
    """Returns the bytes of the layer that is recomputed for its backward pass."""
    mode = step.run.config.memory.activation_checkpointing
    if mode == "none":
        return 0.0
    return whole_layer(step) - (_selected(step) if mode == "selective" else _layer_input(step))


def _layer_input(step: StepSizes) -> float:
    return step.size * step.widths.hidden * step.tokens / step.run.topology.tp


def whole_layer(step: StepSizes) -> float:
    """Returns the bytes for a layer's eager backward pass: norms (an fp32 copy, normalized, scaled), attention, MLP."""
    w, s, tp = step.widths, step.size, step.run.topology.tp
    norms = 2 * w.hidden * ((MASTER + s) / tp + s)
    if w.head_norms:
        norms += (w.query + w.key_value) * (MASTER + s) / tp
    # fused attention in fp32 needs as many heads of keys and values as of queries
    key_value = w.query if s == MASTER else w.key_value
    outputs = 2 if step.run.topology.cp > 1 else 1  # the outputs for all positions, and for this rank's
    attention = (w.query + outputs * (w.output or w.query) + 2 * key_value) * s / tp + MASTER * w.heads / tp
    norms += w.latent * (MASTER + 2 * s)
    mlp = (_experts(step) if w.experts else 4 * w.intermediate * s / tp) + 4 * w.shared * s
    return step.tokens * (norms + attention + mlp)


def _experts(step: StepSizes) -> float:
    """Returns the bytes per token: input, gate and up, their activation and product, and output of every chosen expert.

    With expert parallelism, all but the outputs count per row that a rank gets. The outputs count per row that it
    sends, since they have returned to the sending rank.
    """
    w, tp = step.widths, step.run.topology.tp if step.run.topology.ep > 1 else 1
    return w.experts * (w.hidden + step.load * (w.hidden + 4 * w.intermediate)) * step.size / tp


def _selected(step: StepSizes) -> float:
    """Bytes that selective checkpointing stores: outputs of matrix products and attention, and the layer's input.

    With expert parallelism, they include the received rows and the returned rows.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    products = (w.query + 2 * w.key_value + 2 * w.intermediate) / tp + 2 * w.hidden + 2 * w.shared + w.latent
    if step.run.topology.ep > 1:
        products += (1 + step.load) * w.experts * w.hidden / tp
    if tp > 1:  # results of two reduce-scatters, and a sum with one; gathers are repeated
        products += 3 * w.hidden / tp
    return step.tokens * s * (products + (w.output or w.query) / tp + w.hidden / tp)


def _backward_buffers(step: StepSizes) -> float:
    """Bytes of gradients within a layer's MLP: of the product (itself freed), of its two factors, of the hidden states.

    A mixture of experts needs most memory when the weights' gradients exist, and gate, up and product are freed. With
    expert parallelism the peak is earlier: when recomputed rows wait to be sent back, the received rows and the
    experts' outputs in two orders exist; without recomputation, the outputs' gradients in two orders.
    """
    w, s, tp = step.widths, step.size, step.run.topology.tp
    if step.run.topology.ep > 1:
        orders = 2 if step.run.config.memory.activation_checkpointing == "none" else 3
        inner = orders * step.load * w.experts * w.hidden / tp
    else:
        inner = 2 * w.intermediate / tp if not w.experts else -2 * w.experts * w.intermediate
    return step.tokens * s * (inner + 2 * w.hidden)
