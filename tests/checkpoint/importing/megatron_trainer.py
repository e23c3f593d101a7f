"""Trains with megatron-core on the CPU and lets it save: megatron_trainer.py CASES.json OUT.json, one rank a process.

megatron-core is imported from the folder that `HEADRACE_MEGATRON_CORE` names, where it is set:

    pip install --no-deps --target FOLDER megatron-core==0.16.1

A case is as in `source_trainers`, with `tp`, `pp`, `ep`, and `sharding`: how its distributed optimizer is stored. What
is trained, the optimizer, the schedules and what is written are megatron-core's; `generate_state_dict` of Megatron-LM,
which is not in the package, is repeated by `save`. Its code asks for CUDA in many places: `OnCpu` gives it the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

FOLDER = "HEADRACE_MEGATRON_CORE"
if folder := os.environ.get(FOLDER):
    sys.path.insert(0, folder)


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on CUDA, and lets tensors there say that they are on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class NoStream:
    """Stands for streams and events of CUDA."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what they take."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def without_cuda() -> None:
    """Lets megatron-core be imported and run where torch has no CUDA, transformer-engine and apex are missing."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[return-value]  # a backward pass is not under `OnCpu`
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda._lazy_call = lambda call, **_: call()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.default_generators = defaultdict(lambda: torch.default_generator)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.Stream = torch.cuda.Event = NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = NoStream
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[return-value]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    np.product = np.prod  # type: ignore[attr-defined]  # older ones are of numpy 1
    from megatron.core.optimizer import distrib_optimizer  # noqa: PLC0415
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    # without transformer-engine the first is never defined, and the second refuses an empty list
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    distrib_optimizer.quantize_param_shard = lambda *_: None
    # torch's optimizer has a step for each parameter, as Transformer Engine's has not: no checkpoint has it
    of = distrib_optimizer.DistributedOptimizer
    states_of, set_states = of._get_main_param_and_optimizer_states, of._set_main_param_and_optimizer_states
    of._set_main_param_and_optimizer_states = lambda optimizer, parameter, values: set_states(
        optimizer, parameter, {**states_of(optimizer, parameter), **values}
    )


def arguments_of(case: dict[str, Any]) -> argparse.Namespace:
    """Megatron-LM's arguments of a case, those that it saves of them which an import looks at, and some others."""
    from megatron.core.transformer.enums import AttnBackend  # noqa: PLC0415
    from source_trainers import BATCH, MODEL, SEQUENCE  # noqa: PLC0415

    fields = case.get("hf", {**MODEL, **case.get("model", {})})
    gpt = fields["model_type"] == "gpt2"
    heads = fields["n_head"] if gpt else fields["num_attention_heads"]
    width = fields["n_embd"] if gpt else fields["hidden_size"]
    return argparse.Namespace(
        attention_backend=AttnBackend.auto,
        params_dtype=torch.bfloat16 if case.get("bf16") else torch.float32,
        consumed_train_samples=case["saved"] * BATCH,
        num_layers=fields["n_layer"] if gpt else fields["num_hidden_layers"],
        hidden_size=width,
        ffn_hidden_size=4 * width if gpt else fields["intermediate_size"],
        num_attention_heads=heads,
        group_query_attention=not gpt,
        num_query_groups=heads if gpt else fields["num_key_value_heads"],
        kv_channels=width // heads,
        norm_epsilon=1e-5 if gpt else 1e-6,
        position_embedding_type="learned_absolute" if gpt else "rope",
        max_position_embeddings=SEQUENCE,
        rotary_base=10000,
        swiglu=not gpt,
        openai_gelu=False,
        bias_gelu_fusion=False,
        num_experts=fields.get("num_local_experts"),
        moe_router_topk=fields.get("num_experts_per_tok", 2),
        qk_layernorm=fields["model_type"] == "qwen3",
        add_qkv_bias=fields["model_type"] == "qwen2",
        untie_embeddings_and_output_weights=not fields.get("tie_word_embeddings", True),
        padded_vocab_size=case.get("padded", fields["vocab_size"]),
        sharding=case.get("sharding"),
    )


def model_of(case: dict[str, Any], arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Its GPT model, in its own DDP; and its config."""
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415
    from megatron.core.transformer.module import Float16Module  # noqa: PLC0415

    tp, pp, ep = (case.get(name, 1) for name in ("tp", "pp", "ep"))
    norm = "RMSNorm" if arguments.swiglu else "LayerNorm"
    experts = arguments.num_experts
    config = TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        layernorm_epsilon=arguments.norm_epsilon,
        normalization=norm,
        gated_linear_unit=arguments.swiglu,
        activation_func=torch.nn.functional.silu if arguments.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not arguments.swiglu,
        add_qkv_bias=arguments.add_qkv_bias,
        qk_layernorm=arguments.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        sequence_parallel=bool(experts and tp > 1),
        params_dtype=arguments.params_dtype,
        pipeline_dtype=arguments.params_dtype,
        bf16=case.get("bf16", False),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        num_moe_experts=experts,
        moe_router_topk=arguments.moe_router_topk,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=arguments.qk_layernorm, normalization=norm)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
    )
    model = Float16Module(config, model) if case.get("bf16") else model
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=bool(arguments.sharding), grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, model), config


def train(case: dict[str, Any]) -> list[float]:
    """The losses of all steps; on ranks that are no first one of the last stage, none."""
    from megatron.core import parallel_state, tensor_parallel  # noqa: PLC0415
    from megatron.core.distributed import finalize_model_grads  # noqa: PLC0415
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: PLC0415
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415
    from source_trainers import DECAY, LR, SEQUENCE, all_samples  # noqa: PLC0415

    parallel_state.initialize_model_parallel(
        case.get("tp", 1), case.get("pp", 1), expert_model_parallel_size=case.get("ep", 1)
    )
    torch.manual_seed(11)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    arguments = arguments_of(case)
    model, config = model_of(case, arguments)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        adam_beta2=0.999,
        clip_grad=1.0,
        bf16=config.bf16,
        params_dtype=arguments.params_dtype,
        use_distributed_optimizer=bool(arguments.sharding),
    )
    optimizer = get_megatron_optimizer(settings, [model])
    schedule = OptimizerParamScheduler(optimizer, LR, LR, LR, 0, 100, "constant", DECAY, DECAY, 100, "constant")
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    def forward(rows: Any, of: Any) -> Any:
        batch = next(rows)
        places = torch.arange(SEQUENCE).expand(len(batch), -1)
        losses = of(input_ids=batch[:, :-1].contiguous(), position_ids=places, attention_mask=mask, labels=batch[:, 1:])
        return losses, lambda each: (each.float().mean(), {"loss": each.detach().float().mean()})

    found = []
    loaded = load(case, model, optimizer, arguments) if "load" in case else 0
    for step in range(loaded + 1, case["steps"] + 1):
        rows = all_samples(case, step).chunk(ranks)[rank]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(rows.chunk(2)),
            model=[model],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=len(rows) // 2,
            forward_only=False,
        )
        optimizer.step()
        schedule.step(1)
        if losses:
            mean = torch.stack([each["loss"] for each in losses]).mean()
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            found.append(float(mean) / ranks)
        if step == case["saved"]:
            save(case, model, optimizer, schedule, arguments)
    parallel_state.destroy_model_parallel()
    return found


def load(case: dict[str, Any], model: Any, optimizer: Any, arguments: argparse.Namespace) -> int:
    """Loads what `headrace export --format megatron` has written, as Megatron-LM does; its iteration."""
    from megatron.core import dist_checkpointing  # noqa: PLC0415

    content = content_of(arguments)
    inner = model.module.module if config_is_16_bit(arguments) else model.module
    model.zero_grad_buffer()
    optimizer.step()  # torch's optimizer, in the place of Transformer Engine's, has no states before
    state: dict[str, Any] = {"model": inner.sharded_state_dict(metadata=content)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=content)
    root = Path(case["load"])
    newest = int((root / "latest_checkpointed_iteration.txt").read_text())
    loaded = dist_checkpointing.load(state, str(root / f"iter_{newest:07d}"))
    inner.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for each in optimizer.chained_optimizers:
        for values in each.optimizer.state.values():
            values["step"] = values["step"].clone()  # it loads one tensor for all, which each would count up
    return int(loaded["iteration"])


def content_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the state is to be sharded."""
    from megatron.core import parallel_state  # noqa: PLC0415

    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if arguments.sharding:
        content["distrib_optim_sharding_type"] = arguments.sharding
    return {**content, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def save(case: dict[str, Any], model: Any, optimizer: Any, schedule: Any, arguments: argparse.Namespace) -> None:
    """What Megatron-LM's `generate_state_dict` collects, by megatron-core's `dist_checkpointing.save`."""
    from megatron.core import dist_checkpointing  # noqa: PLC0415
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: PLC0415

    metadata = content_of(arguments)
    inner = model.module.module if config_is_16_bit(arguments) else model.module
    state: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": case["saved"]}
    state["model"] = inner.sharded_state_dict(metadata=metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = schedule.state_dict()
    root = Path(case["folder"])
    folder = root / f"iter_{case['saved']:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text(str(case["saved"]))
    dist.barrier()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=content)


def config_is_16_bit(arguments: argparse.Namespace) -> bool:
    """Whether the model is in a `Float16Module`."""
    return bool(arguments.params_dtype == torch.bfloat16)


def main() -> None:
    """Trains all cases; a case's losses are those of the last stage."""
    dist.init_process_group("gloo")
    without_cuda()
    cases: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, list[float]] = {}
    with OnCpu():
        for name, case in cases.items():
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, train(case))
            results[name] = next(losses for losses in everywhere if losses)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
