"""The shape of a run's config: which keys exist, of what type, in what range. No torch, no file access.

Keys at the top level that DeepSpeed owns keep DeepSpeed's names and meaning. Headrace's own sections (`engine`,
`model`, `data`, `run`, `evaluation`, `distill`) stand beside them. Rules that need two fields are in `rules.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from headrace.section import Count, Index, Section


class ModelSection(Section):
    """What is trained: a fresh model from a Hugging Face config, or one loaded from a folder."""

    config: dict[str, Any] | None = Field(
        None, description="a Hugging Face config as an object; 'model_type' names the architecture, e.g. llama"
    )
    path: str | None = Field(
        None, description="a Hugging Face folder; its config and, unless fresh, its weights are used"
    )
    fresh: bool = Field(False, description="true: take only the config of 'path' and initialise the weights anew")
    keep_layers: tuple[Index, ...] | None = Field(
        None, description="numbers of the decoder layers of 'path' to keep, in order, e.g. [0, 2, 5]", strict=False
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="sdpa (default), eager, or flash_attention_2 where its package is installed"
    )


class SourceSection(Section):
    """One dataset of the blend."""

    path: str = Field(description="a tokens directory made by data_prep")
    weight: PositiveFloat = Field(1.0, description="share of the samples drawn from it, relative to the other sources")


class DataSection(Section):
    """The tokens that are trained on."""

    sources: tuple[SourceSection, ...] = Field(
        min_length=1, description='a list such as [{"path": "out/demo/tokens", "weight": 1.0}]', strict=False
    )
    sequence_length: Count = Field(description="tokens per sample (T)")
    prefetch: Count = Field(4, description="batches gathered ahead by the loader's thread")


class RunSection(Section):
    """How long, where to, from which seed."""

    dir: str = Field(description="the run's directory: config, metrics and checkpoints, e.g. runs/zero3")
    steps: Count | None = Field(None, description="optimizer updates; give this or run.tokens")
    tokens: Count | None = Field(None, description="tokens to train on, rounded up to whole steps; or run.steps")
    seed: Index = Field(0, description="one number for the init and the data order")
    checkpoint_every: Count | None = Field(None, description="steps between checkpoints; the last is always written")
    keep_checkpoints: Count = Field(2, description="how many of the newest checkpoints stay on disk")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: go on from the newest whole checkpoint; never: refuse a directory that has one"
    )


class EvaluationSection(Section):
    """Held-out evaluation during training, on the 'heldout' split of every source."""

    every: Count | None = Field(None, description="steps between evaluations; there is always one at the end")
    samples: Count | None = Field(None, description="sequences per source to evaluate; all of the split when absent")


class DistillSection(Section):
    """Knowledge distillation (pipeline/distill.py): a frozen teacher beside the student."""

    teacher: str = Field(description="a Hugging Face folder with the teacher")
    temperature: PositiveFloat = Field(2.0, description="softens both distributions before they are compared")
    alpha: float = Field(0.5, ge=0.0, le=1.0, description="share of the KL term; the rest is cross-entropy")


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


class Bf16Section(Section):
    """bf16 compute with fp32 master weights, moments and gradient accumulation."""

    enabled: bool = False


class DataTypesSection(Section):
    """DeepSpeed's `data_types`."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = Field(None, description="fp32 (default) or bf16")


class WandbSection(Section):
    """DeepSpeed's `wandb`. Without a login the run is recorded offline, to be sent later with `wandb sync`."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str | None = None


class Config(Section):
    """A whole run. One JSON file holds exactly this."""

    engine: Literal["deepspeed", "torch"] = Field(
        "deepspeed", description="deepspeed, or torch (one plain process, the reference)"
    )
    model: ModelSection
    data: DataSection
    run: RunSection
    evaluation: EvaluationSection = EvaluationSection()
    distill: DistillSection | None = None

    train_batch_size: Count | None = Field(None, description="samples per step over all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples per forward pass of a rank")
    gradient_accumulation_steps: Count | None = Field(None, description="forward passes per step")
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection | None = None
    gradient_clipping: NonNegativeFloat = Field(0.0, description="largest norm of the whole gradient; 0 is off")
    zero_optimization: ZeroSection = ZeroSection()
    bf16: Bf16Section = Bf16Section()
    data_types: DataTypesSection = DataTypesSection()
    wandb: WandbSection = WandbSection()
    steps_per_print: Count | None = Field(None, description="how often DeepSpeed itself logs; never when absent")
    wall_clock_breakdown: bool = False
