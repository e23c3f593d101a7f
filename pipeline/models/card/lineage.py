"""The lineage of a model: corpora, trainings, and every step of compression with its numbers. No torch.

It is a JSON object in the manifest of each model, `details["lineage"]`, so that it does not depend on earlier folders.
Each step appends itself to the lineage of the model that it read.

    {"corpora": [{"fingerprint", "weight", "tokens", "cleaning", "deduplication", "languages",
                  "sources": [{"name", "documents", "bytes", "tokens", "hub"}], ...}],
     "steps": [{"step": "training", ...}, {"step": "quantization", ...}]}

Paths and times are left out: a card is published, and equal bytes have equal fingerprints wherever they were made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST, Manifest, read_manifest
from foundation.errors import DataError
from foundation.remote_directory import manifest_of

Ancestor = dict[str, Any]
"""A corpus, tokenizer, model or training in a lineage."""

Lineage = dict[str, Any]
KEY = "lineage"
_SOURCE = re.compile(r"(?:stages\.[\w-]+\.)?data\.sources\.(\d+)")


def lineage_of(model: Path) -> Lineage:
    """Reads the lineage in a model's manifest; for a folder without a manifest, only the step "given".

    Args:
        model: a Hugging Face folder or a directory with a GGUF file.
    """
    if not (model / MANIFEST).is_file():
        return {"corpora": [], "steps": [{"step": "given", "what": "a Hugging Face folder without a manifest"}]}
    return _of_model(read_manifest(model, kind="model"))


def _of_model(manifest: Manifest) -> Lineage:
    recorded = manifest.details.get(KEY)
    return recorded if isinstance(recorded, dict) else _rebuilt(manifest)


def with_step(lineage: Mapping[str, Any], step: str, numbers: Mapping[str, Any]) -> Lineage:
    """Appends a step to a lineage.

    Args:
        lineage: lineage of the model that the step read.
        step: name of the step: quantization, pruning, ...
        numbers: numbers of the step, as JSON.
    """
    return {"corpora": list(lineage["corpora"]), "steps": [*lineage["steps"], {"step": step, **numbers}]}


def training_lineage(checkpoint: Manifest) -> Lineage:
    """Makes the lineage of a checkpoint: the model that training started from, if any, and the training.

    Args:
        checkpoint: manifest of a checkpoint of `headrace train` or `headrace distill`.
    """
    if "merged" in checkpoint.details:
        merged: Lineage = checkpoint.details["merged"]["lineage"]
        return merged
    config, parents = checkpoint.config, checkpoint.parents
    branch = checkpoint.details.get("branch")
    start = _of_parent(parents.get("model.path")) if branch is None else branch["lineage"]
    corpora = [*start["corpora"], *(c for c in _corpora(checkpoint, config) if c not in start["corpora"])]
    step = "distillation" if config.get("distill") else "training"
    steps = [*start["steps"], *_imported(checkpoint), {"step": step, **_training(checkpoint, config, since=branch)}]
    return {"corpora": corpora, "steps": steps}


def _imported(checkpoint: Manifest) -> list[Ancestor]:
    """Returns the checkpoint of another trainer from which the run continues; its data is unknown."""
    found = checkpoint.details.get("imported")
    if found is None:
        return []
    return [{"step": "given", "what": f"a checkpoint of {found['kind']}, step {found['step']:,}"}]


def _of_parent(parent: Mapping[str, Any] | None) -> Lineage:
    """The lineage of a folder that a manifest names; only its fingerprint if the folder is gone or has changed."""
    if parent is None:
        return {"corpora": [], "steps": []}
    gone = {"corpora": [], "steps": [{"step": "given", "fingerprint": parent["fingerprint"]}]}
    try:
        manifest = manifest_of(parent["path"], kind="model")
    except DataError:
        return gone
    return _of_model(manifest) if manifest.fingerprint == parent["fingerprint"] else gone


def _rebuilt(manifest: Manifest) -> Lineage:
    """Rebuilds the lineage of a manifest from before lineages were recorded, as far as its parents still exist."""
    parents = manifest.parents
    if "quantization" in manifest.details:
        return with_step(_of_parent(parents.get("model")), "quantization", manifest.details["quantization"])
    if "checkpoint" in parents:
        try:
            checkpoint = read_manifest(parents["checkpoint"]["path"], kind="checkpoint")
        except DataError:
            checkpoint = None
        if checkpoint is not None and checkpoint.fingerprint == parents["checkpoint"]["fingerprint"]:
            return training_lineage(checkpoint)
    names = {"optimizer_steps": "step", "dtype": "dtype"}
    known = {name: manifest.details[key] for name, key in names.items() if key in manifest.details}
    return {"corpora": [], "steps": [{"step": "training", **known}]}


def _training(checkpoint: Manifest, config: Mapping[str, Any], *, since: Mapping[str, Any] | None) -> Ancestor:
    """Returns the numbers of a training.

    Args:
        checkpoint: manifest of its checkpoint.
        config: config of the run.
        since: step and samples of the checkpoint of another run with which the run began; None without one.
    """
    details, data = checkpoint.details, config.get("data") or {}
    length, samples, step = data.get("sequence_length"), details.get("samples"), details.get("step")
    if since is not None and samples is not None and step is not None:
        samples, step = samples - since["samples"], step - since["step"]
    begun = 0 if since is None else since["step"]
    ledger = [row for row in details.get("ledger") or [] if row["first_step"] > begun]
    if ledger:  # steps differ: what they were is recorded
        length, tokens = max(row["sequence_length"] for row in ledger), sum(row["tokens"] for row in ledger)
    optimizer, scheduler = config.get("optimizer") or {}, config.get("scheduler") or {}
    params = optimizer.get("params") or {}
    bf16, fp16, fp8 = ((config.get(key) or {}).get("enabled") for key in ("bf16", "fp16", "fp8"))
    found = {
        "from_step": None if since is None else since["step"],
        "optimizer_steps": step,
        "samples": samples,
        "sequence_length": length,
        "tokens": tokens if ledger else samples * length if samples and length else None,
        "global_batch": config.get("train_batch_size") if not ledger else None,
        "stages": [{key: row[key] for key in row if key not in ("first_step", "epochs")} for row in ledger] or None,
        "optimizer": optimizer.get("type"),
        "learning_rate": params.get("lr"),
        "weight_decay": params.get("weight_decay"),
        "schedule": scheduler.get("type"),
        "gradient_clipping": config.get("gradient_clipping"),
        "precision": "bf16" if bf16 else "fp16" if fp16 else "fp32",
        "fp8": fp8 or None,
        "engine": config.get("engine"),
        "layout": details.get("topology"),
        "seed": (config.get("run") or {}).get("seed"),
        "kept_layers": (config.get("model") or {}).get("keep_layers"),
        "headrace": checkpoint.code.get("headrace"),
        **_teacher(checkpoint, config),
    }
    return {key: value for key, value in found.items() if value is not None}


def _teacher(checkpoint: Manifest, config: Mapping[str, Any]) -> Ancestor:
    section = config.get("distill")
    if not section:
        return {}
    teacher = checkpoint.parents.get("distill.teacher") or {}
    hidden = {"teacher", "logits"} | ({"beta"} if section.get("divergence", "jsd") != "jsd" else set())
    plain = {key: value for key, value in section.items() if key not in hidden and isinstance(value, str | int | float)}
    return {"teacher_fingerprint": teacher.get("fingerprint"), "distillation": plain}


def _corpora(checkpoint: Manifest, config: Mapping[str, Any]) -> Iterator[Ancestor]:
    """Yields every dataset of a training, with its mixing weight and the sources of its documents."""
    sources = (config.get("data") or {}).get("sources") or []
    weights = _weights((checkpoint.details.get("curve") or {}).get("data") or {})
    for key, parent in checkpoint.parents.items():
        found = _SOURCE.fullmatch(key)
        if found is None:  # e.g. `data.sources.0.packing`, which is made from a source
            continue
        number = int(found[1])
        weight = weights[number] if number < len(weights) else None
        section = sources[number] if number < len(sources) else {}
        about = {"name": section.get("name") or section.get("source"), "fingerprint": parent["fingerprint"]}
        yield {**about, "weight": weight, **_dataset(parent, chosen=section.get("source"))}


def _weights(mixture: Mapping[str, Any]) -> list[float]:
    """Returns the mixing weights of all sources; [] with budgets or a curriculum, where no single number exists."""
    given = mixture.get("weights") or []
    if mixture.get("schedule") or any(weight is None for weight in given):
        return []
    return [weight / sum(given) for weight in given]


def _dataset(parent: Mapping[str, Any], *, chosen: str | None) -> Ancestor:
    """Corpus and tokenizer from a tokens directory's manifest, if the run was trained on that version."""
    try:
        manifest = manifest_of(parent["path"], kind="tokens")
    except DataError:
        return {}
    if manifest.fingerprint != parent["fingerprint"]:
        return {}
    return {**corpus_of(manifest, chosen=chosen), "tokenizer": tokenizer_of(manifest)}


def corpus_of(tokens: Manifest, *, split: str = "train", chosen: str | None = None) -> Ancestor:
    """Returns the sizes, sources, cleaning and deduplication of a split, from the manifest of a tokens directory.

    Args:
        tokens: manifest of the tokens directory.
        split: train or heldout.
        chosen: the only source trained on; None for all sources.
    """
    about = tokens.details["splits"].get(split) or {}
    sources = [
        {"name": name, **{key: counts[key] for key in ("documents", "bytes", "tokens")}, **_published(tokens, name)}
        for name, counts in (about.get("sources") or {}).items()
        if chosen is None or name == chosen
    ]
    steps = tokens.config.get("clean") or []
    dedup = tokens.config.get("dedup") or {}
    return {
        "tokens": about.get("tokens"),
        "documents": about.get("documents"),
        "sources": sources,
        "cleaning": [step["step"] for step in steps],
        "languages": next((step["keep"] for step in steps if step["step"] == "language"), []),
        "deduplication": [kind for kind in ("exact", "near", "lines") if dedup.get(kind)],
    }


def tokenizer_of(tokens: Manifest) -> Ancestor:
    """Returns the kind, vocabulary size and fingerprint of a corpus's tokenizer."""
    tokenizer = tokens.details.get("tokenizer") or {}
    return {key: tokenizer[key] for key in ("kind", "vocab_size", "fingerprint") if key in tokenizer}


def _published(tokens: Manifest, name: str) -> Ancestor:
    """Location of a source on the Hugging Face Hub, if data prep read it there; other paths are not published."""
    for source in tokens.config.get("sources") or []:
        paths = [source["path"]] if isinstance(source.get("path"), str) else source.get("path") or []
        builder = source.get("builder")
        if name != (source.get("name") or (paths[0] if paths else builder)):
            continue
        hub = (
            builder if builder and "/" in builder else next((p for p in paths if p.startswith("hf://datasets/")), None)
        )
        return {"hub": hub} if hub and not hub.startswith(("/", ".")) else {}
    return {}
