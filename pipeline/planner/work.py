"""What one rank computes in a step, by closed formulas: FLOPs of products and attention, bytes of other kernels.

Shapes as in `parallel.footprint`. The FLOPs are those of an executed step on fake tensors, but for the half of causal
attention that kernels skip (`tests/planner/test_work.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.rules import ResolvedRun
from pipeline.parallel.costs import update_bytes
from pipeline.parallel.memory import layer_activations
from pipeline.parallel.traffic import Layout
from pipeline.planner.model_costs import ModelCosts

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over its forward pass: the scores are computed again (Dao 2023, arXiv:2307.08691,
section 3.1)."""

FORWARD_PASSES, BACKWARD_PASSES = 1.0, 1.5
"""Bytes that compiled kernels other than products read and write, over the activations of a layer that its backward
pass needs. Fitted to the kernels that Inductor writes for the shipped configs (docs/performance.md), within a
quarter."""

RECOMPUTED_PASSES = {"none": 0.0, "selective": 0.35, "full": 0.5}
"""The same, of the kernels that activation checkpointing repeats."""

EAGER_PASSES = 4.0
"""How many times as much without compilation: torchtitan's 8B trains 5,762 tokens/s eager and 6,667 compiled on 8 x
H100, a difference of 24 microseconds per token, where the compiled kernels take 7."""

LOSS_PASSES = 5.0
"""Bytes read and written by the loss, over those of the logits in the dtype of the forward pass."""


@dataclass(frozen=True)
class Pass:
    """Of one micro-batch on one rank.

    Attributes:
        products: FLOPs of matrix products.
        attention: FLOPs of attention.
        kernel_bytes: read and written by other kernels.
    """

    products: float
    attention: float
    kernel_bytes: float


@dataclass(frozen=True)
class Work:
    """What a rank of the pipeline computes.

    Attributes:
        layout: inputs of the formulas of traffic.
        forward: of a micro-batch.
        backward: of a micro-batch, with what is recomputed.
        update_bytes: read and written in a step by the optimizer, and to add up gradients.
    """

    layout: Layout
    forward: Pass
    backward: Pass
    update_bytes: float


def work_of(run: ResolvedRun, costs: ModelCosts, pp_rank: int) -> Work:
    """The work of a rank.

    Raises:
        ConfigError: see `ModelCosts.shares`.
    """
    shares = costs.shares(run)
    rank, flops = shares.footprint.ranks[pp_rank], shares.flops[pp_rank]
    layout = Layout(run, rank, shares.footprint.widths, costs.routed)
    tokens = layout.tokens / run.topology.tp
    memory = run.config.memory
    mode = memory.activation_checkpointing
    layers = len(rank.layers)
    repeated = -(-layers // memory.every_n_layers) / max(1, layers)
    again = repeated if mode == "full" else 0.0
    kept = 0.0 if run.config.engine == "deepspeed" else _last_product(layout)
    activations = layer_activations(run, shares.footprint, pp_rank=pp_rank) * layers
    activations *= 1.0 if compiled(run) else EAGER_PASSES
    loss = LOSS_PASSES * layout.size * tokens * layout.widths.vocabulary if rank.last else 0.0
    forward = Pass(
        tokens * (flops.linear + flops.head), tokens * flops.attention, FORWARD_PASSES * activations + loss / 2
    )
    backward = Pass(
        tokens * (2 * (flops.linear + flops.head) + again * (flops.linear - layers * kept)),
        tokens * flops.attention * (ATTENTION_BACKWARD + again),
        (BACKWARD_PASSES + repeated * RECOMPUTED_PASSES[mode]) * activations + loss / 2,
    )
    return Work(layout, forward, backward, update_bytes(run, rank.parameters))


def compiled(run: ResolvedRun) -> bool:
    """Whether layers are compiled on a GPU."""
    return run.config.compile.enabled is not False and not run.plain


def _last_product(layout: Layout) -> float:
    """FLOPs per token of the MLP's last product, before which a recomputation stops (not DeepSpeed's)."""
    widths = layout.widths
    return 2.0 * widths.hidden * widths.intermediate if not widths.experts else 0.0
