"""Seconds of one pipeline rank at given rates: passes of its stages, and communication of a step by purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.plan.predict.communication import Transfer, transfers
from pipeline.plan.predict.expert_exchange import deduplicated_s, is_deduplicated
from pipeline.plan.predict.rates import Rates
from pipeline.plan.predict.work import Pass, Passes, Work

Collective = Callable[[Transfer, Rates], float]
"""Function that returns the seconds of all collectives of a transfer."""


HOST_READ_S = 30e-6
"""Seconds of a read of the device by the host, after which kernels start anew. Assumed: a copy of a few numbers and the
start of the next kernels, 10 microseconds each."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one micro-batch, computation alone.

    Attributes:
        forward: the forward pass.
        backward: the backward pass, with recomputation and the gradients of weights.
        weights: part of the backward pass for the gradients of weights: its products have the FLOPs of the forward
            pass.
    """

    forward: float
    backward: float
    weights: float


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in a (virtual) stage.

    Attributes:
        layers: number of decoder layers in the stage.
        decoder: seconds of all these layers.
        head: seconds of the head and the loss.
    """

    layers: int
    decoder: PassSeconds
    head: PassSeconds

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.decoder.forward + self.head.forward

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass."""
        return self.decoder.backward + self.head.backward

    @property
    def weights(self) -> float:
        """Seconds of the gradients of weights."""
        return self.decoder.weights + self.head.weights


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank.

    Attributes:
        products, kernels: matrix products with attention, and other kernels, of a micro-batch; on a CPU, kernels
            include the host's time for layers.
        stages: passes of its (virtual) stages in order.
        tensor, context, experts, weights, gradients: communication of a step, hidden or not; "experts" is the exchange
            of rows with the host's reads of their number, without the part beside another micro-batch.
        matrices: exchange and orthogonalization of whole matrices by the optimizer (Muon), in a step.
        message: one message of hidden states to the next stage, by the collectives' model.
        work: work and communication that take these seconds.
    """

    products: float
    kernels: float
    stages: tuple[StageSeconds, ...]
    tensor: float
    context: float
    experts: float
    weights: float
    gradients: float
    matrices: float
    message: float
    work: Work

    @property
    def forward(self) -> float:
        """Seconds that a micro-batch's forward pass computes."""
        return sum(stage.forward for stage in self.stages)

    @property
    def backward(self) -> float:
        """Seconds that a micro-batch's backward pass computes."""
        return sum(stage.backward for stage in self.stages)

    @property
    def inside(self) -> float:
        """Communication of a micro-batch for which its layers wait; a third belongs to the forward pass."""
        return (self.tensor + self.context + self.experts) / self.work.layout.micro_batches

    @property
    def busy(self) -> float:
        """Seconds of a micro-batch's passes, with the communication for which layers wait."""
        return self.forward + self.backward + self.inside


def rank_time(work: Work, rates: Rates, collective: Collective) -> RankTime:
    """Computes the times of a rank.

    Args:
        work: work and communication of the rank.
        rates: rates of the machine.
        collective: function that gives the seconds of all collectives of a transfer.
    """
    sums = dict.fromkeys(("tensor", "context", "experts", "weights", "gradients", "matrices"), 0.0)
    message = 0.0
    for each in transfers(work.layout):
        if each.purpose == "pipeline":
            message = collective(each, rates) / each.count
        elif each.purpose == "experts" and is_deduplicated(work.layout, rates):
            sums["experts"] += (1 - rates.exchange_overlap) * deduplicated_s(each, work.layout, rates)
        else:
            sums[each.purpose] += collective(each, rates)
    for waited in ("tensor", "context"):
        sums[waited] *= 1 - rates.layer_overlap
    sums["matrices"] += work.matrix_flops / rates.head
    passes = work.forward, work.backward
    stages = [
        StageSeconds(
            of.layers,
            _seconds(of.decoder, rates, rates.products, layers=of.layers),
            _seconds(of.head, rates, rates.head),
        )
        for of in work.stages
    ]
    sums["experts"] -= _hidden_exchange(work, stages, rates, exchange_s=sums["experts"])
    sums["experts"] += work.host_reads * HOST_READ_S
    waiting = _dispatch(work, stages, rates, exchange_s=sums["experts"])
    stages = [_later(stage, waiting) for stage in stages]
    layers = sum(stage.layers for stage in stages)
    host_s = layers * (rates.layer_forward_s + rates.layer_backward_s + waiting)
    return RankTime(
        products=sum(
            _products(each, rates, flops_per_s)
            for of in work.stages
            for part, flops_per_s in ((of.decoder, rates.products), (of.head, rates.head))
            for each in (part.forward, part.backward)
        ),
        kernels=sum(each.kernel_bytes for each in passes) / rates.memory + host_s,
        stages=tuple(stages),
        message=message,
        work=work,
        **sums,
    )


def _hidden_exchange(work: Work, stages: list[StageSeconds], rates: Rates, *, exchange_s: float) -> float:
    """Seconds of a step's exchange of experts that the passes of another micro-batch hide (`parallel.ep_overlap`).

    Without a pipeline, every forward pass but the first runs beside a backward pass. In a pipeline the first rank has
    the fewest of these: 2 n - 3 pp + 1 of the 2 n passes of n micro-batches in two stages. A pass hides no more of the
    other's exchanges than its layers compute, and no more than the share of communication that runs beside kernels. A
    pass has two exchanges per layer. Full checkpointing repeats the forward pass's exchanges in the backward pass: the
    repeated ones are not hidden, nor is a quarter of the forward pass's own, beside which no product runs.
    """
    run = work.layout.run
    if not run.overlaps_exchange:
        return 0.0
    memory, count = run.config.memory, run.batch.accumulation
    again = 1 / memory.every_n_layers if memory.activation_checkpointing == "full" else 0.0
    of_forward = exchange_s / count / (2 + again)
    forward = sum(stage.decoder.forward for stage in stages)
    backward = sum(stage.decoder.backward for stage in stages)
    hidden = min((1 - again / 4) * of_forward, backward) + min(of_forward, forward)
    pp = run.topology.pp
    beside = count - 1 if pp == 1 else (2 * count - 3 * pp + 1) / 2
    return beside * rates.overlap * hidden


def _dispatch(work: Work, stages: list[StageSeconds], rates: Rates, *, exchange_s: float) -> float:
    """Seconds per layer and micro-batch for which the device waits for the host to dispatch layers with experts."""
    layers, sparse = len(work.layout.rank.layers), work.layout.sparse_layers
    computed = sum(stage.decoder.forward + stage.decoder.backward for stage in stages)
    return max(0.0, sparse * rates.expert_layer_s - computed - exchange_s / work.layout.micro_batches) / layers


def _later(stage: StageSeconds, waiting: float) -> StageSeconds:
    """The stage with `waiting` seconds more per layer, a third of them in the forward pass."""
    if not waiting:
        return stage
    extra, of = stage.layers * waiting, stage.decoder
    return replace(stage, decoder=replace(of, forward=of.forward + extra / 3, backward=of.backward + 2 * extra / 3))


def _seconds(passes: Passes, rates: Rates, flops_per_s: float, *, layers: int = 0) -> PassSeconds:
    """Seconds of computation, with products at `flops_per_s` and, on a CPU, the host's work for `layers` layers."""
    forward, backward = (
        _products(each, rates, flops_per_s) + each.kernel_bytes / rates.memory + layers * host_s
        for each, host_s in ((passes.forward, rates.layer_forward_s), (passes.backward, rates.layer_backward_s))
    )
    weights = _multiplied(passes.forward.products, passes.unquantized_weights, rates, flops_per_s)
    return PassSeconds(forward, backward, weights)


def _products(each: Pass, rates: Rates, flops_per_s: float) -> float:
    grouped = _multiplied(each.grouped, each.grouped_unquantized, rates, flops_per_s) * (1 / rates.experts - 1)
    return _multiplied(each.products, each.unquantized, rates, flops_per_s) + grouped + each.attention / rates.attention


def _multiplied(flops: float, unquantized: float, rates: Rates, flops_per_s: float) -> float:
    """Seconds of products, some of which stay in bf16 in an fp8 run."""
    return (flops - unquantized) / flops_per_s + unquantized / rates.head
