"""Shrinks a run to a size that can be proven on one machine: the same layout, features and code paths, tiny sizes.

Every axis with more than one rank keeps two. Engine, ZeRO stage, schedule, offload, precision, activation
checkpointing, loss, expert balancing, reduction dtype and secondary shards (hpZ) are kept. Compiled layers are traced
as for inductor, without its kernels. DeepSpeed's size thresholds are scaled to take the same code paths: buckets are
filled more than once, and matrices are partitioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from foundation.configfile import ConfigTree
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.layout import check_heads
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.config.sections.run import CompileSection, ModelSection
from pipeline.config.topology import Topology
from pipeline.models.hf_config import known_keys, resolve_hf_config
from pipeline.models.resize.shrink import not_reached, shrink
from pipeline.plan.proof.case import Case
from pipeline.plan.proof.tokens import EOS

SEQUENCE = 32
"""Tokens per sample."""

VOCABULARY = 256
_LAYOUT_KEYS = frozenset({"parallel", "memory", "aio", "compile", "communication_data_type"})
"""Sections and keys that a plain process does not need."""

_MOMENTUM, _SGD_DECAY, _LOGIT = 0.9, 1e-3, 5e-3
TRACED = "aot_eager"
"""Backend that traces layers as for inductor, forward and backward, without compiling kernels: a CPU's kernels are not
a GPU's, and compiling takes minutes."""

_BUCKET = 4096
_ZERO_SIZES = {
    0: {},
    1: {"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET},
    2: {"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET},
    3: {
        "reduce_bucket_size": _BUCKET,
        "sub_group_size": 4 * _BUCKET,
        "stage3_prefetch_bucket_size": _BUCKET,
        # norms stay on every rank; matrices are partitioned
        "stage3_param_persistence_threshold": 64,
    },
}
"""DeepSpeed's size thresholds for a model of some ten thousand parameters. With its defaults, the model would fit one
bucket, and stage 3 would keep every full parameter on every rank."""


@dataclass(frozen=True)
class ShrunkRun:
    """The shrunk version of a run, as a layout and as its reference.

    Attributes:
        topology: mesh of the shrunk layout.
        notes: features that were left out or replaced, in words for the user.
        config: config of the shrunk layout in fp32, without `data.sources`.
        precision: the run's own precision: fp32, bf16 or fp16.
    """

    topology: Topology
    notes: tuple[str, ...]
    config: ConfigTree
    precision: str

    def layout(self, name: str, *, precision: str, tokens: Path, **fields: Any) -> Case:
        """The shrunk layout as a case."""
        config = with_precision({**self.config, "data": self._data(tokens)}, precision)
        return Case(name, config, processes=self.topology.world_size, **fields)

    def reference(self, name: str, *, precision: str, tokens: Path, **fields: Any) -> Case:
        """The reference run: one plain process, without layout, activation checkpointing or chunked loss."""
        case = self.layout(name, precision=precision, tokens=tokens, **fields)
        return replace(case, config=reference_config(case.config, dp=self.topology.dp), processes=1)

    def _data(self, tokens: Path) -> ConfigTree:
        return {**self.config["data"], "sources": [{"path": str(tokens)}]}


def reference_config(config: ConfigTree, *, dp: int) -> ConfigTree:
    """Turns a layout's config into a config for one process without a layout, with the same samples in every step."""
    kept = {key: value for key, value in config.items() if key not in _LAYOUT_KEYS}
    loss = {key: value for key, value in config.get("loss", {}).items() if key != "chunk"}
    accumulation = config["gradient_accumulation_steps"] * dp
    return {
        **kept,
        "engine": "reference",
        "loss": loss,
        "zero_optimization": {"stage": 0},
        "gradient_accumulation_steps": accumulation,
    }


def with_precision(config: ConfigTree, precision: str) -> ConfigTree:
    """The config in another precision: fp32, bf16 or fp16."""
    fp16 = {**config.get("fp16", {}), "enabled": precision == "fp16"}
    changed = {**config, "bf16": {"enabled": precision == "bf16"}, "fp16": fp16}
    if precision != "bf16":
        changed.pop("data_types", None)
        changed.pop("communication_data_type", None)
    return changed


def shrink_run(run: ResolvedRun, *, steps: int, work: Path) -> ShrunkRun:
    """Shrinks a run.

    Args:
        run: the user's run, resolved for its own number of processes.
        steps: number of steps of the shrunk run.
        work: local directory for offload to a disk.

    Raises:
        ConfigError: the layout does not divide the model's heads, or its architecture cannot be shrunk.
    """
    config, notes = run.config, list(_compile_notes(run.config.compile))
    hf_config = real_model(run)
    check_heads(hf_config.to_dict(), run.topology, cp_method=config.parallel.cp_method)
    topology, shard = _shrink_mesh(run)
    lengths = config.data.sequence_length, SEQUENCE
    model = shrink(
        hf_config,
        divide=topology.tp * topology.cp,
        # one more layer than stages, so that the stages are unequal
        layers=topology.pp * run.virtual_stages + 1,
        vocab_size=VOCABULARY,
        lengths=lengths,
    )
    for key, positions in not_reached(model, lengths=lengths).items():
        notes.append(f"not reached: model.config.{key} {positions}; the proof's sequences have {SEQUENCE} tokens")
    attention = proven_attention(config.model)
    notes += _kernel_notes(run, attention)
    if config.distill is not None:
        notes.append("without the teacher: the next-token loss replaces the distillation objective")
    if config.fp8.enabled:
        notes.append("fp8 needs larger sizes: proven in bf16")
    if config.quantization_aware is not None:
        notes.append("quantization_aware rounds weights, which hides small differences: proven without")
    if config.parallel.shares is not None:
        notes.append("shares of ranks are no layout: proven with even ones")
    if config.parallel.stage_speeds is not None or config.parallel.stage_memory_gb is not None:
        notes.append("the shrunk model has too few layers to divide by speed or memory: proven with equal devices")
    known = known_keys(model.model_type)
    fields = {key: value for key, value in model.to_dict().items() if key in known}
    raw = config.model_dump(mode="json", exclude_none=True)
    lowest, highest = config.optimizer.kind.proof_lr
    given = config.optimizer.params
    params = {**raw["optimizer"]["params"], **given.rates_at(min(max(given.lr, lowest), highest))}
    params |= _visible_gradient(config.optimizer, notes) | _crossed_threshold(config.optimizer, notes)
    if params.pop("moments_dtype", None) is not None:
        notes.append("small moments are no layout, and round: proven with fp32 moments")
    shrunk = {
        "engine": config.engine,
        "model": {
            "config": {**fields, "model_type": model.model_type},
            "attn_implementation": attention,
            **_shrink_parametrization(config.model, model),
        },
        "data": {"sequence_length": SEQUENCE, "mask_documents": config.data.mask_documents},
        "loss": _shrink_loss(run, topology),
        "memory": {**raw["memory"], "every_n_layers": min(config.memory.every_n_layers, 2)},
        "moe": raw["moe"],
        "compile": {"enabled": bool(config.compile.enabled), "backend": TRACED},
        "communication_data_type": config.communication_data_type,
        "parallel": _shrink_parallel(run, topology, shard),
        "train_micro_batch_size_per_gpu": min(run.batch.micro, 2),
        "gradient_accumulation_steps": _shrink_accumulation(run, topology),
        "optimizer": {**raw["optimizer"], "params": params},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": steps // 2, "decay_num_steps": steps // 4}},
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": _shrink_zero(run, work),
        "fp16": {**raw["fp16"], "initial_scale_power": min(config.fp16.initial_scale_power, 12)},
        "data_types": raw["data_types"],
        "aio": raw["aio"],
        "run": {"dir": "replaced", "steps": steps, "seed": config.run.seed},
    }
    precision = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    needs_fp16_cpu = config.engine == "deepspeed" and config.zero_optimization.stage > 0
    if precision == "fp16" and needs_fp16_cpu and not _cpu_supports_fp16():
        precision = "fp32"
        notes.append("DeepSpeed does not support fp16 on this CPU: proven in fp32 only")
    return ShrunkRun(topology, tuple(notes), shrunk, precision)


def _kernel_notes(run: ResolvedRun, attention: str) -> Iterator[str]:
    """Yields notes on replaced GPU kernels."""
    config = run.config
    if attention != config.model.attn_implementation:
        yield f"{config.model.attn_implementation} needs a GPU: proven with {attention}"
    if run.topology.ep > 1 and (exchange := expert_exchange(config)) != "all_to_all":
        yield f"{exchange} needs a GPU: proven with all_to_all"


def real_model(run: ResolvedRun) -> PretrainedConfig:
    """The Hugging Face config of a run's full-size model, for data that has the same special tokens as a proof's.

    Raises:
        ConfigError, DataError: the architecture or a key is unknown, or `model.path` is not a Hugging Face folder.
    """
    tokenizer = {"vocab_size": 1, "bos_id": None, "eos_id": EOS, "pad_id": None}
    changes = {} if run.place is None else dict(run.place.stage.model)
    length = run.config.data.sequence_length
    return resolve_hf_config(run.config.model, tokenizer=tokenizer, sequence_length=length, changes=changes)


def proven_attention(section: ModelSection) -> str:
    """The attention implementation in a proof, on CPUs."""
    given: str = section.attn_implementation
    return "sdpa" if given.startswith("flash_attention") else given


def _shrink_parametrization(section: ModelSection, model: PretrainedConfig) -> ConfigTree:
    """CompleteP from a base model of two layers; its heads and width are half the model's where they can be halved."""
    if section.parametrization == "standard":
        return {}
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    sizes = {key: getattr(model, key) for key in keys if getattr(model, key, None)}
    even = all(value % 2 == 0 for value in sizes.values())
    base = {key: value // 2 for key, value in sizes.items()} if even else {}
    return {"parametrization": section.parametrization, "base": {**base, "num_hidden_layers": 2}}


def _compile_notes(section: CompileSection) -> Iterator[str]:
    if section.enabled:
        yield f"compiled layers are proven as they are traced ({TRACED}), without the kernels of {section.backend}"
    elif section.enabled is None:
        yield "proven without compilation, which is on by default on a GPU: compile.enabled true proves traced layers"


def _visible_gradient(optimizer: OptimizerSection, notes: list[str]) -> ConfigTree:
    """Replaces parameters of an optimizer (SGD) whose first state would not show the first gradient."""
    replaced: ConfigTree = {}
    given, need = optimizer.type, optimizer.kind.states_need
    if need and not optimizer.kind.states:
        replaced[need] = _MOMENTUM
        notes.append(f"{given} without {need} keeps no state that shows the first gradient: proven with {_MOMENTUM}")
    if optimizer.kind.l2_decay and optimizer.params.weight_decay > _SGD_DECAY:
        # with decay 0.1 and clipping to a fiftieth, rounding of gradient plus decay was 2.6e-5 of the gradient
        replaced["weight_decay"] = _SGD_DECAY
        notes.append(f"in {given}'s momentum a larger weight decay hides the first gradient: proven with {_SGD_DECAY}")
    return replaced


def _crossed_threshold(optimizer: OptimizerSection, notes: list[str]) -> ConfigTree:
    """A QK-Clip threshold that a tiny model's logits cross."""
    given = optimizer.params.qk_clip
    if given is None or given <= _LOGIT:
        return {}
    notes.append(f"optimizer.params.qk_clip {given:g}: a tiny model's logits are small, proven with {_LOGIT}")
    return {"qk_clip": _LOGIT}


def _cpu_supports_fp16() -> bool:
    """Whether the CPU has fp16 instructions; DeepSpeed checks the same before it runs fp16 on a CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _shrink_mesh(run: ResolvedRun) -> tuple[Topology, int | None]:
    """The smallest mesh that keeps every axis, and its hybrid shard size (`parallel.hybrid_shard_size`)."""
    pp, dp, cp, tp = (min(size, 2) for size in run.topology.sizes)
    shard, data = run.config.parallel.hybrid_shard_size, run.topology.dp * run.topology.cp
    hpz = run.config.zero_optimization.zero_hpz_partition_size
    replicated = not hpz and shard is not None and 1 < shard < data
    if hpz or replicated:  # two shard groups, or replicas, of two ranks
        dp = 4 // cp
    ep, edp = min(run.topology.ep, 2), min(run.topology.edp, 2)
    if ep > 1:
        dp *= next(times for times in (1, 2, 4) if dp * times * cp * tp % (ep * edp) == 0)
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    if hpz or shard is None:
        return topology, None
    return topology, 2 if replicated else dp * cp if shard > 1 else 1


def _shrink_parallel(run: ResolvedRun, topology: Topology, shard: int | None) -> ConfigTree:
    given = run.config.parallel
    section: ConfigTree = {"pp": topology.pp, "tp": topology.tp, "cp": topology.cp}
    section |= {"schedule": given.schedule, "cp_method": given.cp_method}
    if topology.ep > 1:
        section |= {"ep": topology.ep, "ep_overlap": run.overlaps_exchange}
    if run.virtual_stages > 1:
        section["virtual_stages"] = run.virtual_stages
    return section if shard is None else {**section, "hybrid_shard_size": shard}


def _shrink_loss(run: ResolvedRun, topology: Topology) -> ConfigTree:
    loss = run.config.loss
    section: ConfigTree = {"z_loss": loss.z_loss}
    positions = run.batch.sequence_length // run.topology.cp
    if loss.chunk is not None and loss.chunk < positions:
        shrunk_positions = SEQUENCE // topology.cp
        # equal chunks stay equal, and a shorter last chunk stays shorter
        section["chunk"] = shrunk_positions // 2 if positions % loss.chunk == 0 else shrunk_positions * 5 // 8
    return section


def _shrink_accumulation(run: ResolvedRun, topology: Topology) -> int:
    accumulation = run.batch.accumulation
    if topology.pp == 1:
        return min(accumulation, 2)
    return min(accumulation, 2) if accumulation < 2 * run.topology.pp else 4


def _shrink_zero(run: ResolvedRun, work: Path) -> ConfigTree:
    zero = run.config.zero_optimization
    section: ConfigTree = zero.model_dump(mode="json", exclude_none=True)
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(zero, name).device
        if device == "none":
            section.pop(name)
        elif device == "nvme":
            section[name]["nvme_path"] = str(work)
            if name == "offload_param":  # DeepSpeed's default buffers would take gigabytes on every rank
                section[name] |= {"buffer_size": 1 << 16, "max_in_cpu": 0}
    secondary = {"zero_hpz_partition_size": 2} if zero.zero_hpz_partition_size else {}
    if run.config.engine == "deepspeed":
        return {**section, **_ZERO_SIZES[zero.stage], **secondary}
    return {"stage": zero.stage, **secondary}
