"""Schema of a run's config: which keys exist, their types, ranges, defaults and descriptions. No torch, no file access.

Top-level keys that DeepSpeed owns keep DeepSpeed's names and meaning; their sections are in `deepspeed.py`, those of
`data` in `data.py`, and `distill` and `quantization_aware` in `compression.py`. Headrace's own sections stand beside
them. Rules that involve two fields are in `config/rules/`. Every description stands alone: editors show it, and it is
the remedy of an error about its key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, field_validator

from foundation.errors import RefusedValueError
from foundation.paths import LocalPath, PathOrUrl
from foundation.remote_run import working_directory
from foundation.section import Count, Index, Section
from foundation.user_function import FunctionName
from pipeline.config.sections.compression import DistillSection, QuantizationAwareSection
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.deepspeed import (
    AioSection,
    Bf16Section,
    DataTypesSection,
    ExpertParallelSection,
    Fp16Section,
    PipelineSection,
    SchedulerSection,
    TensorBoardSection,
    TensorParallelSection,
    WandbSection,
    ZeroSection,
)
from pipeline.config.sections.evaluation import EvaluationSection
from pipeline.config.sections.groups import IslandsSection, ReplicasSection
from pipeline.config.sections.layout import FallbackLayout, ParallelSection
from pipeline.config.sections.node_checks import NodeChecksSection
from pipeline.config.sections.optimizers import OptimizerKind, OptimizerSection
from pipeline.config.sections.parametrization import BaseModelSection
from pipeline.config.sections.stages import BatchRampSection, StageSection
from pipeline.config.sections.trackers import MlflowSection, PrometheusSection

AttentionImplementation = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4"]


class ModelSection(Section):
    """The model: initialized from a Hugging Face config, or loaded from a Hugging Face folder."""

    config: dict[str, Any] | None = Field(
        None,
        description="Hugging Face model config as a JSON object; model_type names the architecture, e.g."
        ' {"model_type": "llama", "hidden_size": 512}, or a published config.json: names from before transformers 5 are'
        " read as transformers reads them. Weights are initialized randomly. Give it or model.path",
    )
    path: PathOrUrl | None = Field(
        None,
        description="Hugging Face model folder, or its URL, e.g. out/demo/model: its config and, unless model.fresh,"
        " its weights are loaded. Give it or model.config",
    )
    fresh: bool = Field(
        False, description="true: take only the config of model.path and initialize the weights randomly"
    )
    keep_layers: tuple[Index, ...] | None = Field(
        None,
        description="Depth pruning: indices of the decoder layers of model.path to keep, in order, e.g. [0, 2, 5]; all"
        " when absent",
        strict=False,
    )
    extra_weights: Literal["keep", "drop"] = Field(
        "keep",
        description="Tensors of model.path that its language model does not use, such as layers that predict more"
        " tokens (mtp.*): keep (the default; an export has them as they were before the training) or drop",
    )
    attn_implementation: AttentionImplementation = Field(
        "sdpa",
        description="Attention kernel: sdpa (torch's scaled dot product attention, the default), eager, or"
        " flash_attention_2, _3, _4 in 16 bits on a GPU, from the packages flash-attn, flash-attn-3, flash-attn-4, or"
        " by way of the package kernels. Tensor and context parallelism and document masks need sdpa",
    )
    parametrization: Literal["standard", "completep"] = Field(
        "standard",
        description="How initialization and learning rates depend on width and depth: standard (not at all, the"
        " default), or completep (muP in the width, CompleteP in the depth): the learning rate and weight decay that"
        " are best for model.base are best for this model",
    )
    base: BaseModelSection | None = Field(
        None,
        description="Sizes of the model at which learning rate and weight decay were tuned, for parametrization"
        ' completep, e.g. {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}',
    )


class MtpSection(Section):
    """Multi-token prediction: modules behind the decoder layers that predict further tokens, trained with the model."""

    depth: Count = Field(1, description="Number of modules, each for one token further ahead")
    weight: PositiveFloat = Field(
        0.3,
        description="Weight of the mean of the modules' losses; DeepSeek-V3 used 0.3, and 0.1 for the last third",
    )


class LossSection(Section):
    """Next-token cross-entropy loss, its z-loss and chunking, and multi-token prediction."""

    z_loss: NonNegativeFloat = Field(
        0.0, description="Weight of the z-loss, (log Z)^2 per token, which keeps logits small, e.g. 1e-4; 0 is off"
    )
    chunk: Count | None = Field(
        None,
        description="Chunked loss, fused with the head: positions of each sample whose logits are in memory at a time,"
        " e.g. 2048; all when absent, 512 in a distillation. Saves memory with a large vocabulary, recomputes nothing"
        " and changes no result",
    )
    mtp: MtpSection | None = Field(
        None,
        description="Multi-token prediction, e.g. {}: trains the modules that predict further tokens (mtp.*), read from"
        " model.path if it has them, else initialized randomly; an export has them under the names of the family. None"
        " when absent",
    )

    function: FunctionName | None = Field(
        None,
        description="Your own loss instead of cross-entropy, module:function, e.g. my_loss:focal: takes fp32 logits"
        " [B, T, V] and labels [B, T], and returns the sum over positions whose label is not -100. None when absent",
    )

    @property
    def ahead(self) -> int:
        """Number of modules for multi-token prediction."""
        return 0 if self.mtp is None else self.mtp.depth


class MoeSection(Section):
    """Mixture of experts: how the load of the experts is balanced, over the global batch in every layout."""

    balance: Literal["none", "aux_loss", "bias"] = Field(
        "none",
        description="Load balancing of the experts: none (the default), aux_loss (the auxiliary loss of Switch"
        " Transformer) or bias (no auxiliary loss, as DeepSeek-V3; needs an architecture with a correction bias)",
    )
    aux_loss_coef: PositiveFloat | None = Field(
        None,
        description="Weight of the auxiliary loss, summed over the layers, each 1 when balanced; 0.01 when absent with"
        " aux_loss. With bias none is added when absent; DeepSeek-V3 adds 1e-4. transformers' router_aux_loss_coef"
        " counts it experts-per-token times as large",
    )
    bias_update_rate: PositiveFloat | None = Field(
        None,
        description="Change of each expert's correction bias per step, up or down; 1e-3 when absent. For balance bias",
    )

    @property
    def coefficient(self) -> float:
        """Weight of the auxiliary loss; 0 is off."""
        if self.balance == "none":
            return 0.0
        return self.aux_loss_coef or (0.01 if self.balance == "aux_loss" else 0.0)

    @property
    def bias_rate(self) -> float:
        """Change of the correction biases per step; 0 is off."""
        return (self.bias_update_rate or 1e-3) if self.balance == "bias" else 0.0


class MemorySection(Section):
    """Activation checkpointing: recompute activations in the backward pass instead of storing them."""

    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="Activation checkpointing: none (the default), full (recompute whole decoder layers) or selective"
        " (recompute all but matrix products and attention). Saves memory for compute, changes no result",
    )
    every_n_layers: Count = Field(
        1, description="Apply activation checkpointing to every n-th decoder layer only, e.g. 2; 1 is every layer"
    )


class CompileSection(Section):
    """torch.compile of the decoder layers. It changes the speed; the loss curve differs by rounding only."""

    enabled: bool | None = Field(
        None,
        description="Compile every decoder layer with torch.compile, each as one graph; when absent, where there is a"
        " GPU. The first step then takes a minute more",
    )
    backend: str = Field(
        "inductor", description="Backend of torch.compile: inductor (the default); aot_eager compiles no kernels"
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default", description="Inductor's mode: default, or max-autotune-no-cudagraphs, which tries more kernels"
    )


class Fp8Section(Section):
    """fp8 mixed precision (torchao): matrix products of the decoder layers in 8 bits. Needs `pip install torchao`."""

    enabled: bool = Field(
        False,
        description="true: linear layers of the decoder layers, and experts, multiply in fp8, weights stay bf16 with"
        " fp32 master weights; needs bf16, and a GPU with fp8: H100, L40S or newer",
    )
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = Field(
        "tensorwise",
        description="Scaling: tensorwise (one scale per tensor, the fastest on an H100), rowwise (one per row, more"
        " exact), rowwise_with_gw_hp (rowwise with weight gradients in bf16, the most exact) or mxfp8 (one per 32"
        " elements; Blackwell GPUs)",
    )

    experts: bool = Field(
        True,
        description="true: the experts of a mixture multiply in fp8, with a scale per row in every recipe and their"
        " weight gradients in bf16; an H100 or H200. false: in bf16",
    )
    fsdp_all_gather: bool = Field(
        False,
        description="true: FSDP2 gathers weights in fp8, half the bytes; engine torch with ZeRO stage 2 or 3, recipe"
        " tensorwise",
    )
    emulate: bool = Field(
        False,
        description="true: round to fp8 and multiply in a larger type, on any device; slow: for tests of the numerics",
    )

    @field_validator("recipe", mode="before")
    @classmethod
    def _without_nvfp4(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() == "nvfp4":
            raise ValueError(
                "in NVFP4 torchao 0.18 rounds gradients at random, so that no two layouts would train the same model,"
                " and there is no emulation to prove them with"
            )
        return value


class EmaSection(Section):
    """EMA of the weights, evaluated and saved beside them."""

    decay: float = Field(
        gt=0, lt=1, description="Share of the average that stays at each step, e.g. 0.999: a memory of 1000 steps"
    )


class RunSection(Section):
    """Length, directory, seed and checkpoints of the run."""

    model_config = ConfigDict(serialize_by_alias=True)  # `from` is a word of Python

    dir: PathOrUrl = Field(
        min_length=1,
        description="Directory of the run: config, metrics and checkpoints, e.g. runs/zero3; or the URL of one in an"
        " object store, e.g. s3://bucket/run: the run works in a directory below HEADRACE_CACHE, and uploads from there"
        " in the background",
    )
    origin: PathOrUrl | None = Field(
        None,
        alias="from",
        description="Checkpoint of another run with which this run begins, RUN@STEP, e.g. runs/base@40000 or a URL: the"
        " weights, the optimizer's states and the place in the data are the checkpoint's, and the next step follows;"
        " absent: a run of its own",
    )
    steps: Count | None = Field(
        None,
        description="Length of the run in optimizer steps, e.g. 10000. Give exactly one of run.steps and run.tokens",
    )
    tokens: Count | None = Field(
        None,
        description="Length of the run in training tokens, e.g. 1e10, rounded up to whole steps. Give exactly one of"
        " run.steps and run.tokens",
    )
    seed: Index = Field(0, description="Random seed of weight initialization and data order, e.g. 42")
    checkpoint_every: Count | Literal["auto"] | None = Field(
        None,
        description="Steps between checkpoints, e.g. 1000; auto: the time between them that wastes the least, by Daly,"
        " from the measured time of a save and run.node_mtbf_hours; when absent, run.checkpoint_minutes decides. The"
        " last step is always saved",
    )
    node_mtbf_hours: PositiveFloat | None = Field(
        None,
        description="Mean time between failures of one node, e.g. 2000, for run.checkpoint_every auto; 6335 when"
        " absent, as published for Llama 3 405B",
    )
    checkpoint_minutes: NonNegativeFloat | None = Field(
        None,
        description="Minutes between checkpoints, e.g. 15; when absent, 30 without run.checkpoint_every and"
        " no checkpoints by time with it; 0: never by time; an upper bound if run.checkpoint_every is auto",
    )
    keep_checkpoints: Count = Field(2, description="Number of newest checkpoints kept on disk; older ones are deleted")
    keep_in_bucket: Count | Literal["all"] | None = Field(
        None,
        description="Number of newest checkpoints kept in the object store of a run.dir that is a URL, or all;"
        " run.keep_checkpoints when absent",
    )
    ema: EmaSection | None = Field(
        None,
        description="EMA of the weights: updated at every step, saved in checkpoints, evaluated beside the weights as"
        " ema_loss, and exported by headrace export --ema; absent: none. Takes 4 bytes per parameter, sharded like the"
        " master weights",
    )
    keep_every: Count | None = Field(
        None,
        description="Checkpoints at multiples of this many steps are never deleted, e.g. 10000; none when absent."
        " With a run.dir that is a URL they stay there, and not on disk",
    )
    async_checkpoints: bool = Field(
        True,
        description="true: asynchronous checkpoints, written in the background from a copy in host memory; false:"
        " training waits for the write",
    )
    in_memory_checkpoints: LocalPath | None = Field(
        None,
        description="Directory of a tmpfs on each node, e.g. /dev/shm, that has a copy of the newest checkpoint's files"
        " of the node's ranks: a restart reads only what was lost from run.dir. Takes host memory of their size, twice"
        " while a checkpoint is written; absent: no copies",
    )
    gc_every: Index = Field(
        50,
        description="Steps between collections of cyclic Python objects, on all ranks at the same steps; 0: whenever"
        " Python finds it is time, which stalls all ranks",
    )
    allow_change: tuple[str, ...] = Field(
        (),
        description="Fields that may differ from the checkpoint's on resume although they alter the loss curve, e.g."
        ' ["optimizer.params.lr"]; a change of data or batch makes a stage that begins at the checkpoint; the seed'
        " cannot change; stages, and stages of data.curriculum, that have not begun can",
        strict=False,
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: resume from the newest complete checkpoint in run.dir; never: refuse a directory that has"
        " one",
    )

    @field_validator("dir")
    @classmethod
    def _takes_runs(cls, value: str) -> str:
        if value.startswith("hf://"):
            why = "a repository of the Hugging Face Hub has no conditional writes: two runs would mix their files"
            raise RefusedValueError(why, "use an s3://, gs:// or az:// URL, or a path")
        return value

    @field_validator("origin")
    @classmethod
    def _names_a_step(cls, value: str | None) -> str | None:
        if value is not None and re.search(r"(@|/step-)\d+/?$", value) is None:
            raise RefusedValueError("it names no step", f"use {value.rstrip('/')}@STEP, e.g. runs/base@40000")
        return value

    @property
    def local_dir(self) -> Path:
        """The run's directory on this host: `dir`, or for a URL a directory below HEADRACE_CACHE."""
        return working_directory(self.dir)


class LaunchSection(Section):
    """Rendezvous and communication backend of the processes."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        "auto",
        description="torch.distributed backend: auto (nccl between GPUs, gloo between CPUs), gloo, nccl, or mpi where"
        " torch is built with it",
    )
    device: Literal["auto", "cpu"] = Field(
        "auto",
        description="auto: the GPU, or the CPU on a machine without one; a driver or a Slurm job whose GPUs torch"
        " cannot use is refused. cpu: always the CPU",
    )
    timeout: PositiveFloat = Field(
        300.0,
        description="Timeout in seconds of the rendezvous and of each pre-flight check between ranks, e.g. 600",
    )
    numa_bind: bool = Field(
        True,
        description="Bind each rank to the cores of its GPU's NUMA node, if the system reports it; false: the cores"
        " that the launcher assigned. Nothing is bound without a GPU",
    )
    fallback_layouts: tuple[FallbackLayout, ...] = Field(
        (),
        description="Layouts to train in where fewer processes are there than parallel needs, in order of preference;"
        ' the first that fits is taken, e.g. [{"tp": 2}, {}]. Each replaces the whole section parallel, and is checked'
        " at every start. Implies parallel.elastic",
        strict=False,
    )
    node_checks: NodeChecksSection = NodeChecksSection()


class WatchdogSection(Section):
    """Watchdog: detection of ranks that died or hang. A rank that dies is detected at once."""

    enabled: bool = Field(
        True, description="false: no watchdog; dead and hanging ranks are left to torch's own timeouts"
    )
    heartbeat_timeout: PositiveFloat = Field(
        60.0,
        description="Seconds without a heartbeat after which a rank counts as lost (stopped, or its host is gone); at"
        " least 4 heartbeat intervals in large runs",
    )
    hang_timeout: PositiveFloat = Field(
        1500.0,
        description="Seconds without progress of any rank after which the run counts as hung; below torch's collective"
        " timeout of 1800",
    )


class StragglersSection(Section):
    """Straggler detection in runs of several processes: reports of slow ranks. Changes no result."""

    every: Count | Literal["auto"] | None = Field(
        "auto",
        description="Steps between straggler reports, each from one profiled step; auto: 100, and no reports where one"
        " would take over two seconds (many layers x micro-batches: check prints the estimate); null: no reports",
    )
    threshold: PositiveFloat = Field(
        0.1,
        description="A rank is reported as a straggler when its own time per step exceeds the median of its peers by"
        " this fraction in two reports in a row, e.g. 0.1 for 10 %",
    )


class ProfileSection(Section):
    """Profile of some steps: a torch.profiler trace and, on a GPU, a memory snapshot, in run.dir/profile."""

    steps: tuple[Count, Count] = Field(
        description="First and last step to profile, both included, e.g. [10, 13]; not the first steps of a process,"
        " which compile and allocate",
        strict=False,
    )
    ranks: tuple[Index, ...] = Field(
        (0,),
        min_length=1,
        description="Ranks to profile, e.g. [0, 8]; rank 0 when absent. Each writes files of its own",
        strict=False,
    )


class AnomaliesSection(Section):
    """Non-finite steps and loss spikes: detection and response. A bad step never updates the weights, except where
    `spikes` is ignore."""

    non_finite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="Response to a non-finite loss or gradient norm: stop the run (the default), skip the step, or"
        " rollback to the newest checkpoint and skip the data since",
    )
    spikes: Literal["ignore", "skip", "rollback"] = Field(
        "ignore",
        description="Response to a spike of the loss or gradient norm: ignore (only log it, the default), skip the step"
        " or rollback to the newest checkpoint and skip the data since",
    )
    window: int = Field(
        128,
        ge=16,
        description="Preceding steps whose losses and gradient norms are the baseline for spikes; 16 or more",
    )
    deviations: PositiveFloat = Field(
        10.0,
        description="A spike lies this many robust standard deviations (1.4826 x median absolute deviation) above the"
        " median of the window",
    )
    recheck: bool = Field(
        True,
        description="true: recompute a suspicious step once before responding; a different result means faulty"
        " hardware instead of bad data",
    )
    max_bad_steps: Count = Field(
        5, description="Bad steps without progress in between after which the run stops, whatever the response"
    )
    check_replicas: Count | None = Field(
        None,
        description="Steps between checks that replicated weights are bitwise equal on all ranks, e.g. 500; never when"
        " absent",
    )


class Config(Section):
    """Config of a training run: one JSON file."""

    engine: Literal["deepspeed", "torch", "reference"] = Field(
        "deepspeed",
        description="Training engine: deepspeed (ZeRO, offload, pipeline), torch (native: one GPU, DDP, FSDP2, pipeline"
        " parallelism), or reference (one plain process, with which all layouts are compared)",
    )
    model: ModelSection
    data: DataSection
    run: RunSection
    launch: LaunchSection = LaunchSection()
    watchdog: WatchdogSection = WatchdogSection()
    evaluation: EvaluationSection = EvaluationSection()
    anomalies: AnomaliesSection = AnomaliesSection()
    stragglers: StragglersSection = StragglersSection()
    profile: ProfileSection | None = Field(
        None, description="Profile of some steps, written into run.dir/profile; absent: none"
    )
    distill: DistillSection | None = Field(
        None, description="Knowledge distillation from a teacher model (pipeline/distill.py); absent: plain training"
    )
    loss: LossSection = LossSection()
    moe: MoeSection = MoeSection()
    memory: MemorySection = MemorySection()
    compile: CompileSection = CompileSection()
    fp8: Fp8Section = Fp8Section()
    quantization_aware: QuantizationAwareSection | None = Field(
        None, description="Train with the rounding of a quantization in every forward pass; absent: without"
    )
    parallel: ParallelSection = ParallelSection()
    islands: IslandsSection | None = Field(
        None,
        description="Low-communication training (DiLoCo) across islands, which `headrace islands` starts; absent: none",
    )
    replicas: ReplicasSection | None = Field(
        None,
        description="Replicas of the model that come and go within the run, a quorum per step; `headrace replicas`"
        " starts them; absent: none",
    )

    @property
    def state_kind(self) -> OptimizerKind:
        """The optimizer's kind, with all states of a parameter in a checkpoint: the EMA's, too."""
        return self.optimizer.kind if self.run.ema is None else self.optimizer.kind.with_ema()

    train_batch_size: Count | BatchRampSection | None = Field(
        None,
        description="Global batch size: samples per optimizer step over all ranks, e.g. 512 = micro-batch x gradient"
        ' accumulation x data-parallel ranks; derived when absent. Or a ramp: {"from": 256, "to": 2048, "over_tokens":'
        " 100e9}",
    )
    stages: tuple[StageSection, ...] | None = Field(
        None,
        min_length=1,
        description="Stages of the run, in order, a list such as"
        ' [{"name": "stable", "until": {"steps": 9000}}, {"name": "long", "data": {"sequence_length": 32768}}];'
        " absent: one stage",
        strict=False,
    )
    train_micro_batch_size_per_gpu: Count | None = Field(
        None,
        description="Micro-batch size: samples per forward/backward pass on one rank, e.g. 4; derived from"
        " train_batch_size"
        " when absent",
    )
    gradient_accumulation_steps: Count | None = Field(
        None,
        description="Gradient accumulation: micro-batches whose gradients are accumulated per optimizer step, e.g."
        " 8; derived"
        " from the batch sizes when absent",
    )
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection | None = Field(
        None,
        description="Learning-rate scheduler: WarmupLR, WarmupDecayLR, WarmupCosineLR or WSD with its params; absent: a"
        " constant learning rate",
    )
    gradient_clipping: NonNegativeFloat = Field(
        1.0,
        description="Gradient clipping: largest L2 norm of the gradient of all parameters, e.g. 1.0, the default, as"
        " in DeepSpeed; 0 is off",
    )
    zero_optimization: ZeroSection = ZeroSection()
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    tensor_parallel: TensorParallelSection = TensorParallelSection()
    expert_parallel: ExpertParallelSection = ExpertParallelSection()
    pipeline: PipelineSection = PipelineSection()
    sequence_parallel_size: Count | None = Field(
        None, description="DeepSpeed's key for the context-parallel size, e.g. 2. The same as parallel.cp"
    )
    aio: AioSection = AioSection()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype in which gradients are reduced over the data ranks: fp32, or bf16 (needs bf16 enabled),"
        " which sends half the bytes and rounds every rank's gradient. Micro-batches are still accumulated in fp32",
    )

    @field_validator("communication_data_type", mode="before")
    @classmethod
    def _without_fp16(cls, value: Any) -> Any:
        if value == "fp16":
            raise RefusedValueError("a sum over ranks in fp16 overflows where its terms do not", "remove it: fp32")
        return value

    @property
    def largest_batch(self) -> int | None:
        """`train_batch_size`, or the largest of a ramp."""
        return (
            self.train_batch_size.to if isinstance(self.train_batch_size, BatchRampSection) else self.train_batch_size
        )

    wandb: WandbSection = WandbSection()
    tensorboard: TensorBoardSection = TensorBoardSection()
    mlflow: MlflowSection = MlflowSection()
    prometheus: PrometheusSection = PrometheusSection()
    callbacks: tuple[FunctionName, ...] = Field(
        (),
        description='Your own hooks of the training loop, each module:function, e.g. ["my_hooks:make"]: the function'
        " gets a HookContext on every rank and returns a pipeline.run.hooks.hook.Hook",
        strict=False,
    )
    sinks: tuple[FunctionName, ...] = Field(
        (),
        description='Your own trackers, each module:function, e.g. ["my_tracker:open_sink"]: the function takes the'
        " run's directory and its config, and returns an object with write(kind, step, **values) and close()",
        strict=False,
    )
    steps_per_print: Count | None = Field(
        None, description="Steps between DeepSpeed's own log lines, e.g. 100; none when absent"
    )
    wall_clock_breakdown: bool = Field(
        False, description="true: DeepSpeed times forward, backward and optimizer step and logs it"
    )
