"""The run that is planned: a config resolved for a number of nodes, and its model on meta; no data, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundation.errors import ConfigError, DataError
from foundation.paths import is_store_url
from foundation.remote_directory import manifest_of
from pipeline.config.load import changed, read_config
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config, Fp8Section
from pipeline.data.dataset import tokenizer_details
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.fp8 import check_fp8_capability, experts_in_fp8, torchao_note
from pipeline.engines.sizes.memory import caveat
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.plan.imbalance import with_imbalance
from pipeline.plan.predict.host_plan import host_plan
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.known import load_machine, machine_of_device
from pipeline.runtime.machines.machine import Machine
from pipeline.runtime.machines.ranks import with_ranks

VOCABULARY = 128_256
"""Number of ids, as in Llama 3, where neither the config nor a dataset gives it."""


@dataclass(frozen=True)
class PlannedRun:
    """A run to plan, with its model's costs and its machine.

    Attributes:
        run: the run, resolved for its processes.
        costs: sizes and FLOPs of its model.
        machine: machine that it runs on, with the rates that its ranks get.
        vocabulary: number of ids of the tokenizer.
        notes: assumptions, one sentence each.
    """

    run: ResolvedRun
    costs: ModelCosts
    machine: Machine
    vocabulary: int
    notes: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes that the processes of its mesh need."""
        return -(-self.run.topology.world_size // self.machine.devices_per_node)


def open_run(
    path: str,
    overrides: Sequence[str],
    machine: Machine,
    *,
    nodes: int | None,
    processes: int | None = None,
    imbalance: float | None = None,
) -> PlannedRun:
    """Reads a config, resolves it for a number of nodes and builds its model on meta.

    Args:
        path: path of the config.
        overrides: overrides of the config, as texts of `--set`.
        machine: machine of the nodes.
        nodes: number of nodes; None for the fewest that the layout needs.
        processes: number of ranks, all on one host on a CPU; None for all devices of the nodes.
        imbalance: rows of the fullest expert-parallel rank over the mean; None for the load that `expert_load` assumes.

    Raises:
        ConfigError, DataError: the config cannot run, or the formulas do not hold for its model.
    """
    config = read_config(path, overrides).config
    notes: list[str] = []
    run = resolve(config, world_size=processes) if processes else _on_nodes(config, machine, nodes, notes)
    run = with_imbalance(run, imbalance)
    ranks, devices = run.topology.world_size, machine.devices_per_node
    if processes and not machine.gpu and ranks > devices:
        notes.append(f"{ranks} ranks share the {devices} cores of a host: each has {devices / ranks:.2g} of one.")
        machine = with_ranks(machine, ranks)
    else:
        machine = with_ranks(machine, min(ranks, devices))
    return planned_run(run, machine, vocabulary=_vocabulary(config, notes), notes=notes)


def planned_run(run: ResolvedRun, machine: Machine, *, vocabulary: int, notes: Sequence[str] = ()) -> PlannedRun:
    """Builds the model of a resolved run on meta and counts it.

    Args:
        run: the run, resolved for its processes.
        machine: machine of the nodes.
        vocabulary: number of token ids of the tokenizer.
        notes: assumptions so far, one sentence each.

    Raises:
        ConfigError, DataError: the model cannot be built, does not support the layout, or has no formulas.
    """
    config = run.config
    tokenizer = {"vocab_size": vocabulary, "bos_id": 0, "eos_id": 1, "pad_id": None}
    changes = {} if run.place is None else dict(run.place.stage.model)
    length = config.data.sequence_length
    hf_config = resolve_hf_config(config.model, tokenizer=tokenizer, sequence_length=length, changes=changes)
    how: dict[str, Any] = {"attn_implementation": attention_of(run), "ahead": config.loss.ahead}
    model = build_meta(hf_config, dtype=model_dtype(config), **how)
    check_layout(run, model, packages=False)
    check_fp8_machine(config.fp8, model, machine)
    if config.fp8.enabled and (missing := torchao_note()) is not None:
        notes = [*notes, missing]
    if run.topology.ep > 1 and (exchange := expert_exchange(config)) != "all_to_all":
        notes = [*notes, f"{exchange} is counted as an exchange that sends each token once to a node."]
    if (known := caveat(run)) is not None:
        notes = [*notes, known]
    if config.distill is not None:
        notes = [*notes, "A teacher's forward pass and its memory are not counted."]
    if not machine.gpu and config.compile.enabled is None:  # as a run does
        run = replace(run, config=changed(config, {"compile.enabled": False}))
    costs = ModelCosts.of(model, sequence_length=config.data.sequence_length)
    node = host_plan(run, costs.shares(run).footprint, machine)
    if node.crowded:
        notes = [
            *notes,
            f"The checkpoints that run.dir keeps take {shown_bytes(node.checkpoints)}, and a node's local disks have"
            f" {shown_bytes(node.disk_bytes or 0)}: other storage, or a smaller run.keep_checkpoints.",
        ]
    return PlannedRun(run, costs, machine, vocabulary, tuple(notes))


def check_fp8_machine(section: Fp8Section, model: nn.Module, machine: Machine) -> None:
    """Refuses fp8 where a run on the machine would: the machine's compute capability is known.

    Raises:
        ConfigError: the machine's GPUs are too old for the recipe, or have no kernel for experts in fp8.
    """
    if machine.compute_capability is not None:
        experts = experts_in_fp8(section, model)
        check_fp8_capability(section, machine.compute_capability, name=machine.name, experts=experts)


def _on_nodes(config: Config, machine: Machine, nodes: int | None, notes: list[str]) -> ResolvedRun:
    """The run on all devices of `nodes` nodes, or on the fewest nodes that its mesh needs if there is no number."""
    if nodes is not None:
        return resolve(config, world_size=nodes * machine.devices_per_node)
    refused: ConfigError | None = None
    for processes in _worlds(machine.devices_per_node):
        try:
            run = resolve(config, world_size=processes)
        except ConfigError as error:
            refused = refused or error
            continue
        if not run.batch.padding_rows and not run.spare and not run.fallback:
            if processes < machine.devices_per_node:
                notes.append(f"The batch takes {processes} of the {machine.devices_per_node} devices of a node.")
            return run
    if refused is not None:
        raise refused
    return resolve(config, world_size=machine.devices_per_node)


def _worlds(per_node: int) -> list[int]:
    """Numbers of processes to try: a node, several nodes, then parts of a node."""
    return [*(per_node * nodes for nodes in (1, 2, 4, 8, 16, 32, 64, 128)), *_divisors(per_node)]


def _divisors(number: int) -> list[int]:
    return [each for each in range(number - 1, 0, -1) if number % each == 0]


def _vocabulary(config: Config, notes: list[str]) -> int:
    """Number of ids of the dataset's tokenizer; the config's where there is no dataset yet."""
    source = next(iter(config.data.sources), None)
    path = getattr(source, "path", None)
    if path is not None and (is_store_url(path) or Path(path).is_dir()):
        try:
            return int(tokenizer_details(manifest_of(path, kind="tokens"))["vocab_size"])
        except (DataError, KeyError):
            pass  # a run may be planned before its data is complete
    given: Any = (config.model.config or {}).get("vocab_size")
    if isinstance(given, int):
        return given
    if config.model.path is None:
        notes.append(f"The dataset is not there: {VOCABULARY:,} ids are assumed (model.config.vocab_size).")
        return VOCABULARY
    return 1  # config.json in the model's folder has the number


def present_machine(default: str) -> Machine:
    """The shipped machine of this machine's GPU; the default without a GPU, or with an unknown GPU."""
    found = machine_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return found or load_machine(default)
