"""Work of one rank in a step, by closed formulas: FLOPs of products and attention, bytes of other kernels.

Shapes as in `rank_model`. The FLOPs equal those of a step executed on fake tensors, except for the half of causal
attention that kernels skip (`tests/plan/test_work.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.optim.newton_schulz import NS_STEPS
from pipeline.engines.parallel.costs import update_bytes
from pipeline.engines.parallel.rank_model import Widths
from pipeline.engines.sizes.expert_load import expert_load
from pipeline.engines.sizes.memory import layer_activations
from pipeline.engines.sizes.traffic import TrafficLayout
from pipeline.plan.predict.model_costs import ModelCosts, StageFlops

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over its forward pass: the scores are computed again (Dao 2023, arXiv:2307.08691,
section 3.1)."""

FORWARD_PASSES, BACKWARD_PASSES = 1.0, 1.5
"""Bytes read and written by compiled kernels other than products, over the activations of a layer that its backward
pass needs. Fitted, within a quarter, to the kernels that Inductor writes for the shipped configs
(docs/performance.md)."""

RECOMPUTED_PASSES = {"none": 0.0, "selective": 0.35, "full": 0.5}
"""Bytes read and written by kernels that activation checkpointing repeats, over the same activations, by mode."""

EAGER_PASSES = 4.0
"""Factor on these bytes without compilation. torchtitan's 8B trains 5,762 tokens/s eager and 6,667 compiled on 8 x
H100: a difference of 24 microseconds per token, where the compiled kernels take 7."""

LOSS_PASSES = 5.0
"""Bytes read and written by the loss, over those of the logits in the dtype of the forward pass."""


@dataclass(frozen=True)
class Pass:
    """Work of a pass over one micro-batch on one rank.

    Attributes:
        products: FLOPs of matrix products.
        attention: FLOPs of attention.
        kernel_bytes: bytes read and written by other kernels.
        unquantized: part of `products` that an fp8 run computes in bf16.
        grouped: part of `products` in grouped products of experts.
        grouped_unquantized: part of `unquantized` in grouped products of experts.
    """

    products: float
    attention: float
    kernel_bytes: float
    unquantized: float = 0.0
    grouped: float = 0.0
    grouped_unquantized: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.kernel_bytes + other.kernel_bytes,
            self.unquantized + other.unquantized,
            self.grouped + other.grouped,
            self.grouped_unquantized + other.grouped_unquantized,
        )


@dataclass(frozen=True)
class Passes:
    """Work of both passes over one micro-batch.

    Attributes:
        forward: the forward pass.
        backward: the backward pass, with recomputation.
        unquantized_weights: FLOPs for gradients of weights in the backward pass that an fp8 run computes in bf16.
    """

    forward: Pass
    backward: Pass
    unquantized_weights: float = 0.0


@dataclass(frozen=True)
class StageWork:
    """Work of a (virtual) stage.

    Attributes:
        layers: number of its decoder layers.
        decoder: work of these layers together.
        head: work of the head and the loss; zeros on stages without them.
    """

    layers: int
    decoder: Passes
    head: Passes


@dataclass(frozen=True)
class Work:
    """Work of a rank of the pipeline.

    Attributes:
        layout: inputs of the formulas of traffic.
        stages: work of its (virtual) stages in order.
        update_bytes: bytes that the optimizer and the addition of gradients read and write in a step.
        matrix_flops: FLOPs per step to orthogonalize hidden matrices (Muon), each on one rank; those of the busiest
            rank.
        host_reads: number of reads of the device by the host in a step, for which layers wait.
    """

    layout: TrafficLayout
    stages: tuple[StageWork, ...]
    update_bytes: float
    matrix_flops: float
    host_reads: float = 0.0

    @property
    def forward(self) -> Pass:
        """Forward pass of a micro-batch, all stages together."""
        return sum((part.forward for stage in self.stages for part in (stage.decoder, stage.head)), _NOTHING)

    @property
    def backward(self) -> Pass:
        """Backward pass of a micro-batch, all stages together, with recomputation."""
        return sum((part.backward for stage in self.stages for part in (stage.decoder, stage.head)), _NOTHING)


_NOTHING = Pass(0.0, 0.0, 0.0)


def work_of(run: ResolvedRun, costs: ModelCosts, pp_rank: int) -> Work:
    """Computes the work of a rank.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    shares = costs.shares(run)
    rank = shares.footprint.ranks[pp_rank]
    layout = TrafficLayout(run, rank, shares.footprint.widths, costs.routed)
    activations = layer_activations(run, shares.footprint, pp_rank=pp_rank) * (1.0 if compiled(run) else EAGER_PASSES)
    in_fp8 = run.config.fp8.enabled and run.config.fp8.experts and costs.experts_fit_fp8
    stages = tuple(
        StageWork(
            flops.layers, _decoder(layout, flops, activations * flops.layers, in_fp8=in_fp8), _head(layout, flops)
        )
        for flops in shares.flops[pp_rank]
    )
    steps = (run.config.optimizer.params.ns_steps or NS_STEPS) / NS_STEPS
    sharing = run.topology.world_size // run.topology.pp
    matrix_flops = steps * max(rank.matrix_flops / sharing, rank.largest_matrix_flops)
    updated = update_bytes(run, *(part.parameters for part in rank.apart()))
    return Work(layout, stages, updated, matrix_flops, _host_reads(layout))


def _host_reads(layout: TrafficLayout) -> float:
    """Reads of the number of rows for experts: one in each pass that computes a layer, recomputation included."""
    memory = layout.run.config.memory
    again = 1 / memory.every_n_layers if memory.activation_checkpointing == "full" else 0.0
    return sum(each > 0 for each in layout.rank.experts) * layout.micro_batches * (1 + again)


def _decoder(layout: TrafficLayout, flops: StageFlops, activations: float, *, in_fp8: bool) -> Passes:
    """Work of a stage's layers; `in_fp8`: whether experts, except their weight gradients, are in fp8."""
    memory, layers = layout.run.config.memory, len(layout.rank.layers)
    tokens = layout.tokens / layout.run.topology.tp
    mode = memory.activation_checkpointing
    repeated = -(-layers // memory.every_n_layers) / max(1, layers)
    again = repeated if mode == "full" else 0.0
    kept = 0.0 if layout.run.config.engine == "deepspeed" else _last_products(layout.widths, flops)
    # the fullest rank computes more rows of experts than it sends
    experts = expert_load(layout.run, layout.widths).factor * flops.experts
    linear = flops.linear - flops.experts + experts
    again_linear = again * (linear - kept)
    again_experts = again * experts
    if mode == "selective":  # selective checkpointing does not keep grouped products
        again_linear = again_experts = repeated * experts
    in_bf16 = (0.0, experts) if in_fp8 else (experts, 2 * experts + again_experts)
    watched = _watched(layout, flops)
    scores = watched / (2 * layout.widths.head_size)  # written and read in blocks
    kernels = FORWARD_PASSES * activations
    read = _expert_bytes(layout, flops)
    forward = Pass(
        tokens * linear,
        tokens * (flops.attention + watched),
        kernels + tokens * scores * 2 * layout.size + read,
        tokens * in_bf16[0],
        tokens * experts,
        tokens * in_bf16[0],
    )
    backward = Pass(
        tokens * (2 * linear + again_linear),
        tokens * flops.attention * (ATTENTION_BACKWARD + again),
        (BACKWARD_PASSES + repeated * RECOMPUTED_PASSES[mode]) * activations
        + (2 + (0.0 if mode == "none" else repeated)) * read,
        tokens * in_bf16[1],
        tokens * (2 * experts + again_experts),
        tokens * in_bf16[1],
    )
    return Passes(forward, backward, tokens * experts)


def _expert_bytes(layout: TrafficLayout, flops: StageFlops) -> float:
    """Bytes of the experts' weights that a rank's grouped products read, in a pass over a stage's layers.

    Few rows per expert make a product wait for its weights: their reading takes as long as the FLOPs of about 200 rows
    on an H100. The gradients of weights write as many bytes.
    """
    if not flops.experts:
        return 0.0
    local = layout.widths.all_experts / layout.run.topology.ep / layout.widths.experts
    return layout.size * flops.experts / 2 * local


def _watched(layout: TrafficLayout, flops: StageFlops) -> float:
    """FLOPs per token of QK-Clip's largest logits: attention's scores in the forward pass, computed again."""
    if layout.run.config.optimizer.params.qk_clip is None:
        return 0.0
    widths = layout.widths
    return flops.attention * widths.query / (widths.query + (widths.output or widths.query))


def _head(layout: TrafficLayout, flops: StageFlops) -> Passes:
    """Work of the head and the loss, on the last stage."""
    if not flops.head:
        return Passes(_NOTHING, _NOTHING)
    tokens = layout.tokens / layout.run.topology.tp
    loss = LOSS_PASSES * layout.size * tokens * layout.widths.vocabulary
    return Passes(Pass(tokens * flops.head, 0.0, loss / 2), Pass(2 * tokens * flops.head, 0.0, loss / 2))


def compiled(run: ResolvedRun) -> bool:
    """Whether layers are compiled on a GPU."""
    return run.config.compile.enabled is not False and not run.plain


def _last_products(widths: Widths, flops: StageFlops) -> float:
    """FLOPs per token of dense layers' last products, before which a recomputation stops (not DeepSpeed's)."""
    of_layer = 6.0 * widths.hidden * widths.intermediate * widths.experts  # three products of every chosen expert
    sparse = round(flops.experts / of_layer) if of_layer else 0
    return 2.0 * widths.hidden * widths.dense * (flops.layers - sparse)
