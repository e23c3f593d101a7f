"""The shape of a run's config: which keys exist, of what type, in what range. No torch, no file access.

Keys at the top level that DeepSpeed owns keep DeepSpeed's names and meaning; their sections are in
`deepspeed_schema.py`. Headrace's own sections stand beside them. Rules that need two fields are in `rules.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from headrace.base.section import Count, Index, Section
from pipeline.config.deepspeed_schema import (
    AioSection,
    Bf16Section,
    DataTypesSection,
    Fp16Section,
    OptimizerSection,
    PipelineSection,
    SchedulerSection,
    TensorParallelSection,
    WandbSection,
    ZeroSection,
)


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

    path: str = Field(description="a tokens directory made by data_prep, or PREFIX of Megatron's PREFIX.bin and .idx")
    source: str | None = Field(None, description="only this source of the tokens directory; all of it when absent")
    name: str | None = Field(None, description="what data.curriculum calls it; default: 'source', or else 'path'")
    weight: PositiveFloat | None = Field(
        None, description="share of the samples drawn from it, relative to the other sources; 1 when absent"
    )
    epochs: PositiveFloat | None = Field(None, description="or: how often the whole run sees it, e.g. 2.5")
    tokens: Count | None = Field(None, description="or: how many of its tokens the whole run draws, e.g. 5e9")
    max_epochs: PositiveFloat | None = Field(
        None, description="a run that would see it more often is refused, e.g. 4; no limit when absent"
    )
    tokenizer: str | None = Field(
        None, description="the Hugging Face folder of the tokenizer that made a PREFIX, which does not say it itself"
    )
    heldout: str | None = Field(
        None,
        description="a tokens directory whose held-out split is evaluated instead of this source's own, or a PREFIX",
    )


class StageSection(Section):
    """A stretch of the run with weights of its own."""

    after_step: Index = Field(description="it begins after so many steps; 0 for the first")
    weights: dict[str, NonNegativeFloat] = Field(
        description='a weight for each source by name, e.g. {"web": 2, "books": 1}; 0 draws nothing from it'
    )


class FimSection(Section):
    """Fill in the middle: the middle of some documents is moved behind their end."""

    rate: float = Field(
        0.5, gt=0.0, le=1.0, description="share of the documents in a sample that are changed, e.g. 0.5"
    )
    spm_rate: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of these as suffix, prefix, middle; the others as prefix, suffix, middle",
    )
    prefix: str = Field("<|fim_prefix|>", description="the token before the prefix; in the tokenizer's vocabulary")
    middle: str = Field("<|fim_middle|>", description="the token before the middle")
    suffix: str = Field("<|fim_suffix|>", description="the token before the suffix")


class DataSection(Section):
    """The tokens that are trained on."""

    sources: tuple[SourceSection, ...] = Field(
        min_length=1, description='a list such as [{"path": "out/demo/tokens", "weight": 1.0}]', strict=False
    )
    sequence_length: Count = Field(description="tokens per sample (T)")
    curriculum: tuple[StageSection, ...] | None = Field(
        None,
        min_length=1,
        description='weights by step: [{"after_step": 0, "weights": {"web": 1, "code": 1}}, ...]',
        strict=False,
    )
    packing: Literal["contiguous", "best_fit"] = Field(
        "contiguous",
        description="contiguous windows, or best_fit: whole documents, packed by python -m data_prep pack",
    )
    fim: FimSection | None = Field(None, description='fill in the middle, e.g. {"rate": 0.5}; none when absent')
    prefetch: Count = Field(4, description="batches gathered ahead by the loader's thread")
    mask_documents: bool = Field(
        False, description="true: a token sees only its own document, and no loss is taken across documents' borders"
    )

    @property
    def names(self) -> list[str]:
        """What the sources are called, in order."""
        return [source.name or source.source or source.path for source in self.sources]


class LossSection(Section):
    """How the next-token loss is computed."""

    z_loss: NonNegativeFloat = Field(0.0, description="weight of (log Z)^2 per token, e.g. 1e-4; 0 is off")
    chunk: Count | None = Field(
        None, description="positions of a sequence whose logits exist at one time, e.g. 1024; all when absent"
    )


class MemorySection(Section):
    """What is recomputed in the backward pass instead of kept. Changes no result."""

    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none", description="full: whole decoder layers; selective: all of a layer but its matrix products"
    )
    every_n_layers: Count = Field(1, description="recompute every n-th decoder layer only")


class ParallelSection(Section):
    """The layout: how many ranks share what. What is left over of the processes is data-parallel."""

    pp: Count | None = Field(None, description="pipeline stages (DeepSpeed's pipeline.stages)")
    tp: Count | None = Field(None, description="ranks that share every layer (DeepSpeed's tensor_parallel.autotp_size)")
    cp: Count | None = Field(None, description="ranks that share every sequence (DeepSpeed's sequence_parallel_size)")
    hybrid_shard_size: Count | None = Field(
        None, description="hybrid sharding: data ranks that share a parameter; the others hold copies. All when absent"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b", description="order of a pipeline's forward and backward passes: gpipe, 1f1b, interleaved_1f1b, ..."
    )
    virtual_stages: Count | None = Field(
        None, description="pieces of the model per pipeline rank (interleaved_1f1b: 2)"
    )
    cp_method: Literal["ulysses", "ring"] = Field(
        "ulysses", description="how cp ranks exchange attention: ulysses (all-to-all over heads) or ring"
    )
    elastic: bool = Field(
        False,
        description="true: any number of processes may begin this run, not only go on with it; what does not divide is"
        " filled up, who does not fit waits",
    )


class RunSection(Section):
    """How long, where to, from which seed."""

    dir: str = Field(description="the run's directory: config, metrics and checkpoints, e.g. runs/zero3")
    steps: Count | None = Field(None, description="optimizer updates; give this or run.tokens")
    tokens: Count | None = Field(None, description="tokens to train on, rounded up to whole steps; or run.steps")
    seed: Index = Field(0, description="one number for the init and the data order")
    checkpoint_every: Count | None = Field(None, description="steps between checkpoints; the last is always written")
    keep_checkpoints: Count = Field(2, description="how many of the newest checkpoints stay on disk")
    keep_every: Count | None = Field(
        None, description="checkpoints of every so many steps stay for ever, besides the newest; none when absent"
    )
    async_checkpoints: bool = Field(
        True,
        description="write checkpoints beside the training, from a copy in host memory; false: training waits instead",
    )
    allow_change: tuple[str, ...] = Field(
        (),
        description='fields that may differ from the checkpoint\'s though they alter the curve, e.g. ["optimizer"]',
        strict=False,
    )
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: go on from the newest whole checkpoint; never: refuse a directory that has one"
    )


class LaunchSection(Section):
    """How the processes find and reach each other."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        "auto", description="auto: nccl between GPUs, gloo between CPUs; or gloo, nccl, or mpi where torch has it"
    )
    timeout: PositiveFloat = Field(
        300.0, description="seconds that ranks wait for each other at start and in each check of the pre-flight"
    )


class WatchdogSection(Section):
    """When a rank counts as lost. One that dies is known at once."""

    enabled: bool = Field(True, description="false: nobody watches; a rank that dies or hangs is torch's affair")
    heartbeat_timeout: PositiveFloat = Field(
        60.0, description="seconds without a sign of life, after which a rank is stopped or its host is gone"
    )
    hang_timeout: PositiveFloat = Field(
        1500.0, description="seconds without progress of any rank, after which the run hangs; below torch's own 1800"
    )


class EvaluationSection(Section):
    """Held-out evaluation during training, on the 'heldout' split of every source."""

    every: Count | None = Field(None, description="steps between evaluations; there is always one at the end")
    samples: Count | None = Field(
        None, description="sequences per source to evaluate, spread over the split; all of it when absent"
    )


class StragglersSection(Section):
    """The report of who is slow, in runs on several processes. Changes no result."""

    every: Count | None = Field(
        100, description="steps between reports; one of them is profiled. null: no reports are made"
    )
    threshold: PositiveFloat = Field(
        0.1, description="a rank is named when its own work takes so much longer than its peers' median, e.g. 0.1"
    )


class AnomaliesSection(Section):
    """What happens when the numbers of a step are not finite, or far out of the ordinary. It never reaches the weights
    but where `spikes` is ignore."""

    non_finite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="a loss or gradient that is not finite: stop the run, skip the step, or rollback: go back to the"
        " newest checkpoint and pass over the data since then",
    )
    spikes: Literal["ignore", "skip", "rollback"] = Field(
        "ignore", description="a loss or gradient norm far above those before it: ignore (but report), skip or rollback"
    )
    window: int = Field(128, ge=16, description="steps whose losses and gradient norms a step is compared with")
    deviations: PositiveFloat = Field(
        10.0, description="robust deviations (1.4826 x median absolute deviation) above the median that make a spike"
    )
    recheck: bool = Field(
        True, description="execute a suspicious step once more, to tell a device that fails from data that does"
    )
    max_bad_steps: Count = Field(5, description="bad steps without progress between them after which the run stops")
    check_replicas: Count | None = Field(
        None, description="steps between checks that ranks with the same weights have the same bits; never when absent"
    )


class DistillSection(Section):
    """Knowledge distillation (pipeline/distill.py): a frozen teacher beside the student."""

    teacher: str = Field(description="a Hugging Face folder with the teacher")
    temperature: PositiveFloat = Field(2.0, description="softens both distributions before they are compared")
    alpha: float = Field(0.5, ge=0.0, le=1.0, description="share of the KL term; the rest is cross-entropy")


class Config(Section):
    """A whole run. One JSON file holds exactly this."""

    engine: Literal["deepspeed", "torch"] = Field(
        "deepspeed", description="deepspeed, or torch (native PyTorch; on one process the plain reference)"
    )
    model: ModelSection
    data: DataSection
    run: RunSection
    launch: LaunchSection = LaunchSection()
    watchdog: WatchdogSection = WatchdogSection()
    evaluation: EvaluationSection = EvaluationSection()
    anomalies: AnomaliesSection = AnomaliesSection()
    stragglers: StragglersSection = StragglersSection()
    distill: DistillSection | None = None
    loss: LossSection = LossSection()
    memory: MemorySection = MemorySection()
    parallel: ParallelSection = ParallelSection()

    train_batch_size: Count | None = Field(None, description="samples per step over all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples per forward pass of a rank")
    gradient_accumulation_steps: Count | None = Field(None, description="forward passes per step")
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection | None = None
    gradient_clipping: NonNegativeFloat = Field(0.0, description="largest norm of the whole gradient; 0 is off")
    zero_optimization: ZeroSection = ZeroSection()
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    tensor_parallel: TensorParallelSection = TensorParallelSection()
    pipeline: PipelineSection = PipelineSection()
    sequence_parallel_size: Count | None = Field(None, description="the same as parallel.cp")
    aio: AioSection = AioSection()
    data_types: DataTypesSection = DataTypesSection()
    wandb: WandbSection = WandbSection()
    steps_per_print: Count | None = Field(None, description="how often DeepSpeed itself logs; never when absent")
    wall_clock_breakdown: bool = False
