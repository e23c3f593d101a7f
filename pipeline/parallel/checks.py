"""What only the model can tell about a layout, asked before a process group is opened."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.config.layout_rules import check_heads
from pipeline.config.rules import ResolvedRun
from pipeline.parallel.activation_checkpointing import check_activation_checkpointing
from pipeline.parallel.architecture_check import check_architecture
from pipeline.parallel.assemble import stages_of
from pipeline.parallel.costs import window_of
from pipeline.parallel.tensor import check_plan

_NOT_TRAINED = ("classifier_dropout", "summary_first_dropout", "seq_classif_dropout")
"""Dropouts of heads that a causal language model does not have."""


def check_layout(run: ResolvedRun, model: nn.Module) -> None:
    """Refuses what this architecture cannot do in this layout.

    Args:
        run: the resolved config.
        model: whole, on meta.

    Raises:
        ConfigError: the first thing that is wrong: what is missing, and what works instead.
    """
    config, topology = model.config, run.topology
    assert isinstance(config, PretrainedConfig)
    _refuse_router_loss(config)
    if not run.plain:
        _refuse_dropout(run, config)
    check_heads(config.to_dict(), topology, context=run.config.parallel.cp_method)
    if topology.tp > 1:
        check_plan(model, tp=topology.tp)
    if topology.pp > 1:
        stages_of(run, model)
    if topology.cp > 1 and run.config.parallel.cp_method == "ring":
        _check_ring(run, config)
    check_activation_checkpointing(model, run.config.memory)
    check_architecture(run, config)


def _refuse_router_loss(config: PretrainedConfig) -> None:
    if getattr(config, "output_router_logits", False):
        why = "the experts' load-balancing loss is not offered, and without it the logits are of no use"
        raise ConfigError("model.config.output_router_logits", True, why=why, remedy="set it to false")


def _refuse_dropout(run: ResolvedRun, config: PretrainedConfig) -> None:
    """Dropout draws from each process's own generator: no two layouts would train the same model."""
    dropouts = {
        key: value
        for key, value in config.to_dict().items()
        if ("dropout" in key or key.endswith(("pdrop", "layerdrop"))) and key not in _NOT_TRAINED
    }
    for key, value in dropouts.items():
        if isinstance(value, float) and value > 0:
            rest = ", ".join(f'"{each}": 0.0' for each, given in dropouts.items() if isinstance(given, float) and given)
            where = "model.config" if run.config.model.path is None else f"{run.config.model.path}/config.json"
            why = "what is dropped would depend on the layout, and a resumed run would not go on as it was"
            raise ConfigError(f"model.config.{key}", value, why=why, remedy=f"set {rest} in {where}")


def _check_ring(run: ResolvedRun, config: Any) -> None:
    length = run.batch.sequence_length
    windows = [window_of(config, number) for number in range(config.num_hidden_layers)]
    smallest = min((window for window in windows if window is not None), default=length)
    if smallest < length:
        why = f"ring attention knows no mask but the causal one, and there is a sliding window of {smallest} positions"
        raise ConfigError("parallel.cp_method", "ring", why=why, remedy="use ulysses")
