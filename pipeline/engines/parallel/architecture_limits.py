"""Checks a layout against the model's architecture, before the process group is initialized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.layout import check_heads
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import MoeSection
from pipeline.engines.common import matrices_of
from pipeline.engines.parallel.activation_checkpointing import check_activation_checkpointing
from pipeline.engines.parallel.architecture_trial import check_architecture
from pipeline.engines.parallel.compilation import check_compile
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.engines.parallel.experts import check_expert_parallel, expert_modules
from pipeline.engines.parallel.fp8 import check_fp8
from pipeline.engines.parallel.fused_kernels import check_exchange
from pipeline.engines.parallel.kept_layers import check_kept_layers
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.qk_clip_check import check_qk_clip
from pipeline.engines.parallel.quantization_aware import check_quantization_aware
from pipeline.engines.parallel.random_numbers import check_random_numbers
from pipeline.engines.parallel.recurrent import recurrent_blocks
from pipeline.engines.parallel.stage_plan import stage_plan
from pipeline.engines.parallel.stages import StageLayers, layer_list, shared_between_stages
from pipeline.engines.parallel.tensor import check_tp_plan, undivided_blocks, uses_given_plan
from pipeline.engines.parallel.tensor_plan import BlockKind, derived_blocks
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import one_line, read_hf_config
from pipeline.models.padding import check_padded_positions
from pipeline.models.query_key_rows import attention_heads
from pipeline.models.resize.shrink import shrink
from pipeline.models.routers import find_routers, has_experts

_NOT_TRAINED = ("classifier_dropout", "summary_first_dropout", "seq_classif_dropout")
"""Dropout keys for heads that a causal language model does not have."""
_V, _T = 32, 16


def check_layout(run: ResolvedRun, model: nn.Module, *, packages: bool = True) -> None:
    """Refuses a layout that this architecture does not support.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        packages: whether the layout's packages have to be installed here; a plan may be made for another machine.

    Raises:
        ConfigError: the first problem found: the field, the reason, and what works instead.
    """
    config, topology = model.config, run.topology
    assert isinstance(config, PretrainedConfig)
    _refuse_router_loss(config)
    section = run.config.model
    if section.path is not None and section.keep_layers is not None:
        check_kept_layers(read_hf_config(section.path), section.keep_layers)
    check_padded_positions(model, sequence_length=run.batch.sequence_length)
    if not run.plain:
        where = "model.config" if run.config.model.path is None else f"{run.config.model.path}/config.json"
        _refuse_dropout(config, where=where)
        check_random_numbers(config, where=where)
    trained = run.config.model.path is not None
    check_heads(config.to_dict(), topology, cp_method=run.config.parallel.cp_method, trained=trained)
    if topology.ep > 1:
        shard = run.config.parallel.hybrid_shard_size
        within = topology.stage_ranks if shard is None else gcd(topology.stage_ranks, shard * topology.tp)
        check_expert_parallel(model, ep=topology.ep, ranks=within)
        check_exchange(expert_exchange(run.config), model, packages=packages)
    if topology.tp > 1:
        check_tp_plan(model, tp=topology.tp, table=run.config.parallel.tp_plan)
        _check_heads_divided(run, model)
    if topology.pp > 1:
        stages = pipeline_stages(run, model)
        _check_stages_of_experts(run, model, stages)
        _check_messages(run, model, stages)
    check_activation_checkpointing(model, run.config.memory)
    check_compile(run.config.compile)
    check_fp8(run.config.fp8, model, tp=topology.tp, table=run.config.parallel.tp_plan, packages=packages)
    check_quantization_aware(run.config.quantization_aware, model)
    check_experts(run.config.moe, model)
    matrices_of(model, run.config.optimizer)
    check_qk_clip(run, model)
    check_architecture(run, config)


def _check_heads_divided(run: ResolvedRun, model: nn.Module) -> None:
    """Refuses QK-Clip if tensor-parallel ranks do not have different heads of an attention module."""
    threshold = run.config.optimizer.params.qk_clip
    if threshold is None:
        return
    attentions = [each.name for each in attention_heads(model)]
    for block, reason in undivided_blocks(model, tp=run.topology.tp, table=run.config.parallel.tp_plan).items():
        if any(f"{name}.".startswith(f"{block}.") for name in attentions):
            why = f"{block} {reason}, and QK-Clip needs the logits of each rank's own heads"
            remedy = "use parallel.tp 1 (with ZeRO, FSDP2, pp or cp), or remove it"
            raise ConfigError("optimizer.params.qk_clip", threshold, why=why, remedy=remedy)


def _check_stages_of_experts(run: ResolvedRun, model: nn.Module, stages: Sequence[StageLayers]) -> None:
    """Refuses a pipeline stage without experts if the other stages would wait forever for its part of the norm."""
    config = run.config
    zero_1_in_bf16 = config.engine == "deepspeed" and config.zero_optimization.stage == 1 and config.bf16.enabled
    if run.topology.ep == 1 or not zero_1_in_bf16:
        return
    experts = {id(module) for _, module in expert_modules(model)}
    layers = layer_list(model)[1]
    for stage in stages:
        if not any(id(module) in experts for layer in layers[slice(*stage.layers)] for module in layer.modules()):
            why = f"pipeline stage {stage.index} has no experts, and DeepSpeed's ZeRO-1 in bf16 needs them on each"
            remedy = "use zero_optimization.stage 0, engine torch with stage 2, or a smaller parallel.pp"
            raise ConfigError("parallel.ep", run.topology.ep, why=why, remedy=remedy)


def _check_messages(run: ResolvedRun, model: nn.Module, stages: Sequence[StageLayers]) -> None:
    """Refuses layouts in which stages cannot have copies of shared weights, or cannot divide what they send."""
    kind, topology = model.config.model_type, run.topology  # type: ignore[union-attr]
    shared = shared_between_stages(model, stages)
    if shared and len(stages) > 2:
        name = min(shared)
        why = f"layers of {kind} in {len(stages)} stages share {name}, and only two stages can have copies of a weight"
        raise ConfigError("parallel.pp", topology.pp, why=why, remedy="use parallel.pp 2 without virtual stages")
    for axis, size in (("tp", topology.tp), ("cp", topology.cp)):
        if size > 1 and stage_plan(model).carried:
            why = f"layers of {kind} hand on more than hidden states, and each of its ranks has a part of them"
            raise ConfigError(f"parallel.{axis}", size, why=why, remedy=f"use parallel.{axis} 1, or parallel.pp 1")


def layout_lines(family: str) -> Iterator[str]:
    """Describes how an architecture is divided into pipeline stages and tensor-parallel shards, or why it is not.

    Args:
        family: `model_type` of transformers, with its default config, or a Hugging Face folder.

    Raises:
        ConfigError: transformers does not know the family.
    """
    if not Path(family).is_dir() and family not in CONFIG_MAPPING:
        remedy = "use a model_type of transformers, e.g. gpt2, or a Hugging Face folder"
        raise ConfigError("FAMILY", family, why="transformers has no such model_type", remedy=remedy)
    config = read_hf_config(family) if Path(family).is_dir() else CONFIG_MAPPING[family]()
    for lines in (_stage_lines, _shard_lines):
        try:
            tiny = shrink(config, divide=2, layers=2, vocab_size=_V)
            yield from lines(build_meta(tiny, dtype=torch.float32, attn_implementation="eager"))
        except ConfigError as refused:
            yield f"refused: {refused.why}"
    yield "headrace check proves a layout on a tiny model: its loss and every gradient"


def _stage_lines(model: nn.Module) -> Iterator[str]:
    plan = stage_plan(model)
    yield f"pipeline stages ({'derived' if plan.derived else 'base_model_pp_plan'})"
    for part, names in (("before", plan.before), ("layers", (plan.layers,)), ("after", plan.after)):
        yield f"  {part}  {', '.join(names)}"
    if plan.carried:
        yield "  stages also send what layers hand on besides hidden states [B, T, D]"


def _shard_lines(model: nn.Module) -> Iterator[str]:
    given = uses_given_plan(model.config)
    yield f"tensor-parallel shards ({'base_model_tp_plan' if given else 'derived'})"
    blocks: dict[str, dict[str, str]] = {}
    for name, style in check_tp_plan(model, tp=2).items() if given else ():
        block, _, linear = name.rpartition(".")
        blocks.setdefault(BlockKind.of(block, model).name, {})[linear] = style
    heads = recurrent_blocks(model)
    for name, plan in ({} if given else derived_blocks(model, tp=2)).items():
        kind = BlockKind.of(name, model.get_submodule(name))
        divided = {"heads": "divided, with whole weights"} if heads.get(name) else {}
        blocks[f"{kind.name} ({kind.module})"] = divided or dict(plan.styles)
    for block, styles in blocks.items():
        yield f"  {block}  {', '.join(f'{name} {style}' for name, style in styles.items()) or 'whole on every rank'}"
    yield "  embedding and head  over the vocabulary"


def _refuse_router_loss(config: PretrainedConfig) -> None:
    if getattr(config, "output_router_logits", False):
        why = (
            "transformers' load-balancing loss is computed over each micro-batch, and so depends on the layout;"
            " headrace does not compute it"
        )
        remedy = "set it to false, and moe.balance to aux_loss, which is computed over the global batch"
        raise ConfigError("model.config.output_router_logits", True, why=why, remedy=remedy)


def _refuse_dropout(config: PretrainedConfig, *, where: str) -> None:
    """Refuses dropout: every process draws from its own generator, so no two layouts would train the same model."""
    dropouts = {
        key: value
        for key, value in config.to_dict().items()
        if ("dropout" in key or key.endswith(("pdrop", "layerdrop"))) and key not in _NOT_TRAINED
    }
    for key, value in dropouts.items():
        if isinstance(value, float) and value > 0:
            zeros = ", ".join(
                f'"{name}": 0.0' for name, given in dropouts.items() if isinstance(given, float) and given
            )
            why = "the dropout masks would depend on the layout, and a resumed run would not reproduce them"
            raise ConfigError(f"model.config.{key}", value, why=why, remedy=f"set {zeros} in {where}")


def check_experts(section: MoeSection, model: nn.Module) -> None:
    """Checks that `moe.balance` works for the model's architecture.

    Args:
        section: the config's `moe`.
        model: the full model, on meta.

    Raises:
        ConfigError: the model has no experts, no router that can be observed, or no correction bias.
    """
    balance, config = section.balance, model.config
    assert isinstance(config, PretrainedConfig)
    if balance == "none":
        return
    routers, kind = find_routers(model), config.model_type
    if not routers:
        why = (
            f"{kind} has no router of experts that transformers names, with one output for each expert"
            if has_experts(config.to_dict())
            else "it has no experts"
        )
        raise ConfigError("moe.balance", balance, why=why, remedy="remove it, or use another architecture")
    if balance == "bias" and any(router.bias_owner is None for router in routers):
        why = f"the routers of {kind} have no correction bias (a buffer e_score_correction_bias or expert_bias)"
        raise ConfigError("moe.balance", balance, why=why, remedy="use aux_loss")
    if len({router.experts for router in routers}) > 1:
        why = f"layers of {kind} have different numbers of experts"
        raise ConfigError("moe.balance", balance, why=why, remedy="use none")
    failure = _failure(section, config)
    if failure is not None:
        why = f"the routers of {kind} cannot be balanced from outside: {failure}"
        raise ConfigError("moe.balance", balance, why=why, remedy="use none, or another architecture")


def _failure(section: MoeSection, config: PretrainedConfig) -> str | None:
    """Returns why a step of a tiny model misses its routers, or does not count tokens once per layer; else None."""
    try:
        tiny: Any = build_meta(
            shrink(config, divide=1, layers=2, vocab_size=_V), dtype=torch.float32, attn_implementation="eager"
        )
        materialize(tiny, InitByName(tiny, seed=0), device=torch.device("cpu"))
        balancer = make_balancer(section, tiny, device=torch.device("cpu"))
        if balancer is None:
            return "a tiny model of this architecture has none"
        balancer.attach(tiny.train())
        balancer.begin_step(1.0)
        balancer.begin_micro_batch(torch.ones(1, _T, dtype=torch.bool))
        logits = tiny(input_ids=torch.arange(_T)[None] % _V, use_cache=False).logits
        logits.sum().backward()
        if not balancer.observed:
            return "they return no logits, weights and indices of the chosen experts"
    except ConfigError:
        raise
    except Exception as error:  # each architecture computes in its own way
        return one_line(error)
    return None
