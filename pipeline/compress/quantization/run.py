"""Runs a quantization: evaluates the original, quantizes, writes, evaluates the result, commits the directory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, track

from foundation.directory import Details, Manifest, Parents, parent_entry, read_manifest, staged
from foundation.errors import DataError
from foundation.remote_output import published, upload_left
from pipeline.checkpoint.export.write_safetensors import append_tensors
from pipeline.compress.quantization.importance_matrix import Importance, measure_importance
from pipeline.compress.quantization.mixed import decide, sensitivity_rows
from pipeline.compress.quantization.report import details, mixed_table, sizes, step_numbers, table
from pipeline.compress.quantization.rules import LAYERS, QuantizationPlan, work_path
from pipeline.compress.quantization.streaming import stream, streamable
from pipeline.compress.quantization.weights import calibration_batches, check_modules, pack, save
from pipeline.evaluation.consumers.bounds import bound_within
from pipeline.evaluation.consumers.gate import GateSample, run_gate
from pipeline.evaluation.consumers.original import Original, scored_original
from pipeline.evaluation.consumers.table import consumer_table
from pipeline.evaluation.heldout.measure import measure
from pipeline.models.card.card import commit_with_card
from pipeline.models.card.facts import recorded_facts
from pipeline.models.card.lineage import KEY as LINEAGE
from pipeline.models.card.lineage import lineage_of, with_step
from pipeline.models.construction.extra_tensors import stored_extras
from pipeline.models.folder.beside_weights import copy_generation
from pipeline.models.folder.extra_weights import extra_line
from pipeline.models.folder.loading import empty_model, load_model, pick_device
from pipeline.models.gguf.write import check, write
from pipeline.models.tokenizer_files import copy_tokenizer


def quantize(plan: QuantizationPlan) -> Manifest:
    """Writes the quantized model and prints its metrics before and after.

    Raises:
        ConfigError: a layer to quantize is not a torch.nn.Linear.
        DataError: the original or the result cannot be loaded in a subprocess, its perplexity is not finite, or a
            consumer finds the result outside the bound of its scheme.
    """
    config, parents = plan.config.model_dump(), _parents(plan)
    if (left := upload_left(plan.config.output, config=config, parents=parents)) is not None:
        return left
    with published(plan.config.output):
        return _quantized(plan)


def _quantized(plan: QuantizationPlan) -> Manifest:
    if plan.gguf is None:
        check_modules(empty_model(plan.source.path), plan)
    console, work = Console(stderr=True), work_path(plan.output)
    if (warning := plan.consumers.warning()) and plan.config.consumers is None:
        console.print(warning, markup=False, highlight=False, soft_wrap=True)
    try:
        manifest = _quantize(plan, console)
    except DataError:
        if (work / LAYERS).is_dir():  # keep hours of calibration: perhaps only a consumer failed, or a bound
            kept = f"the calibrated layers are kept in {work}, for the same config with other consumers or max_mean_kl"
            console.print(kept, markup=False, soft_wrap=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    Console(file=sys.stdout).print(table(manifest))
    if "mixed" in manifest.details:
        Console(file=sys.stdout).print(mixed_table(manifest.details["mixed"]))
    Console(file=sys.stdout).print(
        consumer_table(manifest.details["consumers"], title="scored by the programs that serve it")
    )
    return manifest


def _quantize(plan: QuantizationPlan, console: Console) -> Manifest:
    source = plan.source
    sample = GateSample.of(plan.dataset, source.path, vocabulary=source.vocab_size, longest=source.longest_sequence)
    how: dict[str, Any] = {"vocabulary": plan.source.vocab_size, "console": console}
    with scored_original(plan.source.path, plan.config.data, sample, **how) as original:
        return _quantize_beside(plan, sample, original, console)


def _quantize_beside(plan: QuantizationPlan, sample: GateSample, original: Original, console: Console) -> Manifest:
    plan, mixed = _decided(plan, console) if plan.budget else (plan, None)
    with staged(plan.output) as staging:
        after = _write_gguf(plan, staging) if plan.gguf else _write_folder(plan, staging, console)
        recorded = details(plan, sizes(plan, staging), original.measured, after)
        if mixed is not None:
            recorded |= {"mixed": mixed, "sensitivity": sensitivity_rows(mixed)}
            _check_budget(mixed, recorded["weight_bytes"])
        recorded["consumers"] = _score(plan, staging, sample, original, console)
        recorded["model_type"] = plan.source.config.get("model_type")
        recorded[LINEAGE] = with_step(lineage_of(plan.source.path), "quantization", step_numbers(recorded))
        recorded |= recorded_facts(plan.source.path)
        if plan.source.extra and plan.gguf is None:
            recorded["extra_weights"] = {"tensors": len(plan.source.extra), "first": [*plan.source.extra][:3]}
        config = plan.config.model_dump()
        return commit_with_card(staging, plan.output, config=config, parents=_parents(plan), details=recorded)


def _decided(plan: QuantizationPlan, console: Console) -> tuple[QuantizationPlan, Details]:
    console.print("measuring every layer at every candidate")
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as shown:
        task = shown.add_task("KL of each layer")
        return decide(plan, show=lambda done, every: shown.update(task, completed=done, total=every))


def _check_budget(mixed: Details, written: int) -> None:
    if written > mixed["budget_bytes"]:
        why = f"{written:,} bytes were written, and the budget is {mixed['budget_bytes']:,}"
        raise DataError(
            f"the result was not accepted, and was deleted: {why}\n  try: a budget larger by the difference"
        )


def _score(
    plan: QuantizationPlan, staging: Path, sample: GateSample, original: Original, console: Console
) -> dict[str, Any]:
    """Scores the result with every consumer; returns the consumers' figures."""
    bound = bound_within(plan.config.scheme, plan.config.max_mean_kl)
    vocabulary, consumers = plan.source.vocab_size, plan.consumers
    how: dict[str, Any] = {"sample": sample, "vocabulary": vocabulary, "consumers": consumers, "bound": bound}
    how |= {"say": lambda line: console.print(line, markup=False), "reference": original.scores}
    return run_gate(plan.source.path, staging, **how)


def _write_gguf(plan: QuantizationPlan, staging: Path) -> Details:
    """Writes model.gguf into `staging` and reads it back; returns its dtype and device."""
    assert plan.gguf is not None
    if plan.source.extra:
        line = extra_line(plan.config.model, list(plan.source.extra), what="are not written to the GGUF file")
        Console(stderr=True).print(line, markup=False, soft_wrap=True)
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as shown:

        def bar(what: str) -> Callable[[int, int], None]:
            task = shown.add_task(what)
            return lambda done, every: shown.update(task, completed=done, total=every)

        importance = _importance(plan, bar("importance matrix")) if plan.config.imatrix else None
        write(plan.gguf, staging, importance=importance, progress=bar(f"writing {plan.config.scheme}"))
        check(plan.gguf, staging, progress=bar("reading it back"))
    return {"dtype": plan.config.scheme, "device": "cpu"}


def _importance(plan: QuantizationPlan, show: Callable[[int, int], None]) -> Importance:
    """Measures the importance matrix on the calibration text."""
    assert plan.gguf is not None
    model = load_model(plan.source.path, dtype=torch.float32)
    names = [name for tensor in plan.gguf.quantized for name in tensor.sources]
    found = measure_importance(model, names, calibration_batches(plan), device=pick_device(), show=show)
    without = [name for name in names if name not in found]
    line = f"importance matrix of {len(found)} of {len(names)} matrices"
    if without:  # embeddings have no inputs, and some experts get no token
        line += f"; rounded without: {', '.join(without[:3])}{' and others' if len(without) > 3 else ''}"
    Console(stderr=True).print(line, markup=False, soft_wrap=True)
    return found


def _write_folder(plan: QuantizationPlan, staging: Path, console: Console) -> Details:
    """Writes packed weights, config and tokenizer into `staging`; returns the held-out metrics."""
    console.print(f"quantizing {len(plan.layers)} layers, scheme {plan.config.scheme}")
    dtype = getattr(torch, plan.config.dtype or plan.source.dtype)
    if streamable(empty_model(plan.source.path), plan):
        stream(plan, staging, dtype=dtype, say=console.print, progress=_layer_bar)
    else:
        model = load_model(plan.source.path, dtype=torch.float32)
        save(model, pack(model, plan, dtype=dtype, progress=_bar), staging)
    extra = plan.source.extra
    if extra:
        line = extra_line(plan.config.model, list(extra), what="are written as they are, and not quantized")
        console.print(line, markup=False, soft_wrap=True)
        append_tensors(staging, stored_extras(plan.source.path, extra, extra, dtype=dtype))
    copy_generation(plan.source.path, staging)
    copy_tokenizer(plan.source.path, staging)
    console.print("evaluating the result in a subprocess")
    return measure(staging, plan.config.data)


def _bar(layers: list[str]) -> Iterable[str]:
    console = Console(stderr=True)
    return track(layers, "packing", console=console, transient=True, disable=not console.is_terminal)


def _layer_bar(left: range, every: int) -> Iterable[int]:
    console = Console(stderr=True)
    done = every - len(left)
    how: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    return track(left, "decoder layers", total=every, completed=done, **how)


def _parents(plan: QuantizationPlan) -> Parents:
    """Parents for the manifest: the dataset, and the model or the checkpoint that was exported."""
    data = parent_entry(plan.dataset.origin, plan.dataset.manifest.fingerprint)
    if plan.source.origin == plan.config.model:
        return {"model": parent_entry(plan.source.origin, plan.source.fingerprint()), "data": data}
    return {"checkpoint": read_manifest(plan.source.path, kind="model").parents["checkpoint"], "data": data}
