"""Runs a quantization: evaluates the original, quantizes, writes, evaluates the result, commits the directory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from headrace.base.directory import Manifest, commit, fresh_staging
from pipeline.compress.measure import measure
from pipeline.compress.report import details, table
from pipeline.compress.rules import QuantizationPlan
from pipeline.compress.weights import check_modules, pack, save
from pipeline.evaluation.loading import empty_model, load_model
from pipeline.evaluation.model_folder import ModelFolder
from pipeline.models.tokenizer_files import copy_tokenizer


def quantize(plan: QuantizationPlan) -> Manifest:
    """Writes the quantized model and prints its metrics before and after.

    Raises:
        ConfigError: a layer to quantize is not a torch.nn.Linear.
        DataError: the original or the result cannot be loaded in a subprocess, or its perplexity is not finite.
    """
    check_modules(empty_model(plan.source.path), plan)
    console = Console(stderr=True)
    console.print(f"{plan.source.path}: evaluating the original")
    before = measure(plan.source.path, plan.config.data)
    with _staged(plan.output) as staging:
        console.print(f"quantizing {len(plan.layers)} layers to {plan.config.weights}")
        _write(plan, staging)
        console.print("evaluating the result in a subprocess")
        after = measure(staging, plan.config.data)
        recorded = details(plan, ModelFolder.open(staging), before, after)
        parents = {"model": _parent(plan.source.path, plan.source.fingerprint())}
        parents["data"] = _parent(plan.dataset.path, plan.dataset.manifest.fingerprint)
        config = plan.config.model_dump()
        manifest = commit(staging, plan.output, kind="model", config=config, parents=parents, details=recorded)
    Console(file=sys.stdout).print(table(manifest))
    return manifest


def _write(plan: QuantizationPlan, staging: Path) -> None:
    """Writes packed weights, config and tokenizer into `staging`."""
    model = load_model(plan.source.path, dtype=torch.float32)
    dtype = getattr(torch, plan.config.dtype or plan.source.dtype)

    def bar(layers: list[str]) -> Iterable[str]:
        console = Console(stderr=True)
        return track(layers, "packing", console=console, transient=True, disable=not console.is_terminal)

    save(model, pack(model, plan, dtype=dtype, progress=bar), staging)
    copy_tokenizer(plan.source.path, staging)


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    """An empty directory beside `final`, removed unless it is committed."""
    staging = fresh_staging(final)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _parent(path: Path, fingerprint: str) -> dict[str, str]:
    return {"path": str(path), "fingerprint": fingerprint}
