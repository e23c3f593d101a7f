"""Schema of the config sections that DeepSpeed owns: DeepSpeed's names and meaning of the supported keys.

No torch, no file access. DeepSpeed's other keys are in `deepspeed_keys.py`, each with a remedy. Descriptions name the
defaults of deepspeed 0.19.8.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from foundation.paths import LocalPath
from foundation.section import Count, Index, Section


class SchedulerParams(Section):
    """Parameters of all learning-rate schedulers; those that the chosen type does not use are refused."""

    warmup_num_steps: Index | None = Field(
        None,
        description="Warmup length in optimizer steps, e.g. 2000. Default: 1000; of WSD 1 % of total_num_steps. 0: no"
        " warmup (WSD alone)",
    )
    warmup_type: Literal["log", "linear"] | None = Field(
        None,
        description="Shape of the warmup of WarmupLR, WarmupDecayLR and WarmupCosineLR: log (DeepSpeed's default) or"
        " linear",
    )
    warmup_min_lr: NonNegativeFloat | None = Field(
        None, description="Learning rate at the start of the warmup (WarmupLR, WarmupDecayLR), e.g. 1e-6; default 0"
    )
    warmup_max_lr: PositiveFloat | None = Field(
        None,
        description="Learning rate at the end of the warmup (WarmupLR, WarmupDecayLR), e.g. 3e-4; default:"
        " optimizer.params.lr",
    )
    warmup_min_ratio: NonNegativeFloat | None = Field(
        None,
        description="Learning rate at the start of the warmup as a fraction of the peak (WarmupCosineLR), e.g. 0.1;"
        " default 0",
    )
    cos_min_ratio: NonNegativeFloat | None = Field(
        None,
        description="Final learning rate of the cosine decay as a fraction of the peak (WarmupCosineLR), e.g. 0.1;"
        " default 0.0001",
    )
    total_num_steps: Count | None = Field(
        None, description="Length of the whole schedule in optimizer steps, e.g. 10000; default: the steps of the run"
    )
    decay_num_steps: Count | None = Field(
        None, description="Length of WSD's final decay in optimizer steps, e.g. 1000; default: 10 % of total_num_steps"
    )
    min_ratio: NonNegativeFloat | None = Field(
        None,
        description="Learning rate of the last step of WSD's decay as a fraction of the peak, e.g. 0.1; default 0, with"
        " which that step learns nothing",
    )


class SchedulerSection(Section):
    """Learning-rate scheduler: three of DeepSpeed's, and WSD (warmup, stable, decay). Without one it is constant."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "WSD"] = Field(
        description="WarmupLR (then constant), WarmupDecayLR (then linear to 0), WarmupCosineLR (then cosine), or WSD"
        " (warmup, stable, linear decay at the end)"
    )
    params: SchedulerParams = SchedulerParams()
    count: Literal["steps", "tokens"] = Field(
        "steps",
        description="What the schedule counts: steps, or tokens: with a batch ramp or stages a step counts as its share"
        " of the largest step's tokens, and the rate depends on the tokens trained on; params are numbers of steps of"
        " that size",
    )


class OffloadOptimizerSection(Section):
    """ZeRO-Offload of optimizer states: fp32 master weights and the optimizer's states, in host memory or on NVMe."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where fp32 master weights and optimizer states are kept: none (on the GPU), cpu (host memory; ZeRO"
        " 1 to 3), or nvme (ZeRO-Infinity; stage 3)",
    )
    nvme_path: LocalPath | None = Field(
        None, description="Directory on a local NVMe disk, e.g. /local_nvme; required with device nvme"
    )
    pin_memory: bool = Field(
        True,
        description="true, the default: keep offloaded states in page-locked host memory, which makes transfers faster"
        " and takes memory that cannot be swapped out. No effect without a GPU",
    )
    buffer_count: Count | None = Field(
        None,
        description="Buffers in host memory for optimizer states swapped from NVMe, e.g. 5; DeepSpeed's default is 4",
    )
    pipeline_read: bool | None = Field(
        None, description="true: overlap reading the next optimizer states from NVMe with the update; default false"
    )
    pipeline_write: bool | None = Field(
        None, description="true: overlap writing updated optimizer states to NVMe with the update; default false"
    )
    fast_init: bool | None = Field(
        None, description="true: faster initialization of optimizer states on NVMe; DeepSpeed's default is false"
    )
    ratio: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of the parameters updated on the CPU (ZeRO-Offload++, stage 3). Only 1.0, the default, runs"
        " here",
    )


class OffloadParamSection(Section):
    """ZeRO-Infinity offload of parameters (stage 3): the model's weights in host memory or on NVMe."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where parameter shards are kept between uses: none (on the GPU), cpu (host memory) or nvme. Needs"
        " ZeRO stage 3",
    )
    nvme_path: LocalPath | None = Field(
        None, description="Directory on a local NVMe disk, e.g. /local_nvme; required with device nvme"
    )
    pin_memory: bool = Field(
        True,
        description="true, the default: keep offloaded parameters in page-locked host memory, which makes transfers"
        " faster and takes memory that cannot be swapped out. No effect without a GPU",
    )
    buffer_count: Count | None = Field(
        None, description="Buffers in host memory for parameters swapped from NVMe, e.g. 6; DeepSpeed's default is 5"
    )
    buffer_size: Count | None = Field(
        None, description="Size of each of these buffers in elements, e.g. 2e8; DeepSpeed's default is 1e8"
    )
    max_in_cpu: Index | None = Field(
        None,
        description="Parameter elements kept in host memory with device nvme, e.g. 2e9; DeepSpeed's default is 1e9",
    )


class AioSection(Section):
    """Asynchronous I/O of DeepSpeed for offload to NVMe. Absent keys keep DeepSpeed's defaults."""

    block_size: Count | None = Field(
        None, description="I/O block size in bytes, e.g. 8388608; DeepSpeed's default is 1048576"
    )
    queue_depth: Count | None = Field(None, description="I/O queue depth, e.g. 16; DeepSpeed's default is 8")
    intra_op_parallelism: Count | None = Field(
        None, description="Threads that share one read or write, e.g. 2; DeepSpeed's default is 1"
    )
    single_submit: bool | None = Field(
        None, description="true: submit I/O requests one by one instead of in batches; DeepSpeed's default is false"
    )
    overlap_events: bool | None = Field(
        None, description="true: overlap submitting requests with waiting for their completion; default true"
    )


class ZeroSection(Section):
    """ZeRO: sharding of optimizer states, gradients and parameters over data-parallel ranks. Engine torch: DDP (0) or
    FSDP2 (2, 3). Absent keys keep DeepSpeed's defaults."""

    stage: Literal[0, 1, 2, 3] = Field(
        0,
        description="ZeRO stage: 0 shards nothing (DDP), 1 optimizer states, 2 gradients too, 3 parameters too. Engine"
        " torch has 0 (DDP), 2 and 3 (FSDP2)",
    )
    contiguous_gradients: bool | None = Field(
        None,
        description="true: copy gradients into one contiguous buffer as they are produced, against memory"
        " fragmentation; DeepSpeed's default is true",
    )
    reduce_scatter: bool | None = Field(
        None, description="true: average gradients by reduce-scatter, false: by all-reduce; DeepSpeed's default is true"
    )
    reduce_bucket_size: Count | None = Field(
        None,
        description="Elements per gradient bucket of a reduce, e.g. 5e7; smaller takes less memory, larger fewer calls."
        " DeepSpeed's default is 5e8",
    )
    allgather_partitions: bool | None = Field(
        None,
        description="true: collect updated parameters by all-gather, false: by broadcasts (stages 1 and 2);"
        " DeepSpeed's default is true",
    )
    allgather_bucket_size: Count | None = Field(
        None,
        description="Elements per all-gather of updated parameters (stages 1 and 2), e.g. 5e7; DeepSpeed's default"
        " is 5e8",
    )
    overlap_comm: bool | None = Field(
        None,
        description="true: overlap gradient reduction with the backward pass; DeepSpeed's default is true at stage 3,"
        " else false. Several DeepSpeed versions before 0.19 gave NaN with it: then set it to false",
    )
    zero_hpz_partition_size: Count | None = Field(
        None,
        description="hpZ of ZeRO++ (stage 3): number of neighbouring ranks over which a second copy of the weights"
        " is sharded, e.g. 8, the GPUs of a node; the backward pass gathers from it. Takes the memory of that copy; off"
        " when absent",
    )
    sub_group_size: Index | None = Field(
        None,
        description="Elements per optimizer update of stage 3, e.g. 1e8; bounds its memory; 0: one parameter at a time."
        " DeepSpeed's default is 1e9",
    )
    round_robin_gradients: bool | None = Field(
        None,
        description="true: with optimizer offload (stages 1 and 2), copy gradients to host memory in an order that"
        " parallelizes over ranks; default false",
    )
    ignore_unused_parameters: bool | None = Field(
        None,
        description="true: parameters without a gradient in a backward pass are allowed; DeepSpeed's default is true",
    )
    stage3_max_live_parameters: Index | None = Field(
        None,
        description="Most parameter elements gathered on a rank at a time (stage 3), e.g. 1e8; DeepSpeed's default"
        " is 1e9",
    )
    stage3_max_reuse_distance: Index | None = Field(
        None,
        description="A gathered parameter is kept if it is used again within this many elements, e.g. 1e8 (stage 3);"
        " DeepSpeed's default is 1e9",
    )
    stage3_prefetch_bucket_size: Index | None = Field(
        None,
        description="Parameter elements gathered ahead of their use (stage 3), e.g. 2e7; DeepSpeed's default is 5e7",
    )
    stage3_param_persistence_threshold: Index | None = Field(
        None,
        description="Parameters of fewer elements stay whole on every rank (stage 3), e.g. 1e4; DeepSpeed's default"
        " is 1e5",
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None,
        description="DeepSpeed's option for save_16bit_model. Checkpoints here do not depend on it: python -m pipeline"
        " export writes whole weights",
    )
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    offload_param: OffloadParamSection = OffloadParamSection()


class Bf16Section(Section):
    """bf16 mixed precision: bf16 forward and backward passes; fp32 master weights, moments, gradient accumulation."""

    enabled: bool = Field(
        False,
        description="true: bf16 mixed precision with fp32 master weights, optimizer moments and gradient accumulation;"
        " no loss scaling is needed. false with fp16 off: fp32",
    )


class Fp16Section(Section):
    """fp16 mixed precision with loss scaling and fp32 master weights."""

    enabled: bool = Field(
        False,
        description="true: fp16 mixed precision with loss scaling and fp32 master weights. Not together with bf16",
    )
    loss_scale: NonNegativeFloat = Field(
        0.0, description="Static loss scale, e.g. 1024; 0, the default, is dynamic loss scaling"
    )
    initial_scale_power: Index = Field(
        16,
        le=127,  # 2^127 is the largest power of two in fp32
        description="Dynamic loss scaling starts at 2 to this power; the default, 16, is 65536",
    )
    loss_scale_window: Count = Field(
        1000, description="Steps without an overflow after which the dynamic loss scale is doubled"
    )
    hysteresis: Count = Field(
        2, description="Overflows before the dynamic loss scale is halved; every step with an overflow is skipped"
    )
    consecutive_hysteresis: bool = Field(
        False,
        description="true: a step without overflow resets the count of `hysteresis`, so that only overflows in a row"
        " count",
    )
    min_loss_scale: PositiveFloat = Field(1.0, description="Lower bound of the dynamic loss scale")


class TensorParallelSection(Section):
    """DeepSpeed's section for tensor parallelism; the same as `parallel.tp`."""

    autotp_size: Count | None = Field(
        None,
        description="Tensor-parallel size: ranks that each layer's matrices are split over, e.g. 8. The same as"
        " parallel.tp",
    )


class ExpertParallelSection(Section):
    """DeepSpeed's section for expert parallelism (AutoEP); the same as `parallel.ep`."""

    enabled: bool = Field(False, description="Use expert parallelism, of size `autoep_size`")
    autoep_size: Count | None = Field(
        None,
        description="Expert-parallel size: ranks that the experts of each layer are split over, e.g. 8; 1 when absent."
        " The same as parallel.ep",
    )
    comm_backend: Literal["comm", "deepep"] | None = Field(
        None,
        description="How expert-parallel ranks exchange tokens. The same as parallel.ep_exchange, whose all_to_all is"
        " called comm here",
    )

    @property
    def size(self) -> int | None:
        """The expert-parallel size; None where the section is off or gives no size."""
        return self.autoep_size if self.enabled else None


class PipelineSection(Section):
    """DeepSpeed's section for pipeline parallelism; the same as `parallel.pp`."""

    stages: Count | None = Field(
        None,
        description="Pipeline-parallel size: stages that the decoder layers are split into, e.g. 4. The same as"
        " parallel.pp",
    )


class DataTypesSection(Section):
    """DeepSpeed's section for dtypes besides those of the forward and backward passes."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = Field(
        None,
        description="dtype in which gradients of micro-batches are accumulated and reduced: fp32 (default), or bf16"
        " with bf16 enabled, which takes half the memory and loses precision",
    )


class WandbSection(Section):
    """Weights & Biases. Without a login the run is recorded offline, to be sent later with `wandb sync`."""

    enabled: bool = Field(
        False, description="true: log metrics to Weights & Biases; offline under run.dir when there is no login"
    )
    group: str | None = Field(None, description="W&B group that the run is listed in, e.g. ablations; none when absent")
    team: str | None = Field(
        None, description="W&B entity (team or user), e.g. my-team; the login's default when absent"
    )
    project: str | None = Field(None, description='W&B project, e.g. llama-1b; "headrace" when absent')


class TensorBoardSection(Section):
    """TensorBoard event files of the metrics. Needs `pip install tensorboard`."""

    enabled: bool = Field(
        False, description="true: write metrics as TensorBoard event files; needs: pip install tensorboard"
    )
    output_path: LocalPath | None = Field(
        None,
        description="Directory for event files, e.g. runs/tensorboard; default: the folder tensorboard in run.dir."
        " They are written to output_path/job_name",
    )
    job_name: str | None = Field(
        None,
        description="Folder within output_path, e.g. llama-1b, which TensorBoard shows as the run; default: the name"
        " of run.dir",
    )
