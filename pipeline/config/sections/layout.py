"""Schema of a run's layout: the section `parallel`, and `launch.fallback_layouts`. No torch, no file access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from foundation.section import Count, Section


@dataclass(frozen=True)
class PipelineKind:
    """A pipeline schedule as rules, memory sizes and the planner see it.

    Attributes:
        torch: class in `torch.distributed.pipelining.schedules`.
        virtual_stages: whether a rank runs several virtual stages (model chunks), on multiples of pp micro-batches.
        any_number: whether the schedule runs any number of micro-batches, even fewer than pp.
        v_shaped: whether a rank has two virtual stages, the second ones placed from the last rank back to the first. It
            then runs any number of micro-batches from 2 pp on.
        overlaps: whether a rank can overlap the forward pass of a micro-batch in one of its stages with the backward
            pass of another micro-batch in its other stage (`parallel.ep_overlap`).
        splits_backward: whether weight gradients are computed separately from input gradients, and later.
        bubble: bubble divided by the bubble of 1F1B with the same number of virtual stages.
        in_flight: function of a step's micro-batches and pp: the number of micro-batches whose activations a rank keeps
            at one time; None for that of 1F1B, which depends on the rank.
        searched: whether the planner tries this schedule.
    """

    torch: str
    virtual_stages: bool = False
    any_number: bool = False
    v_shaped: bool = False
    overlaps: bool = False
    splits_backward: bool = False
    bubble: float = 1.0
    in_flight: Callable[[int, int], int] | None = None
    searched: bool = True

    def rank_of(self, stage: int, ranks: int) -> int:
        """Returns the pipeline rank, of `ranks` ranks, that has a (virtual) stage."""
        lap, place = divmod(stage, ranks)
        return ranks - 1 - place if self.v_shaped and lap % 2 else place

    @property
    def number_of_stages(self) -> int:
        """Virtual stages of a rank where the config gives no number."""
        return 2 if self.virtual_stages else 1


SCHEDULES = {
    # more activations than 1F1B, and the same bubble
    "gpipe": PipelineKind("ScheduleGPipe", any_number=True, in_flight=lambda count, _pp: count, searched=False),
    "1f1b": PipelineKind("Schedule1F1B"),
    "interleaved_1f1b": PipelineKind("ScheduleInterleaved1F1B", virtual_stages=True),
    # Qi et al. 2023 (arXiv:2401.10241), 2.3, ZB-H1: it keeps a micro-batch's activations until the weight gradients, on
    # every rank as many as 1F1B on the first rank. Its bubble relates to 1F1B's as T_F + T_B - T_W to T_F + T_B + T_W;
    # here the three times are taken as equal
    "zero_bubble": PipelineKind(
        "ScheduleInterleavedZeroBubble", virtual_stages=True, splits_backward=True, bubble=1 / 3, in_flight=min
    ),
    # DeepSeek-AI 2024 (arXiv:2412.19437), table 2, cut in half (https://github.com/deepseek-ai/DualPipe): its bubble,
    # (p - 1) (T_F + 2 T_B - 3 T_W) for half a rank's layers, where B is I and W, relates to 1F1B's, (p - 1) (T_F + T_B)
    "dualpipev": PipelineKind(
        "ScheduleDualPipeV",
        virtual_stages=True,
        v_shaped=True,
        overlaps=True,
        splits_backward=True,
        bubble=2 / 3,
        searched=False,  # its memory formula is too low on the first rank (docs/log.md, DualPipeV)
    ),
}
"""Pipeline schedules by `parallel.schedule`."""


ShardStyle = Literal["whole", "colwise", "rowwise", "qkv", "one key head", "halves", "heads", "gathered"]
"""Styles of tensor-parallel modules; see docs/reference/layouts.md."""


class LayoutSection(Section):
    """Sizes of the mesh axes and settings of parallelism. The data-parallel size follows from the number of ranks."""

    pp: Count | None = Field(
        None,
        description="Pipeline-parallel size: ranks that the decoder layers are split over, e.g. 4; 1 when absent"
        " (DeepSpeed's"
        " pipeline.stages)",
    )
    tp: Count | None = Field(
        None,
        description="Tensor-parallel size: ranks that each layer's matrices are split over, e.g. 8; 1 when absent"
        " (DeepSpeed's"
        " tensor_parallel.autotp_size)",
    )
    tp_plan: dict[str, ShardStyle] = Field(
        default_factory=dict,
        description="Styles that override how tensor-parallel ranks compute modules of a decoder layer, by name, with"
        ' * for numbers, e.g. {"h.*.attn.c_attn": "qkv"}; `headrace explain layout FAMILY` prints the rest, and a'
        " table that a tiny model does not prove is refused",
    )
    cp: Count | None = Field(
        None,
        description="Context-parallel size: ranks that each sequence is split over, e.g. 2; 1 when absent (DeepSpeed's"
        " sequence_parallel_size)",
    )
    ep: Count | None = Field(
        None,
        description="Expert-parallel size: ranks that the experts of each layer are split over, e.g. 8; 1 when absent"
        " (DeepSpeed's expert_parallel.autoep_size). Its groups are formed among the dp x cp x tp ranks; it must"
        " divide their number and the number of experts. Tokens go to the ranks of their experts and back by"
        " all-to-all; none is dropped",
    )
    ep_exchange: Literal["all_to_all", "deepep", "hybridep"] | None = Field(
        None,
        description="How expert-parallel ranks exchange tokens: all_to_all of torch.distributed (the default), or the"
        " kernels of the packages DeepEP or HybridEP, on GPUs of compute capability 9.0 or later, in bf16 (DeepSpeed's"
        " expert_parallel.comm_backend)",
    )
    ep_overlap: bool = Field(
        False,
        description="true: the token exchange of a micro-batch overlaps with the computation of another: the forward"
        " pass of each runs beside the backward pass of the previous one. Engine torch, ZeRO stage 0 to 2;"
        " a step has two micro-batches or more, and a pipeline has schedule dualpipev",
    )
    hybrid_shard_size: Count | None = Field(
        None,
        description="Hybrid sharding (HSDP): ranks that parameters are sharded over; groups of this size hold replicas,"
        " e.g. 8, the GPUs of a node; all data ranks when absent. Engine torch, ZeRO stage 1 to 3",
    )
    schedule: Literal[*SCHEDULES] = Field(  # type: ignore[valid-type]
        "1f1b",
        description="Pipeline schedule: 1f1b (the default), gpipe, interleaved_1f1b, zero_bubble or dualpipev; all but"
        " 1f1b need engine torch",
    )
    virtual_stages: Count | None = Field(
        None,
        description="Virtual stages: model chunks per pipeline rank, e.g. 2. 2 when absent with schedule"
        " interleaved_1f1b or"
        " zero_bubble, always with dualpipev, else 1. More make the pipeline bubble smaller",
    )
    cp_method: Literal["ulysses", "ring"] = Field(
        "ulysses",
        description="How context-parallel ranks compute attention: ulysses (all-to-all over heads, the default) or ring"
        " (ring attention)",
    )
    stage_speeds: Literal["measured"] | Annotated[tuple[float, ...], Field(strict=False)] | None = Field(
        None,
        description="Relative speeds of the pipeline ranks' devices, one per pipeline rank, e.g. [2, 1], or measured:"
        " a slower rank gets fewer decoder layers. Equal when absent",
    )
    stage_memory_gb: Annotated[tuple[float, ...], Field(strict=False)] | None = Field(
        None,
        description="Memory in GB that tensors may take on the device of each pipeline rank, e.g. [70, 36]: no rank"
        " gets more decoder layers than it holds by the planner's formulas. No limit when absent",
    )

    @property
    def schedule_kind(self) -> PipelineKind:
        """The pipeline schedule as rules, memory sizes and the planner see it."""
        return SCHEDULES[self.schedule]


class ParallelSection(LayoutSection):
    """Parallelism: sizes of the mesh axes. Processes beyond pp x cp x tp are data-parallel ranks."""

    elastic: bool = Field(
        False,
        description="Elastic training: true lets a run start on any number of processes, padding the batch with rows"
        " without targets; surplus processes stand by. A resumed run accepts any number either way",
    )
    shares: Literal["auto"] | Annotated[tuple[float, ...], Field(strict=False)] | None = Field(
        None,
        description="Uneven shares of the batch for data-parallel ranks of different speed: relative weights, one per"
        " rank, e.g. [3, 3, 2], or auto, which measures the ranks and divides anew when it pays. Even when absent",
    )


class FallbackLayout(LayoutSection):
    """A layout for fewer processes: a whole section `parallel`, and the keys beside it that a layout may need changed.

    An axis that is absent has size 1 whatever the section `parallel` says; an engine, a stage or a micro-batch size
    that is absent stays as configured.
    """

    engine: Literal["deepspeed", "torch"] | None = Field(
        None, description="Training engine of this layout, e.g. torch; as configured when absent"
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="zero_optimization.stage of this layout, e.g. 3; as configured when absent"
    )
    train_micro_batch_size_per_gpu: Count | None = Field(
        None,
        description="Largest micro-batch size of this layout, e.g. 1 where it leaves less memory; as configured when"
        " absent",
    )
