"""DeepSpeed's config keys that this version does not support, each with a remedy.

DeepSpeed accepts unknown top-level keys silently, and an engine that ignored one of these keys would not train as the
file describes. So each is refused by name, unless its value changes nothing (`deepspeed_ignored.py`). Source: deepspeed
0.19.8 `runtime/constants.py`, `runtime/config.py`.
"""

from __future__ import annotations

from typing import Any

from foundation.errors import ConfigError, refuse_all
from foundation.section import Section
from pipeline.config.sections.run import Config

_LATER = "remove it: this version of headrace does not support it"
_OTHER_CURVE = "remove it, which makes another loss curve: this version of headrace does not support it"
_OURS = "remove it: headrace does this itself"
_LENGTHS = "remove it, and give each sequence length an entry of stages with data.sequence_length and until"
_GONE = "remove it: DeepSpeed 0.19 no longer has it"

REFUSED: dict[str, str] = {
    "activation_checkpointing": "use memory.activation_checkpointing",
    "amp": "use bf16",
    "autotuning": _LATER,
    "checkpoint": _OURS,
    "comet": "use wandb, tensorboard or mlflow, a tracker of your own (sinks), or read metrics.jsonl",
    "comms_logger": _LATER,
    "compression_training": "use pipeline/quantize.py and pipeline/distill.py; DeepSpeed 0.19 no longer has it",
    "csv_monitor": "read metrics.jsonl, which is always written",
    "curriculum_learning": _LENGTHS,
    "data_efficiency": _LENGTHS,
    "dataloader_drop_last": _OURS,
    "disable_allgather": _LATER,
    "dump_state": _LATER,
    "eigenvalue": _GONE,
    "elasticity": _GONE,
    "flops_profiler": _LATER,
    "gradient_allreduce_op": _OURS,
    "gradient_predivide_factor": _LATER,
    "hybrid_engine": _LATER,
    "log_level": _LATER,
    "memory_breakdown": _LATER,
    "monitor_config": "use wandb, tensorboard or mlflow, or read metrics.jsonl",
    "nebula": _GONE,
    "prescale_gradients": _LATER,
    "progressive_layer_drop": _LATER,
    "quantize_training": _GONE,
    "seq_parallel_communication_data_type": _LATER,
    "sparse_attention": _GONE,
    "sparse_gradients": _LATER,
    "timers": _LATER,
    "torch_autocast": "use bf16",
    "use_data_before_expert_parallelism": _LATER,
    "vocabulary_size": "set model.config.vocab_size, or leave it to the dataset's tokenizer",
    "weight_quantization": _GONE,
    "zero_allow_untested_optimizer": _OURS,
    "zero_force_ds_cpu_optimizer": _OURS,
    "comms_config": _LATER,
    "disable_python_gc": _LATER,
    "managed_gradient_accumulation": _OURS,
}

_QUANTIZED = (
    "DeepSpeed's int8 kernels are for CUDA alone, and round bf16 by way of fp16, so that no test here can prove the"
    " loss curve: remove it, or use"
)

REFUSED_ZERO: dict[str, str] = {
    "zero_quantized_gradients": f'{_QUANTIZED} communication_data_type "bf16"',
    "zero_quantized_weights": f"{_QUANTIZED} engine torch with fp8.fsdp_all_gather, or zero_hpz_partition_size",
    "cpu_offload": "use offload_optimizer",
    "cpu_offload_param": "use offload_param",
    "cpu_offload_use_pin_memory": "use offload_optimizer.pin_memory",
    "compute_grad_norm": _OURS,
    "enable_sanity_checks": _LATER,
    "leaf_module": _LATER,
    "legacy_stage1": _GONE,
    "log_trace_cache_warnings": _LATER,
    "memory_efficient_linear": _LATER,
    "mics_hierarchical_params_gather": _GONE,
    "mics_shard_size": _GONE,
    "override_module_apply": _LATER,
    "parameter_alignment": _LATER,
    "pipeline_loading_checkpoint": _LATER,
    "stage3_allgather_sequential": _LATER,
    "stage3_model_persistence_threshold": _LATER,
    "stage3_module_granularity_threshold": _LATER,
    "stage3_use_all_reduce_for_fetch_params": _LATER,
    "use_multi_rank_bucket_allreduce": _LATER,
    "zenflow": _OTHER_CURVE,
    "zero_quantized_nontrainable_weights": _LATER,
    "elastic_checkpoint": _OURS,
    "load_from_fp32_weights": _OURS,
    "save_muon_momentum_buffer_in_memory": _LATER,
}


REFUSED_COMPILE: dict[str, str] = {
    "autoep_non_moe": _LATER,
    "deepcompile": "remove it: DeepCompile changes the order of ZeRO; compile.enabled compiles the layers",
    "disable": "use compile.enabled false",
    "free_activation": _LATER,
    "offload_activation": _LATER,
    "offload_opt_states": _LATER,
    "offload_parameters": _LATER,
    "passes": _LATER,
    "symmetric_memory": _LATER,
}
"""Refused keys within `compile`."""

_ROUTER = "remove it: the router is the model's own, of model.config"

REFUSED_EXPERT_PARALLEL: dict[str, str] = {
    "combine_impl": "remove it: a token's experts are added up at the rank that it came from, in the router's order",
    "expert_activation": _ROUTER.replace("router is", "experts are"),
    "expert_tensor_parallel_size": "remove it: an expert is whole on its rank; with a larger autoep_size it has fewer",
    "load_balance_coeff": "use moe.balance bias, and moe.bias_update_rate",
    "num_expert_groups": _ROUTER,
    "num_limited_groups": _ROUTER,
    "route_norm": _ROUTER,
    "route_scale": _ROUTER,
    "routed_scaling_factor": _ROUTER,
    "row_weighting_impl": _LATER,
    "score_apply": _ROUTER,
    "score_func": _ROUTER,
    "top_k": _ROUTER,
}
"""Refused keys within `expert_parallel`."""

REFUSED_BF16: dict[str, str] = {
    "bf16_master_weights_and_grads": _OTHER_CURVE,
    "bf16_optimizer_states": _OTHER_CURVE,
    "check_grad_overflow": _OURS,
    "immediate_grad_update": _LATER,
}


REFUSED_FP16: dict[str, str] = {"fp16_master_weights_and_grads": _OTHER_CURVE, "auto_cast": _LATER}

REFUSED_OPTIMIZER_PARAMS: dict[str, str] = {
    "amsgrad": _OTHER_CURVE,
    "bias_correction": _OTHER_CURVE + "; the first steps become smaller (a third, with betas 0.9 and 0.999)",
    "dampening": "remove it, which makes another loss curve: momentum is not dampened here, which is torch's default",
    "maximize": _OTHER_CURVE,
    "max_grad_norm": "use gradient_clipping",
    "per_head_muon": "remove it: q, k and v are one matrix each",
}

REFUSED_SCHEDULER_PARAMS: dict[str, str] = {
    "warmup_ratio": "use warmup_num_steps: that share of the run's steps (warmup_min_ratio is the first rate)",
}
"""Refused key of the Trainer, whose name is similar to a key here."""

REFUSED_PIPELINE: dict[str, str] = {
    "activation_checkpoint_interval": "use memory.activation_checkpointing",
    "partition": "remove it: headrace divides the layers itself (parallel.stage_speeds)",
}
"""Refused keys within `pipeline`."""

REFUSED_TENSOR_PARALLEL: dict[str, str] = {
    "dtype": "remove it: bf16 or fp16 decides",
    "injection_policy_tuple": "remove it: transformers says how a layer is split",
    "kernel_inject": "remove it: there is no kernel injection in training",
    "partition_config": "remove it: transformers says how a layer is split",
    "replace_with_kernel_inject": "remove it: there is no kernel injection in training",
    "tensor_parallel": "use tensor_parallel.autotp_size",
    "tp": "use tensor_parallel.autotp_size",
    "vocab_parallel_lm_head": "remove it: the head is split with the vocabulary",
}
"""Refused keys within `tensor_parallel`."""

_BUCKETS = "remove it: FSDP2 and DDP choose their own buckets"
_GATHERS = "remove it: FSDP2 gathers layer by layer, one ahead"

REFUSED_ON_TORCH: dict[str, str] = {
    "zero_optimization.contiguous_gradients": _BUCKETS,
    "zero_optimization.reduce_scatter": "remove it: FSDP2 always reduce-scatters",
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.allgather_partitions": _GATHERS,
    "zero_optimization.allgather_bucket_size": _GATHERS,
    "zero_optimization.overlap_comm": "remove it: communication always overlaps with computation there",
    "zero_optimization.sub_group_size": "remove it: the optimizer step is one fused kernel there",
    "zero_optimization.round_robin_gradients": "remove it: it is for optimizer offload",
    "zero_optimization.ignore_unused_parameters": "remove it: every parameter has a gradient",
    "zero_optimization.stage3_max_live_parameters": _GATHERS,
    "zero_optimization.stage3_max_reuse_distance": "use zero_optimization.stage 2 to keep parameters gathered",
    "zero_optimization.stage3_prefetch_bucket_size": _GATHERS,
    "zero_optimization.stage3_param_persistence_threshold": _GATHERS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "use headrace export",
    "aio": "remove it: there is no offload there",
    "wall_clock_breakdown": "remove it: DeepSpeed's own timers",
    "steps_per_print": "remove it: DeepSpeed's own log",
    "data_types.grad_accum_dtype": "remove it: gradients are accumulated in fp32 there",
}
"""Keys without a meaning on engine torch. A value that describes the engine's normal behaviour is accepted."""

_ACCEPTED_VALUES: dict[str, Any] = {"data_types.grad_accum_dtype": "fp32", "zero_optimization.reduce_scatter": True}


def refuse_on_torch(config: Config) -> None:
    """Refuses DeepSpeed's keys that have no meaning on engine torch.

    Raises:
        ConfigError: some of these keys are set; the error names them.
    """
    found: list[ConfigError] = []
    for key, remedy in REFUSED_ON_TORCH.items():
        section, _, name = key.partition(".")
        value: Any = getattr(config, section)
        value = getattr(value, name) if name else value
        if isinstance(value, Section):
            value = value.model_dump(exclude_none=True)
        if value and _ACCEPTED_VALUES.get(key) != value:
            why = "DeepSpeed's key; it has no meaning on engine torch"
            found.append(ConfigError(key, value, why=why, remedy=remedy + ", or use engine deepspeed"))
    refuse_all(found)
