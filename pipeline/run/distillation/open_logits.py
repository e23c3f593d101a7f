"""Opens the cached logits of a run, and refuses logits made for other data, another teacher or another student."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from foundation.directory import Manifest, check_sizes, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.remote_folder import local_folder
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.run import AnomaliesSection
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.data.mixing_weights import Extent, make_order
from pipeline.data.mixture import DataMixture
from pipeline.data.sample_order import SampleOrder
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.run.distillation.cached_logits import KIND, CachedLogits, identity

_ENDLESS: Final = 1 << 48
"""Number of samples after which a source that has not been drawn completely never will be."""


def open_logits(
    section: DistillSection,
    mixture: DataMixture,
    *,
    data: DataSection,
    anomalies: AnomaliesSection,
    extent: Extent,
    vocab_size: int,
) -> CachedLogits:
    """Opens the cached logits that a run names, and compares them with its data and its student.

    Args:
        section: the config's `distill`.
        mixture: datasets from which the run draws samples.
        data, anomalies: the config's sections.
        extent: length of the run.
        vocab_size: number of ids of the student's vocabulary.

    Raises:
        DataError: the directory is missing or damaged, its dataset or tokenizer differs, or samples have no record.
        ConfigError: sequence length, document mask, temperature, vocabulary or teacher differ.
    """
    assert section.logits is not None
    path = local_folder(section.logits)
    manifest = read_manifest(path, kind=KIND)
    check_sizes(path, manifest)
    _check_fields(section, data, manifest, vocab_size=vocab_size)
    logits = CachedLogits(path, manifest, [_number(path, manifest, source) for source in mixture.sources])
    logits.check_has(mixture.order, extent.samples)
    if not logits.has_all(mixture.order):
        _refuse_rollback(section, data, anomalies, mixture.order, samples=extent.per_step)
    return logits


def _refuse_rollback(
    section: DistillSection, data: DataSection, anomalies: AnomaliesSection, order: SampleOrder, *, samples: int
) -> None:
    """Refuses the rollback policy: after a rollback, a run draws as many extra samples at its end as it has skipped."""
    for field in ("spikes", "non_finite"):
        if getattr(anomalies, field) != "rollback":
            continue
        why = f"a rollback skips data and draws other windows in its place, which {section.logits} lacks"
        steps = steps_of_all(data, order, samples=samples)
        remedy = "use skip, or distill.teacher"
        if steps is not None:
            remedy += f", or make a cache of all windows: headrace cache-logits --set run.steps={steps}"
        raise ConfigError(f"anomalies.{field}", "rollback", why=why, remedy=remedy)


def steps_of_all(data: DataSection, order: SampleOrder, *, samples: int) -> int | None:
    """Estimates the fewest steps after which every window has been drawn.

    Args:
        data: the config's section.
        order: the run's order of samples.
        samples: number of samples in a step.

    Returns:
        Steps; None if no longer run would draw all data: the curriculum leaves a source for good, or tokens have a
        budget or a repetition limit.
    """
    low, high = 0, 1
    while min(order.epochs(high * samples)) < 1:
        low, high = high, 2 * high
        if high * samples > _ENDLESS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if min(order.epochs(middle * samples)) >= 1 else (middle, high)
    extent = Extent(steps=high, per_step=samples)
    try:  # budgets mean other weights in a run of another length
        longer = make_order(data, order.windows.tolist(), seed=order.seed, extent=extent)
    except ConfigError:
        return None
    return high if min(longer.epochs(extent.samples)) >= 1 else None


def _check_fields(section: DistillSection, data: DataSection, manifest: Manifest, *, vocab_size: int) -> None:
    made = manifest.details
    pairs = (
        ("data.sequence_length", data.sequence_length, made["sequence_length"]),
        ("data.mask_documents", data.mask_documents, made["mask_documents"]),
        ("distill.temperature", section.temperature, made["temperature"]),
        ("model.config.vocab_size", vocab_size, made["vocab_size"]),
    )
    for field, own, theirs in pairs:
        if own != theirs:
            why = f"the logits in {section.logits} were made with {theirs}"
            raise ConfigError(field, own, why=why, remedy=f"use {theirs}, or make others: headrace cache-logits")
    if section.teacher is not None and ModelFolder.open(section.teacher).fingerprint() != made["teacher"]:
        why = f"the logits in {section.logits} were made by another teacher"
        raise ConfigError("distill.teacher", section.teacher, why=why, remedy="make others: headrace cache-logits")


def _number(path: Path, manifest: Manifest, source: TokenDataset) -> int:
    """Finds the number of a dataset in the directory."""
    tokenizer = tokenizer_details(source.manifest)["fingerprint"]
    if tokenizer != manifest.details["tokenizer"]:
        why = f"{path} was made with another tokenizer than {source.label}: the same id would mean different text"
        raise DataError(f"{why}\n  try: headrace cache-logits with this config")
    own = identity(source)
    for number, entry in enumerate(manifest.details["sources"]):
        if all(entry[key] == own[key] for key in own):
            return number
    made = ", ".join(str(entry["path"]) for entry in manifest.details["sources"])
    why = f"{path} has no logits of {source.label}: it was made from {made}, as packed and split then"
    raise DataError(f"{why}\n  try: headrace cache-logits with this config")
