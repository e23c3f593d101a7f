"""The least that a rank must send and receive in a training step, by closed formulas from sizes alone.

The formulas count the bytes of a collective's whole tensor: the output of an all-gather, the input of a reduce-scatter
or an all-reduce, the exchanged rows of an all-to-all, a message. `docs/reference/communication.md` compares them with
the engines' actual traffic. They give the least traffic of a layout, with all tensors in the dtype of forward and
backward passes, and without recomputation.

Shapes are those of `rank_model`; s is the bytes per element in forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.rank_model import RankModel, Widths


@dataclass(frozen=True)
class TrafficLayout:
    """Inputs of the formulas.

    Attributes:
        run: the resolved config.
        rank: one rank's part of the model.
        widths: sizes of a decoder layer.
        routed: elements that a mixture of experts sums over all ranks (2 x layers x experts); 0 for a dense model.
    """

    run: ResolvedRun
    rank: RankModel
    widths: Widths
    routed: int = 0

    @property
    def size(self) -> int:
        """Bytes per element in forward and backward passes (s)."""
        return 2 if self.run.config.bf16.enabled or self.run.config.fp16.enabled else 4

    @property
    def hidden(self) -> int:
        """Bytes of a micro-batch's hidden states on all tp ranks together: B T D s."""
        return self.tokens * self.widths.hidden * self.size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank (B T)."""
        return self.run.batch.micro * self.run.batch.sequence_length // self.run.topology.cp

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step."""
        return self.run.batch.accumulation

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.run.config.zero_optimization.stage

    @property
    def sparse_layers(self) -> int:
        """Number of layers whose experts are divided by expert parallelism."""
        return sum(each > 0 for each in self.rank.experts)

    def apart(self) -> tuple[TrafficLayout, TrafficLayout]:
        """Separates parameters sharded over all data ranks from experts, sharded over the ranks that have them."""
        rest, experts = self.rank.apart()
        return replace(self, rank=rest), replace(self, rank=experts)


def weights(layout: TrafficLayout) -> int:
    """All-gathers of parameters: stage 3 twice per micro-batch, last layer and rest once; other stages once."""
    return gathered(layout.apart()[0])


def gradients(layout: TrafficLayout) -> int:
    """Reductions of gradients: once per micro-batch if they are sharded between micro-batches, else once."""
    return reduced(layout.apart()[0])


def expert_weights(layout: TrafficLayout) -> int:
    """All-gathers of experts with expert parallelism, as in `weights`, over the ranks that have the same experts."""
    return gathered(layout.apart()[1]) if layout.run.expert_shards > 1 else 0


def expert_gradients(layout: TrafficLayout) -> int:
    """Reductions of experts' gradients with expert parallelism, as in `gradients`."""
    return reduced(layout.apart()[1]) if layout.run.topology.edp > 1 else 0


def gathered(layout: TrafficLayout) -> int:
    """All-gathers of all parameters of a rank, sharded over one group."""
    rank, stage = layout.rank, layout.stage
    if stage == 0:
        return 0
    if stage < 3:
        return layout.size * rank.parameters
    again = sum(rank.layers) - rank.layers[-1]
    return layout.micro_batches * layout.size * (rank.parameters + again)


def reduced(layout: TrafficLayout) -> int:
    """Reductions of the gradients of all parameters of a rank, over one group."""
    sharded = layout.stage == 3 or (layout.stage == 2 and layout.run.topology.pp == 1)
    return (layout.micro_batches if sharded else 1) * layout.size * layout.rank.parameters


def tensor_gathers(layout: TrafficLayout) -> int:
    """All-gathers of hidden states: before attention and MLP, in both passes; before the head, after the embedding.

    The backward pass of a gather is a scatter, and that of a scatter is a gather. Source: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.2.
    """
    ends = int(layout.rank.first) + int(layout.rank.last)
    return layout.micro_batches * layout.hidden * (4 * len(layout.rank.layers) + ends)


def tensor_scatters(layout: TrafficLayout) -> int:
    """Reduce-scatters of hidden states: as many as gathers."""
    return tensor_gathers(layout)


def tensor_reductions(layout: TrafficLayout) -> int:
    """All-reduces over tp: maximum and two sums of the loss, in fp32; once per step, gradients of norms."""
    loss = layout.micro_batches * layout.tokens * 3 * 4 if layout.rank.last else 0
    data = layout.run.topology.dp * layout.run.topology.cp if layout.stage else 1
    return loss + layout.size * -(-layout.rank.small // data)


def attention_exchanges(layout: TrafficLayout) -> int:
    """Ulysses: all-to-alls of queries, keys, values and outputs forward, and of their gradients backward.

    Ring attention: keys and values sent to the next rank, cp - 1 times in each pass.
    """
    cp, widths = layout.run.topology.cp, layout.widths
    if layout.run.zigzag:
        return 2 * (cp - 1) * _keys_and_values(layout)
    heads = min(widths.heads, widths.key_value // widths.head_size)
    repeats = next(n for n in range(1, widths.heads // heads + 1) if heads * n % cp == 0)
    each = 2 * widths.query + 2 * widths.key_value * repeats
    return layout.micro_batches * len(layout.rank.layers) * 2 * layout.tokens * each * layout.size


def attention_gradients(layout: TrafficLayout) -> int:
    """Ring attention: gradients of keys and values sent to the next rank, cp times; 0 for Ulysses."""
    return layout.run.topology.cp * _keys_and_values(layout) if layout.run.zigzag else 0


def _keys_and_values(layout: TrafficLayout) -> int:
    """Returns the bytes of a rank's keys and values in all layers and micro-batches."""
    return layout.micro_batches * len(layout.rank.layers) * layout.tokens * 2 * layout.widths.key_value * layout.size


def expert_exchanges(layout: TrafficLayout) -> int:
    """All-to-alls of expert parallelism: rows sent to experts and back, forward and backward.

    Counts the rows that a rank sends; the fullest rank sends back more, as many as it gets.
    """
    rows = layout.tokens * layout.widths.experts // layout.run.topology.tp
    return 4 * layout.micro_batches * layout.sparse_layers * rows * layout.widths.hidden * layout.size


def expert_counts(layout: TrafficLayout) -> int:
    """All-to-alls of the number of rows for every expert, int64, before each forward exchange of `expert_exchanges`."""
    return 8 * layout.micro_batches * layout.sparse_layers * layout.widths.all_experts


def stage_messages(layout: TrafficLayout) -> int:
    """Returns bytes that a pipeline rank sends: hidden states to the next stage, gradients to the previous stage."""
    rank = layout.rank
    borders = 2 * rank.stages - int(rank.first) - int(rank.last)
    return layout.micro_batches * borders * layout.hidden // layout.run.topology.tp


def received_messages(layout: TrafficLayout) -> int:
    """Returns the bytes that a pipeline rank receives, as many as it sends."""
    return stage_messages(layout)


def tied_weights(layout: TrafficLayout) -> int:
    """Gradient of a tied embedding and head, all-reduced between the first and the last stage."""
    data = layout.run.topology.dp * layout.run.topology.cp if layout.stage else 1
    return layout.size * layout.rank.tied // data


def numbers(layout: TrafficLayout) -> int:
    """One fp64 all-reduce of numbers for the host: loss and its parts, squared norm, load of experts."""
    parts = 2 if layout.run.config.loss.z_loss else 0
    return 8 * (1 + parts + 1 + layout.routed)


PURPOSES: dict[str, Callable[[TrafficLayout], int]] = {
    "weights": weights,
    "gradients": gradients,
    "tensor parallelism, gathers": tensor_gathers,
    "tensor parallelism, scatters": tensor_scatters,
    "tensor parallelism, sums": tensor_reductions,
    "weights of experts": expert_weights,
    "gradients of experts": expert_gradients,
    "expert parallelism": expert_exchanges,
    "expert parallelism, sizes": expert_counts,
    "context parallelism": attention_exchanges,
    "context parallelism, gradients": attention_gradients,
    "pipeline, sent": stage_messages,
    "pipeline, received": received_messages,
    "tied weights": tied_weights,
    "numbers of the step": numbers,
}
"""Purpose of the traffic -> function that returns its least bytes in a step."""
