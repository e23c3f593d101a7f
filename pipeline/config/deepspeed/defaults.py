"""DeepSpeed's default of every key that is honoured here, and absent keys whose meaning differs here on purpose.

`tests/config/test_deepspeed_defaults.py` compares the table with the installed deepspeed and with the schema.
Source: deepspeed 0.19.8 `runtime/constants.py`, `zero/config.py`, `zero/offload_config.py`, `lr_schedules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundation.configfile import ConfigTree
from pipeline.config.sections.run import Config

_ZERO, _SCHEDULER = "zero_optimization.", "scheduler.params."

DEFAULTS: ConfigTree = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "optimizer.type": None,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.eps": 1e-8,
    "optimizer.params.momentum": 0.0,
    "optimizer.params.nesterov": False,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.torch_adam": False,
    "optimizer.params.adam_w_mode": True,
    "scheduler.type": None,
    _SCHEDULER + "warmup_num_steps": 1000,
    _SCHEDULER + "warmup_type": "log",
    _SCHEDULER + "warmup_min_lr": 0.0,
    _SCHEDULER + "warmup_max_lr": 0.001,
    _SCHEDULER + "warmup_min_ratio": 0.0,
    _SCHEDULER + "cos_min_ratio": 0.0001,
    _SCHEDULER + "total_num_steps": None,
    _ZERO + "stage": 0,
    _ZERO + "contiguous_gradients": True,
    _ZERO + "reduce_scatter": True,
    _ZERO + "reduce_bucket_size": 500_000_000,
    _ZERO + "allgather_partitions": True,
    _ZERO + "allgather_bucket_size": 500_000_000,
    _ZERO + "overlap_comm": None,
    _ZERO + "zero_hpz_partition_size": 1,
    _ZERO + "sub_group_size": 1_000_000_000,
    _ZERO + "round_robin_gradients": False,
    _ZERO + "ignore_unused_parameters": True,
    _ZERO + "stage3_max_live_parameters": 1_000_000_000,
    _ZERO + "stage3_max_reuse_distance": 1_000_000_000,
    _ZERO + "stage3_prefetch_bucket_size": 50_000_000,
    _ZERO + "stage3_param_persistence_threshold": 100_000,
    _ZERO + "stage3_gather_16bit_weights_on_model_save": False,
    _ZERO + "offload_optimizer.device": "none",
    _ZERO + "offload_optimizer.nvme_path": None,
    _ZERO + "offload_optimizer.pin_memory": True,
    _ZERO + "offload_optimizer.buffer_count": 4,
    _ZERO + "offload_optimizer.pipeline_read": False,
    _ZERO + "offload_optimizer.pipeline_write": False,
    _ZERO + "offload_optimizer.fast_init": False,
    _ZERO + "offload_optimizer.ratio": 1.0,
    _ZERO + "offload_param.device": "none",
    _ZERO + "offload_param.nvme_path": None,
    _ZERO + "offload_param.pin_memory": True,
    _ZERO + "offload_param.buffer_count": 5,
    _ZERO + "offload_param.buffer_size": 100_000_000,
    _ZERO + "offload_param.max_in_cpu": 1_000_000_000,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "fp16.loss_scale": 0.0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1.0,
    "tensor_parallel.autotp_size": 0,
    "expert_parallel.enabled": False,
    "expert_parallel.autoep_size": 1,
    "expert_parallel.comm_backend": "comm",
    "pipeline.stages": "auto",
    "sequence_parallel_size": None,
    "aio.block_size": 1_048_576,
    "aio.queue_depth": 8,
    "aio.intra_op_parallelism": 1,
    "aio.single_submit": False,
    "aio.overlap_events": True,
    "data_types.grad_accum_dtype": None,
    "communication_data_type": None,
    "wandb.enabled": False,
    "wandb.group": None,
    "wandb.team": None,
    "wandb.project": "deepspeed",
    "tensorboard.enabled": False,
    "tensorboard.output_path": "",
    "tensorboard.job_name": "DeepSpeedJobName",
    "steps_per_print": None,
    "wall_clock_breakdown": False,
}
"""Key -> DeepSpeed's default; None: DeepSpeed requires the key, derives it or makes it depend on other keys.

A key whose default in the schema is None is not passed on: DeepSpeed's own default holds."""


@dataclass(frozen=True)
class Difference:
    """A key whose absence means something else here than in DeepSpeed, on purpose.

    Attributes:
        key: the key.
        ours: meaning of its absence here.
        theirs: meaning of its absence to DeepSpeed.
        why: the reason.
        applies: whether the difference changes the loss curve of a config without the key; differences that never do
            are listed only in docs/reference/config.md.
    """

    key: str
    ours: str
    theirs: str
    why: str
    applies: Callable[[Config], bool] = lambda _config: False


def _half(config: Config) -> bool:
    return config.bf16.enabled or config.fp16.enabled


def _other_peak(config: Config) -> bool:
    scheduler = config.scheduler
    return scheduler is not None and scheduler.type == "WarmupDecayLR" and config.optimizer.params.lr != 0.001


def _decays_matrices(config: Config) -> bool:
    return config.optimizer.params.weight_decay > 0


DIFFERENCES = (
    Difference(
        "communication_data_type",
        "fp32",
        "the run's 16 bits",
        "a sum over ranks in 16 bits rounds gradients, and the curve would depend on the number of ranks",
        _half,
    ),
    Difference(
        "data_types.grad_accum_dtype",
        "fp32",
        "the run's 16 bits",
        "a sum over micro-batches in 16 bits loses small gradients",
        _half,
    ),
    Difference(
        "optimizer.params.weight_decay",
        "of matrices alone",
        "of norms and biases, too",
        "decaying a norm's scale pulls it to 0; the field leaves them out",
        _decays_matrices,
    ),
    Difference(
        _SCHEDULER + "warmup_max_lr",
        "optimizer.params.lr",
        "0.001 (WarmupDecayLR)",
        "a schedule that ignores the learning rate of its own file is no one's intention",
        _other_peak,
    ),
    Difference(
        "optimizer.params.torch_adam",
        "torch's AdamW",
        "DeepSpeed's FusedAdam or CPUAdam",
        "one implementation on every engine; the formula is the same",
    ),
    Difference(
        _SCHEDULER + "total_num_steps", "the steps of the run", "required", "the loop knows how long the run is"
    ),
    Difference("optimizer.type", "AdamW", "required", "it is what nearly every file says"),
    Difference("wandb.project", "headrace", "deepspeed", "the name of the program that logs"),
    Difference("tensorboard.job_name", "the name of run.dir", "DeepSpeedJobName", "runs are told apart"),
)


_WHATEVER_IS_GIVEN = {"optimizer.params.weight_decay"}


def differences(config: Config, *files: Mapping[str, Any]) -> Iterator[str]:
    """Yields a text for each absent key whose meaning differs from DeepSpeed's and changes the loss curve.

    Args:
        config: the config.
        files: the config's keys as written, and under their names here.
    """
    for each in DIFFERENCES:
        open_ = each.key in _WHATEVER_IS_GIVEN or not any(_given(raw, each.key) for raw in files)
        if open_ and each.applies(config):
            yield f"{each.key}: {each.ours} (DeepSpeed: {each.theirs})"


def _given(raw: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(raw, Mapping) or raw.get(name) is None:
            return False
        raw = raw[name]
    return True
