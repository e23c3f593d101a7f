"""DeepSpeed's keys that change nothing here, and keys that DeepSpeed knows by more than one name.

A key is in `IGNORED` when no value, or none of the listed values, changes the loss curve: the value is DeepSpeed's
default, it switches something off, it is about logs, or headrace always does it. Ignored keys are listed once, in one
line. Source: deepspeed 0.19.8 `runtime/config.py`, `runtime/zero/config.py`, `runtime/precision_config.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

Accepts = Callable[[Any], bool]


def _any(_value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Accepts:
    # 1 == True in Python, but they differ in JSON
    return lambda value: any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _off(value: Any) -> bool:
    """Accepts a section that switches itself off, or a flag that is false."""
    return value in (None, {}) or value is False or (isinstance(value, dict) and value.get("enabled", False) is False)


def _nothing_on(value: Any) -> bool:
    """Accepts a section whose switches are all off: its numbers have no effect then."""
    return value is None or (isinstance(value, dict) and not any(each is True for each in value.values()))


def _no_monitor(value: Any) -> bool:
    """Accepts a group of monitors that are all off. The group's own `enabled` starts no monitor in DeepSpeed."""
    return isinstance(value, dict) and not any(
        isinstance(each, dict) and each.get("enabled") is True for each in value.values()
    )


def _no_universal(value: Any) -> bool:
    return isinstance(value, dict) and not value.get("load_universal")


_DEEPSPEEDS_LEAVES = {
    f"transformers.models.{family}.modeling_{family}.{block}SparseMoeBlock"
    for family, block in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
}


def _default_leaves(value: Any) -> bool:
    """Accepts modules that ZeRO-3 gathers as a whole, if they are only DeepSpeed's defaults."""
    if not isinstance(value, dict) or any(value.get(key) for key in value.keys() - {"classes"}):
        return value is None
    classes = value.get("classes") or []
    return isinstance(classes, list) and set(map(str, classes)) <= _DEEPSPEEDS_LEAVES


def _one_rank(value: Any) -> bool:
    """Accepts a section `tensor_parallel.tp` without tensor parallelism."""
    return value is None or (isinstance(value, dict) and value.get("tp_size", 1) == 1)


_FP32 = _one_of(None, "fp32")
_ACTIVATIONS = "activation_checkpointing"

IGNORED: dict[str, Accepts] = {
    "amp": _off,
    "autotuning": _off,
    "checkpoint": _no_universal,
    "comet": _off,
    "comms_config": _any,
    "comms_logger": _any,
    "communication_data_type": _FP32,
    "compile": _one_of(None),
    "compile.autoep_non_moe": _one_of(False),
    "compile.debug_log": _flag,
    "compile.disable": _one_of(False),
    "compile.deepcompile": _one_of(False, None),
    "compile.double_buffer": _flag,
    "compile.free_activation": _one_of(False),
    "compile.free_activation_threshold": _any,
    "compile.keep_all_input_tensors": _flag,
    "compile.keep_int_input_tensors": _flag,
    "compile.offload_activation": _one_of(False),
    "compile.offload_activation_pin_memory": _flag,
    "compile.offload_opt_states": _one_of(False),
    "compile.offload_parameters": _one_of(False),
    "compile.passes": _one_of(None),
    "compile.symmetric_memory": _one_of(False),
    "compile.sync_after_allgather": _flag,
    "compile.sync_after_reduce": _flag,
    "compile.sync_before_allgather": _flag,
    "compile.sync_before_reduce": _flag,
    "compression_training": _one_of({}, None),
    "csv_monitor": _off,
    "curriculum_learning": _off,
    "data_efficiency": _off,
    "dataloader_drop_last": _flag,
    "disable_allgather": _one_of(False),
    "disable_python_gc": _flag,
    "dump_state": _flag,
    "eigenvalue": _off,
    "elasticity": _off,
    "expert_parallel": _off,
    "flops_profiler": _any,
    "gradient_allreduce_op": _one_of("mean"),
    "gradient_predivide_factor": _positive,  # gradients are summed in fp32: the factor is divided out again
    "hybrid_engine": _off,
    "log_level": _any,
    "managed_gradient_accumulation": _one_of(True),
    "memory_breakdown": _flag,
    "monitor_config": _no_monitor,
    "nebula": _off,
    "prescale_gradients": _flag,  # ignored like gradient_predivide_factor
    "progressive_layer_drop": _off,
    "quantize_training": _off,
    "seq_parallel_communication_data_type": _FP32,
    "sparse_gradients": _one_of(False),
    "steps_per_print": _one_of(0, None),
    "timers": _any,
    "torch_autocast": _off,
    "use_data_before_expert_parallelism": _one_of(False),
    "vocabulary_size": _one_of(None),
    "zero_allow_untested_optimizer": _flag,
    "zero_force_ds_cpu_optimizer": _flag,
    _ACTIVATIONS: _nothing_on,
    "bf16.auto_cast": _flag,  # inputs are token ids
    "bf16.bf16_master_weights_and_grads": _one_of(False),
    "bf16.bf16_optimizer_states": _one_of(False),
    "bf16.check_grad_overflow": _one_of(True),
    "bf16.immediate_grad_update": _one_of(False),
    "bf16.loss_scale": _one_of(0, 1),
    "fp16.auto_cast": _flag,
    "fp16.fp16_master_weights_and_grads": _one_of(False),
    "optimizer.legacy_fusion": _flag,
    "optimizer.params.amsgrad": _one_of(False),
    "optimizer.params.bias_correction": _one_of(True),
    "optimizer.params.capturable": _flag,
    "optimizer.params.dampening": _one_of(0, None),
    "optimizer.params.differentiable": _one_of(False),
    "optimizer.params.foreach": _any,
    "optimizer.params.fp32_optimizer_states": _one_of(True),
    "optimizer.params.fused": _any,
    "optimizer.params.maximize": _one_of(False),
    "optimizer.params.max_grad_norm": _one_of(0, None),
    "optimizer.params.set_grad_none": _flag,
    "scheduler.params.last_batch_iteration": _one_of(-1),
    "pipeline.activation_checkpoint_interval": _one_of(0),
    "pipeline.grad_partitioned": _flag,
    "pipeline.partition": _one_of("best"),
    "pipeline.pipe_partitioned": _flag,
    "pipeline.seed_layers": _flag,  # initial values are drawn by parameter name
    "tensor_parallel.autotp_size": _one_of(0),
    "tensor_parallel.injection_policy_tuple": _one_of(None),
    "tensor_parallel.keep_module_on_host": _flag,
    "tensor_parallel.kernel_inject": _one_of(False),
    "tensor_parallel.partition_config": _one_of(None),
    "tensor_parallel.preset_model": _any,  # transformers defines how a layer is split
    "tensor_parallel.replace_with_kernel_inject": _one_of(False),
    "tensor_parallel.tensor_parallel": _one_rank,
    "tensor_parallel.tp": _one_rank,
    "tensor_parallel.tp_overlap_comm": _flag,
    "tensor_parallel.vocab_parallel_ce_backend": _one_of("torch", "liger"),
    "tensor_parallel.vocab_parallel_lm_head": _one_of(None),
    # transformers defines where a layer's experts are; how they are computed changes only the speed
    **{
        f"expert_parallel.{name}": _any
        for name in (
            "preset_model",
            "moe_layer_pattern",
            "router_pattern",
            "expert_pattern",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "num_experts_attr",
            "top_k_attr",
            "has_shared_experts",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
            "comm_num_sm",
            "comm_qp_margin",
            "comm_max_tokens_per_rank",
        )
    },
    "expert_parallel.async_split_plan": _flag,
    "expert_parallel.combine_impl": _one_of("auto", "weighted_sum"),
    "expert_parallel.disable_triton_grouped_mm": _flag,
    "expert_parallel.expert_activation": _one_of(None),
    "expert_parallel.expert_tensor_parallel_size": _one_of(1),
    "expert_parallel.gate_up_impl": _one_of("separate", "fused"),
    "expert_parallel.load_balance_coeff": _one_of(None),
    "expert_parallel.num_expert_groups": _one_of(None),
    "expert_parallel.num_limited_groups": _one_of(None),
    "expert_parallel.route_norm": _one_of(None),
    "expert_parallel.route_scale": _one_of(1.0),
    "expert_parallel.routed_scaling_factor": _one_of("auto"),
    "expert_parallel.row_weighting_impl": _one_of("auto", "eager"),
    "expert_parallel.score_apply": _one_of("auto"),
    "expert_parallel.score_func": _one_of("auto"),
    "expert_parallel.top_k": _one_of("auto"),
    "expert_parallel.use_grouped_mm": _flag,
    "expert_parallel.validate_folding_routing": _flag,
    "aio.use_gds": _one_of(False),
    "zero_optimization.compute_grad_norm": _one_of(True),
    "zero_optimization.cpu_offload": _one_of(False, None),
    "zero_optimization.cpu_offload_param": _one_of(False, None),
    "zero_optimization.cpu_offload_use_pin_memory": _one_of(False, None),
    "zero_optimization.elastic_checkpoint": _flag,
    "zero_optimization.enable_sanity_checks": _flag,
    "zero_optimization.leaf_module": _default_leaves,
    "zero_optimization.legacy_stage1": _one_of(False),
    "zero_optimization.load_from_fp32_weights": _flag,
    "zero_optimization.log_trace_cache_warnings": _flag,
    "zero_optimization.memory_efficient_linear": _flag,
    "zero_optimization.mics_hierarchical_params_gather": _one_of(False),
    "zero_optimization.mics_shard_size": _one_of(-1, 0),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _any,
    "zero_optimization.offload_optimizer.super_offload": _one_of(False),
    "zero_optimization.overlap_comm": _one_of(None),
    "zero_optimization.override_module_apply": _one_of(True),
    "zero_optimization.parameter_alignment": _one_of(False),
    "zero_optimization.pipeline_loading_checkpoint": _one_of(False),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _flag,
    "zero_optimization.stage3_allgather_sequential": _flag,
    "zero_optimization.stage3_model_persistence_threshold": _one_of(sys.maxsize),
    "zero_optimization.stage3_module_granularity_threshold": _one_of(0),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _one_of(False),
    "zero_optimization.use_multi_rank_bucket_allreduce": _flag,
    "zero_optimization.zenflow": _one_of(None),
    "zero_optimization.zero_hpz_partition_size": _one_of(0, 1),
    "zero_optimization.zero_quantized_gradients": _one_of(False),
    "zero_optimization.zero_quantized_nontrainable_weights": _one_of(False),
    "zero_optimization.zero_quantized_weights": _one_of(False),
}
"""Dotted key -> function that tells whether a value changes nothing."""

_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)

OTHER_NAMES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "aio.thread_count": "aio.intra_op_parallelism",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _STAGE_3},
}
"""Alternative name of a key in present or earlier DeepSpeed -> its name here."""

_COMMENT = re.compile(r"(_comment|//|#)")


def is_comment(key: str) -> bool:
    """Tells whether a top-level key is a comment: JSON has no comments, so public files write `"_comment": "..."`."""
    return bool(_COMMENT.match(key))
