"""Summary of a resolved run, line by line: for `headrace check`, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foundation.paths import is_url
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.compression import QuantizationAwareSection
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.evaluation import EvaluationSection
from pipeline.config.sections.optimizers import OptimizerKind, OptimizerSection
from pipeline.config.sections.run import RunSection
from pipeline.models.split_names import conversion
from pipeline.run.checkpoint_timer import minutes_of

if TYPE_CHECKING:
    from pipeline.checkpoint.store import CheckpointStore
    from pipeline.data.dataset import TokenDataset
    from pipeline.models.hidden_matrices import MatrixForm
    from pipeline.run.prepare import PreparedRun


@dataclass(frozen=True)
class Entry:
    """One fact of a run.

    Attributes:
        label: name of the fact in the printed summary; several entries may share it.
        text: value for people, with units.
        values: value for programs, JSON; entries with the same label make a list.
    """

    label: str
    text: str
    values: Any


def as_json(entries: list[Entry]) -> dict[str, Any]:
    """Converts entries to a JSON object: label (with underscores) -> values, as a list if several share the label."""
    found: dict[str, list[Any]] = {}
    for entry in entries:
        found.setdefault(entry.label.replace(" ", "_").replace("-", "_"), []).append(entry.values)
    lists = {"data", "differs", "held_out", "pipeline_stages", "task", "warnings"}
    return {key: values if key in lists or len(values) > 1 else values[0] for key, values in found.items()}


def resolved_entries(run: ResolvedRun) -> Iterator[Entry]:
    """Yields entries that need only the config and the number of processes. No torch."""
    config, batch, topology = run.config, run.batch, run.topology
    axes = {axis: getattr(topology, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}
    yield Entry("layout", run.layout, {"engine": config.engine, "stage": config.zero_optimization.stage, **axes})
    spare = f", and {run.spare} spare" if run.spare else ""
    yield Entry("processes", f"{topology.world_size}{spare}", {"ranks": topology.world_size, "spare": run.spare})
    yield Entry("precision", run.precision, run.precision)
    memory = config.memory
    section = run.config.compile
    if section.enabled is not False:
        where = "" if section.enabled else ", where there is a GPU"
        yield Entry("compile", f"every decoder layer, by {section.backend}{where}", section.model_dump())
    if memory.activation_checkpointing != "none":
        which = "every layer" if memory.every_n_layers == 1 else f"one layer in {memory.every_n_layers}"
        values = {"mode": memory.activation_checkpointing, "every_n_layers": memory.every_n_layers}
        yield Entry("checkpointing", f"activations: {memory.activation_checkpointing}, {which}", values)
    sizes = {"samples": batch.samples, "micro_batch": batch.micro, "gradient_accumulation": batch.accumulation}
    yield Entry("batch", str(batch), {**sizes, "sequence_length": batch.sequence_length, "tokens": batch.tokens})
    samples, tokens = run.accounts.samples(run.steps), run.accounts.tokens(run.steps)
    length = {"steps": run.steps, "samples": samples, "tokens": tokens}
    yield Entry("length", f"{run.steps:,} steps = {samples:,} samples = {tokens:,} tokens", length)
    yield from (_stage_entry(stage) for stage in run.stages)
    rates = {step: run.at(step).schedule.lr(step) for step in _shown_steps(run.steps, warmup=run.schedule.warmup)}
    shown = ", ".join(f"{lr:.2e} at step {step:,}" for step, lr in rates.items())
    yield Entry("learning rate", f"{run.schedule.kind}: {shown}", {"schedule": run.schedule.kind, "at_step": rates})
    yield _optimizer_entry(config.optimizer, held=run.held_bytes_per_parameter)
    yield from _data_entries(config.data)
    yield _evaluation_entry(config.evaluation)
    yield _checkpoint_entry(config.run)
    here = f", on this host {config.run.local_dir}" if is_url(config.run.dir) else ""
    yield Entry("run directory", f"{config.run.dir}{here}", config.run.dir)


def _stage_entry(run: ResolvedRun) -> Entry:
    """Describes a stage or a batch ramp: its steps and batches, and what it changes at its border."""
    assert run.place is not None
    stage, accounts, first, last = run.place.stage, run.accounts, run.first_step, run.last_step
    spans = [span for _, _, span in accounts.parts(first, last)]
    sizes = f"{spans[0].samples} to {spans[-1].samples}" if len(spans) > 1 else f"{spans[0].samples}"
    tokens = accounts.tokens(last) - accounts.tokens(first - 1)
    text = f"steps {first:,} to {last:,}: {sizes} samples of {spans[0].sequence_length:,} tokens, {tokens:,} in all"
    fresh = stage.section is not None and stage.section.optimizer_states == "fresh"
    changes = {**stage.changes, **({"optimizer_states": "fresh"} if fresh else {})}
    text += "".join(f"; {key} {json.dumps(value)}" for key, value in changes.items())
    about = {"first_step": first, "last_step": last, "tokens": tokens, "changes": changes}
    return Entry(f"stage {stage.name}" if stage.name else "batch ramp", text, {"name": stage.name, **about})


def _optimizer_entry(section: OptimizerSection, *, held: float | None) -> Entry:
    """Describes the optimizer, and the bytes per parameter of its fp32 master weight and states."""
    kind = section.kind
    params = section.params.model_dump(mode="json", exclude_none=True)
    shown = ", ".join(f"{name} {json.dumps(params[name])}" for name in _SHOWN_PARAMS if name in params)
    states = f"{len(kind.states)} state tensor{'' if len(kind.states) == 1 else 's'} per {_parameter(kind)}"
    text = f"{kind.name}, {shown}; {states}: {kind.bytes_per_parameter} bytes per parameter with the fp32 master weight"
    sizes: dict[str, Any] = {"states": list(kind.states), "bytes_per_parameter": kind.bytes_per_parameter}
    if held is not None:
        text += f", {held:.4g} held on the device with {section.params.moments_dtype or 'fp32'} states and the gradient"
        sizes["held_bytes_per_parameter"] = held
    return Entry("optimizer", text, {"type": kind.name, "params": params, **sizes})


def _state_entries(prepared: PreparedRun) -> Iterator[Entry]:
    from pipeline.engines.common import matrices_of  # noqa: PLC0415  imports torch

    run, size = prepared.run, prepared.size
    forms = matrices_of(prepared.model, run.config.optimizer)
    elements = sum(math.prod(form.shape) for form in forms.values())
    if forms:
        yield _matrices_entry(forms, elements, of=size.parameters)
    yield from _qk_clip_entries(prepared)
    state_bytes = run.config.state_kind.state_bytes(parameters=size.parameters, matrices=elements)
    state = f"{state_bytes / 2**30:,.3f} GiB of fp32 weights and optimizer states over all ranks, and on disk"
    each = state_bytes / size.parameters
    each = int(each) if each.is_integer() else round(each, 3)
    yield Entry("training state", state, {"bytes": int(state_bytes), "bytes_per_parameter": each})


def _matrices_entry(forms: Mapping[str, MatrixForm], elements: int, *, of: int) -> Entry:
    """Describes the matrices that Muon orthogonalizes, and those treated as one although they may be several."""
    from pipeline.models.hidden_matrices import unknown_fused  # noqa: PLC0415  imports torch

    count = sum(form.stacked * len(form.parts) for form in forms.values())
    text = f"Muon: {count:,} matrices in {len(forms):,} parameters, {elements / of:.1%} of all; AdamW: the rest"
    fused = unknown_fused(forms)
    if fused:
        text += f". One matrix each, though perhaps fused: {', '.join(fused)}"
    return Entry("matrices", text, {"matrices": count, "parameters": len(forms), "elements": elements, "fused": fused})


def _qk_clip_entries(prepared: PreparedRun) -> Iterator[Entry]:
    """Yields the attention layers and key heads that QK-Clip watches."""
    from pipeline.models.query_key_rows import attention_heads  # noqa: PLC0415  imports torch

    threshold = prepared.run.config.optimizer.params.qk_clip
    if threshold is not None:
        modules = attention_heads(prepared.model)
        heads, parameters = sum(each.key_heads for each in modules), sum(len(each.rows) for each in modules)
        text = (
            f"{heads:,} key heads of {len(modules):,} attention layers are scaled where a logit was over {threshold:g}"
        )
        values = {"threshold": threshold, "layers": len(modules), "key_heads": heads, "parameters": parameters}
        yield Entry("qk_clip", text, values)


def _parameter(kind: OptimizerKind) -> str:
    return "parameter" if kind.rest is None else f"parameter in hidden matrices ({len(kind.rest.states)} of others)"


_SHOWN_PARAMS = ("betas", "momentum", "nesterov", "muon_lr", "adam_lr", "adjust_lr", "weight_decay", "qk_clip")


def _data_entries(data: DataSection) -> Iterator[Entry]:
    """Yields how documents become samples: packing, masks, fill-in-the-middle, curriculum."""
    attention = "attention stays within a document" if data.mask_documents else "attention crosses documents"
    values: dict[str, Any] = {"packing": data.packing, "mask_documents": data.mask_documents}
    text = f"{data.packing} packing, {attention}"
    if data.fim is not None:
        text += f"; fill-in-the-middle in {data.fim.rate:.0%} of the documents, {data.fim.spm_rate:.0%} of them SPM"
        values["fim"] = {"rate": data.fim.rate, "spm_rate": data.fim.spm_rate}
    yield Entry("samples", text, values)
    for stage in data.curriculum or ():
        weights = ", ".join(f"{name} {weight:g}" for name, weight in stage.weights.items())
        plain = {"after_step": stage.after_step, "weights": stage.weights}
        yield Entry("curriculum", f"from step {stage.after_step + 1:,}: {weights}", plain)


def _evaluation_entry(section: EvaluationSection) -> Entry:
    if section.samples == 0:
        return Entry("evaluation", "none", {"every": None, "samples": 0})
    spans = ((section.every, "steps"), (section.every_tokens, "tokens"))
    when = "".join(f"every {number:,} {unit} and " for number, unit in spans if number) + "at the end"
    what = f"{section.samples:,} samples per source" if section.samples else "the whole held-out split"
    return Entry("evaluation", f"{when}, {what}", {"every": section.every, "samples": section.samples})


def _checkpoint_entry(section: RunSection) -> Entry:
    when = ", ".join([*_checkpoint_times(section), "at the end"])
    kept = f"the newest {section.keep_checkpoints} are kept"
    if is_url(section.dir):
        count = section.keep_in_bucket or section.keep_checkpoints
        kept += f" on disk, {'all' if count == 'all' else f'the newest {count}'} in the object store"
    kept += f", and those at multiples of {section.keep_every:,} steps" if section.keep_every else ""
    how = "asynchronous" if section.async_checkpoints else "training waits for them"
    how += f", copies in {section.in_memory_checkpoints}" if section.in_memory_checkpoints else ""
    names = (
        "checkpoint_every", "checkpoint_minutes", "node_mtbf_hours", "keep_checkpoints", "keep_every",
        "keep_in_bucket", "async_checkpoints", "in_memory_checkpoints",
    )  # fmt: skip
    return Entry("checkpoints", f"{when}; {kept}; {how}", {name: getattr(section, name) for name in names})


def _checkpoint_times(section: RunSection) -> Iterator[str]:
    minutes = minutes_of(section)
    if section.checkpoint_every == "auto":
        bound = f", {minutes:g} minutes at most" if minutes else ""
        yield f"at intervals by Daly from the measured time of a save{bound}"
    elif section.checkpoint_every is not None:
        yield f"every {section.checkpoint_every:,} steps"
    if minutes and section.checkpoint_every != "auto":
        yield f"every {minutes:g} minutes"


def _rounding(section: QuantizationAwareSection | None) -> Iterator[Entry]:
    if section is not None:
        shown = f"{section.scheme}, group {section.group_size or 'of the scheme'}"
        yield Entry("quantization-aware", shown, section.model_dump())


def _parametrization(prepared: PreparedRun) -> Iterator[Entry]:
    """Yields the learning rate of every kind of parameter, relative to the run's."""
    from pipeline.engines.parametrization.kinds import ParameterKind  # noqa: PLC0415
    from pipeline.engines.parametrization.scales import find_parametrization  # noqa: PLC0415  imports torch

    config = prepared.run.config
    found = find_parametrization(config.model, prepared.model, config.optimizer)
    if found is None:
        return
    rates = {
        f"{kind}": sorted({found.scales[n].lr for n, k in found.kinds.items() if k is kind}) for kind in ParameterKind
    }
    shown = ", ".join(f"{kind} x {' and '.join(f'{x:.4g}' for x in each)}" for kind, each in rates.items() if each)
    sizes = f"{found.width:g} x the base model's width, {found.depth:g} x its depth"
    values = {"kind": "completep", "width": found.width, "depth": found.depth, "learning_rates": rates}
    yield Entry("parametrization", f"completep, {sizes}; learning rates: {shown}", values)


def prepared_entries(prepared: PreparedRun) -> Iterator[Entry]:
    """Yields entries that follow from the data, the model and the run's directory."""
    from pipeline.data.mixing_weights import Extent  # noqa: PLC0415  imports numpy
    from pipeline.engines.parallel.fp8 import fp8_layers  # noqa: PLC0415  imports torch
    from pipeline.engines.parallel.partition import stage_lines  # noqa: PLC0415  imports torch

    run, size, kind = prepared.run, prepared.size, prepared.hf_config["model_type"]
    counts = {name: getattr(size, name) for name in ("parameters", "active", "embedding", "flops_per_token")}
    active = "" if size.active == size.parameters else f", {size.active:,} of them active for a token"
    shown = f"{kind}, {size.parameters:,} parameters ({size.embedding:,} embedding){active}"
    yield Entry("model", shown, {"model_type": kind, **counts})
    yield from _state_entries(prepared)
    if size.flops_per_token is not None:
        compute = f"{size.flops_per_token / 1e6:,.1f} MFLOP per token, forward and backward"
        yield Entry("compute", compute, {"flops": size.flops_per_token * run.accounts.tokens(run.steps)})
    if prepared.has_experts:
        moe = run.config.moe
        loss = f", auxiliary loss x {moe.coefficient:g}" if moe.coefficient else ""
        bias = f", correction bias +-{moe.bias_rate:g} per step" if moe.bias_rate else ""
        rates = {"aux_loss_coef": moe.coefficient, "bias_update_rate": moe.bias_rate}
        yield Entry("experts", f"balance {moe.balance}{loss}{bias}", {"balance": moe.balance, **rates})
    if run.config.fp8.enabled:
        table = run.config.parallel.tp_plan
        layers = fp8_layers(run.config.fp8, prepared.model, tp=run.topology.tp, table=table)
        excluded = [*layers.excluded, *layers.excluded_experts]
        counts = {"converted": len(layers.converted), "converted_experts": len(layers.experts), "excluded": excluded}
        yield Entry("fp8", f"{run.config.fp8.recipe}: {layers.text}", {**run.config.fp8.model_dump(), **counts})
    yield from (*_rounding(run.config.quantization_aware), *_parametrization(prepared))
    for line in stage_lines(run, prepared.model):
        label, text = line.split(": ", 1)
        yield Entry(label, text, text)
    total = Extent.of(run).samples
    epochs = prepared.mixture.order.epochs(total)
    for source, seen in zip(prepared.mixture.sources, epochs, strict=True):
        share = seen * source.windows / total
        mask = ", with a loss mask" if source.masked else ""
        yield Entry(
            "data",
            f"{source.summary}{mask}, {share:.1%} of the run, {seen:.2f} epochs",
            {**_dataset(source), "share": share, "epochs": seen, "loss_mask": source.masked},
        )
    found = conversion(prepared.mixture.sources[0].tokenizer)
    yield Entry("tokenizer", found.text, {"llama_cpp": found.name, "why": found.why})
    for source in prepared.heldout:
        yield Entry("held-out", source.summary, _dataset(source))
    if run.topology.world_size > 1:
        yield _straggler_entry(prepared)
    yield _start_entry(prepared.store)


def _start_entry(store: CheckpointStore) -> Entry:
    newest = next(iter(store.checkpoints()), store.start)
    start = f"resume after step {newest.step} of {newest.path.parents[1]}" if newest else "a new run"
    return Entry("start", start, {"resume_after_step": newest.step if newest else None})


def _dataset(source: TokenDataset) -> dict[str, Any]:
    return {"path": str(source.path), "source": source.source, "tokens": source.tokens, "samples": source.windows}


def _straggler_entry(prepared: PreparedRun) -> Entry:
    from pipeline.runtime.metrics.stragglers import report_interval, report_seconds  # noqa: PLC0415  imports torch

    run, layers = prepared.run, int(prepared.hf_config.get("num_hidden_layers") or 0)
    seconds = report_seconds(run.topology, run.batch, layers=layers)
    every = report_interval(run.config.stragglers, seconds=seconds)
    cost = f"about {seconds:.1f} s of profiling each" if every else f"would take about {seconds:.1f} s each"
    text = f"a report every {every:,} steps, {cost}" if every else f"no reports: {cost}"
    return Entry("stragglers", text, {"every": every, "seconds_per_report": seconds})


def _shown_steps(steps: int, *, warmup: int) -> list[int]:
    return sorted({1, max(1, min(warmup, steps)), max(1, steps // 2), steps})
