"""The sections that DeepSpeed owns, with DeepSpeed's key names and meaning, as far as headrace runs them.

No torch, no file access. Keys of DeepSpeed that are not here are in `deepspeed_keys.py`, each with what to do instead.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from headrace.base.section import Count, Index, Section


class OptimizerParams(Section):
    """AdamW's numbers, under DeepSpeed's names."""

    lr: PositiveFloat = Field(1e-3, description="peak learning rate, a positive number")
    betas: tuple[float, float] = Field((0.9, 0.999), description="two numbers in [0, 1)", strict=False)
    eps: PositiveFloat = Field(1e-8, description="a small positive number")
    weight_decay: NonNegativeFloat = Field(0.0, description="applied to matrices only, not to biases and norms")
    torch_adam: bool = Field(True, description="true: torch's AdamW runs everywhere; leave it so")
    adam_w_mode: bool = Field(True, description="true: decoupled weight decay; leave it so")


class OptimizerSection(Section):
    """The optimizer: AdamW (DeepSpeed's 'Adam' means AdamW too, unless adam_w_mode is false)."""

    type: Literal["AdamW", "Adam"] = Field("AdamW", description="AdamW")
    params: OptimizerParams = OptimizerParams()


class SchedulerParams(Section):
    """All schedulers' numbers; `rules.py` refuses those that the chosen type does not use."""

    warmup_num_steps: Count | None = Field(None, description="steps of rising learning rate")
    warmup_type: Literal["log", "linear"] | None = Field(None, description="log (DeepSpeed's default) or linear")
    warmup_min_lr: NonNegativeFloat | None = Field(None, description="learning rate at the start of the warm-up")
    warmup_max_lr: PositiveFloat | None = Field(
        None, description="learning rate after the warm-up; the optimizer's if absent"
    )
    warmup_min_ratio: NonNegativeFloat | None = Field(None, description="start of the warm-up as a share of the peak")
    cos_min_ratio: NonNegativeFloat | None = Field(None, description="end of the cosine as a share of the peak")
    total_num_steps: Count | None = Field(None, description="length of the schedule; the run's steps if absent")
    decay_num_steps: Count | None = Field(None, description="steps of falling learning rate at the end (WSD)")
    min_ratio: NonNegativeFloat | None = Field(None, description="end of the decay as a share of the peak (WSD)")


class SchedulerSection(Section):
    """Learning rate over steps: DeepSpeed's three, and WSD (warm-up, stable, decay)."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "WSD"] = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR or WSD"
    )
    params: SchedulerParams = SchedulerParams()


class OffloadOptimizerSection(Section):
    """DeepSpeed's `offload_optimizer`: fp32 weights and moments live in host memory or on an NVMe disk."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = Field(None, description="a directory on a local NVMe disk")
    pin_memory: bool = False
    buffer_count: Count | None = None
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None
    ratio: float | None = Field(None, gt=0.0, le=1.0, description="share of the update done on the CPU (stage 3)")


class OffloadParamSection(Section):
    """DeepSpeed's `offload_param` (stage 3): the model's weights live in host memory or on an NVMe disk."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = Field(None, description="a directory on a local NVMe disk")
    pin_memory: bool = False
    buffer_count: Count | None = None
    buffer_size: Count | None = None
    max_in_cpu: Index | None = Field(None, description="elements kept in host memory, the rest on the disk")


class AioSection(Section):
    """DeepSpeed's `aio`: how it reads and writes an NVMe disk."""

    block_size: Count | None = None
    queue_depth: Count | None = None
    intra_op_parallelism: Count | None = None
    single_submit: bool | None = None
    overlap_events: bool | None = None


class ZeroSection(Section):
    """DeepSpeed's `zero_optimization`, as far as this version runs it. Absent keys keep DeepSpeed's defaults."""

    stage: Literal[0, 1, 2, 3] = Field(0, description="1 shards optimizer state, 2 gradients too, 3 parameters too")
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: Count | None = Field(None, description="elements per gradient bucket")
    allgather_partitions: bool | None = None
    allgather_bucket_size: Count | None = Field(None, description="elements per all-gather")
    overlap_comm: bool = Field(False, description="off unless asked for: several DeepSpeed versions gave NaN with it")
    sub_group_size: Count | None = None
    round_robin_gradients: bool | None = None
    ignore_unused_parameters: bool | None = None
    stage3_max_live_parameters: Index | None = None
    stage3_max_reuse_distance: Index | None = None
    stage3_prefetch_bucket_size: Index | None = None
    stage3_param_persistence_threshold: Index | None = None
    stage3_gather_16bit_weights_on_model_save: bool | None = None
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    offload_param: OffloadParamSection = OffloadParamSection()


class Bf16Section(Section):
    """bf16 compute with fp32 master weights, moments and gradient accumulation."""

    enabled: bool = False


class Fp16Section(Section):
    """DeepSpeed's `fp16`: half precision with loss scaling and fp32 master weights."""

    enabled: bool = False
    loss_scale: NonNegativeFloat = Field(0.0, description="a fixed scale; 0: dynamic")
    initial_scale_power: Index = Field(16, description="the dynamic scale starts at 2 to this power")
    loss_scale_window: Count = Field(1000, description="steps without overflow after which the scale doubles")
    hysteresis: Count = Field(2, description="overflows before the scale is halved")
    consecutive_hysteresis: bool = False
    min_loss_scale: PositiveFloat = 1.0


class TensorParallelSection(Section):
    """DeepSpeed's `tensor_parallel`."""

    autotp_size: Count | None = Field(None, description="the same as parallel.tp")


class PipelineSection(Section):
    """DeepSpeed's `pipeline`."""

    stages: Count | None = Field(None, description="the same as parallel.pp")


class DataTypesSection(Section):
    """DeepSpeed's `data_types`."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = Field(None, description="fp32 (default) or bf16")


class WandbSection(Section):
    """DeepSpeed's `wandb`. Without a login the run is recorded offline, to be sent later with `wandb sync`."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str | None = None
