"""README.md of a model folder, as the Hugging Face Hub shows it: YAML front matter, lineage, figures, how to load it.

It is written into the staging directory before `commit`, so that the manifest lists its checksum. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.base.directory import Manifest, commit, sha256_of_file
from pipeline.models.card.lineage import KEY
from pipeline.models.card.loading_text import how_to_load
from pipeline.models.card.steps_text import corpus_lines, step_lines
from pipeline.models.folder.beside_weights import drop_remote_code

NAME = "README.md"
_WEIGHTS = ("*.safetensors", "*.gguf")


def write_card(folder: Path, details: Mapping[str, Any]) -> dict[str, str]:
    """Writes the card of a model that is about to be committed.

    Args:
        folder: with its weights, config.json and tokenizer, or model.gguf.
        details: of its manifest: `lineage`, `parameters`, and what the step has measured (`before`, `after`, `data`,
            `consumers`, `quantization`, `tokenizer`).

    Returns:
        SHA-256 of each weight file, for `commit`, so that they need not be read again.
    """
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    checksums = {file.name: sha256_of_file(file) for file in files}
    parts = [_front_matter(folder, details), *_body(folder, details, checksums)]
    (folder / NAME).write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return checksums


def commit_with_card(
    staging: Path,
    final: Path,
    *,
    config: Mapping[str, Any],
    parents: Mapping[str, Any],
    details: Mapping[str, Any],
    replace: bool = False,
) -> Manifest:
    """Writes the card of a model directory, and commits it; see `headrace.base.directory.commit`.

    config.json of a folder that had code of its own stops naming files that are not here.
    """
    drop_remote_code(staging)
    known = write_card(staging, details)
    about: dict[str, Any] = {"config": config, "parents": parents, "details": details}
    return commit(staging, final, kind="model", replace=replace, known_sha256=known, **about)


def scheme_of(details: Mapping[str, Any]) -> str:
    """The scheme of the weights, as users write it: W4A16, Q8_0; the dtype without quantization."""
    quantization = details.get("quantization") or {}
    return str(quantization.get("scheme") or quantization.get("weights") or details.get("dtype") or "unknown")


def _front_matter(folder: Path, details: Mapping[str, Any]) -> str:
    """What the Hub reads: library, task, tags, and held-out figures as a `model-index`."""
    gguf, quantized = _is_gguf(folder), "quantization" in details
    tags = ["headrace", scheme_of(details)]
    if quantized and not gguf:
        tags.append("compressed-tensors")
    tags += [step for step in ("distillation", "pruning") if step in _step_names(details)]
    about: dict[str, Any] = {
        "library_name": "gguf" if gguf else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    metrics = [
        {"type": name, "name": label, "value": value}
        for name, label, value in _headline(details)
        if isinstance(value, int | float)
    ]
    if metrics:
        task = {"type": "text-generation", "name": "Text generation"}
        data = {
            "type": "held-out",
            "name": f"{(details.get('data') or {}).get('split', 'heldout')} split of the corpus",
        }
        about["model-index"] = [{"name": _title(folder, details), "results": [_result(task, data, metrics)]}]
    return f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}---\n"


def _result(task: Any, dataset: Any, metrics: Any) -> dict[str, Any]:
    return {"task": task, "dataset": dataset, "metrics": metrics}


def _headline(details: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    after = details.get("after") or {}
    yield "loss", "held-out loss, nats per token", after.get("loss_nats")
    yield "perplexity", "held-out perplexity", after.get("perplexity")
    yield "bits_per_byte", "held-out bits per byte", after.get("bits_per_byte")


def _body(folder: Path, details: Mapping[str, Any], checksums: Mapping[str, str]) -> Iterator[str]:
    lineage = details[KEY]
    yield f"# {_title(folder, details)}\n"
    yield f"{_summary(folder, details)}\n"
    yield from how_to_load(
        folder, scheme=scheme_of(details), consumers=details.get("consumers"), tokenizer=details.get("tokenizer")
    )
    yield "## Where it comes from\n"
    yield from corpus_lines(lineage["corpora"])
    for number, step in enumerate(lineage["steps"], start=1):
        yield from step_lines(number, step)
    yield from _measured(details)
    yield from _consumers(details)
    yield from _files(folder, checksums)


def _title(folder: Path, details: Mapping[str, Any]) -> str:
    kind = _model_type(folder, details)
    count = details.get("parameters")
    size = "" if not count else f", {count / 1e9:.2f}B" if count >= 1e9 else f", {count / 1e6:.2f}M"
    return f"{kind}{size}{' parameters' if size else ''}, {scheme_of(details)}"


def _model_type(folder: Path, details: Mapping[str, Any]) -> str:
    config = folder / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None
    return str(found or details.get("model_type") or "Language model")


def _summary(folder: Path, details: Mapping[str, Any]) -> str:
    names = _step_names(details)
    what = "A causal language model" + (", as a GGUF file" if _is_gguf(folder) else "")
    done = ", then ".join(dict.fromkeys(names)) if names else "no recorded steps"
    return f"{what}, made with Headrace: {done}. Its license is not recorded here: state it before you publish it."


def _step_names(details: Mapping[str, Any]) -> list[str]:
    return [str(step["step"]) for step in details[KEY]["steps"]]


def _measured(details: Mapping[str, Any]) -> Iterator[str]:
    """Held-out figures before and after a compression."""
    before, after = details.get("before") or {}, details.get("after") or {}
    rows = [
        ("weights, MB", "weight_bytes", lambda value: f"{value / 1e6:,.2f}"),
        ("bits per weight", "bits_per_weight", lambda value: f"{value:.2f}"),
        ("held-out loss, nats per token", "loss_nats", lambda value: f"{value:.4f}"),
        ("perplexity", "perplexity", lambda value: f"{value:,.3f}"),
        ("bits per byte", "bits_per_byte", lambda value: f"{value:.4f}"),
    ]
    if not before:
        return
    yield "## Held-out figures\n"
    yield "| | original | this model |\n|---|---:|---:|"
    for name, key, show in rows:
        cells = [show(side[key]) if isinstance(side.get(key), int | float) else "-" for side in (before, after)]
        if cells != ["-", "-"]:
            yield f"| {name} | {' | '.join(cells)} |"
    data = details.get("data") or {}
    where = f"{before.get('tokens', 0):,} tokens of the {data.get('split', 'held-out')} split"
    yield f"\nOf {where}, in windows of {data.get('sequence_length', '?')} tokens.\n"


def _consumers(details: Mapping[str, Any]) -> Iterator[str]:
    """What each program that serves models made of it, against the original in floating point."""
    consumers: Mapping[str, Any] = details.get("consumers") or {}
    if not consumers:
        return
    yield "## Scored by what serves it\n"
    yield "Against the original in floating point, on the same token ids; KL is KL(original || this model) in nats.\n"
    yield "| program | version | mean KL | max KL | top-1 agreement | perplexity | texts with equal token ids |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for name, each in sorted(consumers.items()):
        if "not_run" in each:
            continue
        numbers = [f"{each['mean_kl']:.2e}", f"{each['max_kl']:.2e}", f"{each['top1_agreement']:.2%}"]
        numbers += [f"{each['perplexity']:.3f}", f"{each['texts_with_equal_ids']} of {each['texts']}"]
        yield f"| {name} | {each['version']} | {' | '.join(numbers)} |"
    yield ""
    for name, each in sorted(consumers.items()):
        if "not_run" in each:
            yield f"- {name} was not run: {each['not_run']}"
    yield ""


def _files(folder: Path, checksums: Mapping[str, str]) -> Iterator[str]:
    yield "## Weight files\n"
    yield "| file | bytes | SHA-256 |\n|---|---:|---|"
    for name, checksum in checksums.items():
        yield f"| {name} | {(folder / name).stat().st_size:,} | `{checksum}` |"
    yield "\n`manifest.json` has the checksums of every file, and this lineage as JSON.\n"


def _is_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf"))


def front_matter_of(text: str) -> dict[str, Any]:
    """The YAML in front of a card, parsed."""
    parsed: dict[str, Any] = yaml.safe_load(text.split("---\n", 2)[1])
    return parsed
