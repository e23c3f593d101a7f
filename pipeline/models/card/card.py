"""README.md of a model or a run, as the Hugging Face Hub shows it: front matter, lineage, figures, how to load it.

A model's card is written into the staging directory before `commit`, so that the manifest lists its checksum. If facts
are given, so is the training content summary. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundation.directory import Manifest, commit, sha256_of_file
from foundation.foreign_json import read_json
from foundation.task_figures import names_in, with_interval
from pipeline.models.card import training_summary
from pipeline.models.card.facts import KEY as FACTS
from pipeline.models.card.facts import CardFacts, Gaps, facts_of
from pipeline.models.card.front_matter import as_text, of_model
from pipeline.models.card.lineage import KEY
from pipeline.models.card.loading_text import how_to_load
from pipeline.models.card.steps_text import corpus_lines, step_lines
from pipeline.models.folder.beside_weights import drop_remote_code

NAME = "README.md"
_WEIGHTS = ("*.safetensors", "*.gguf")


def write_card(folder: Path, details: Mapping[str, Any]) -> dict[str, str]:
    """Writes the card of a model that is about to be committed.

    Args:
        folder: folder with weights, config.json and tokenizer, or with model.gguf.
        details: details of the model's manifest: `lineage`, `parameters`, and the step's figures (`before`, `after`,
            `data`, `consumers`, `quantization`, `tokenizer`).

    Returns:
        SHA-256 of each weight file, so that `commit` need not read the files again.
    """
    checksums = {file.name: sha256_of_file(file) for file in weight_files(folder)}
    facts, gaps = facts_of(details), Gaps()
    (folder / NAME).write_text(model_card(folder, details, facts, gaps, checksums), encoding="utf-8")
    if details.get(FACTS) is not None:
        summary = training_summary.training_summary(details[KEY], facts, gaps)
        (folder / training_summary.NAME).write_text(summary, encoding="utf-8")
    return checksums


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a model folder that hold weights, by name."""
    return sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))


def model_card(
    folder: Path, details: Mapping[str, Any], facts: CardFacts, gaps: Gaps, checksums: Mapping[str, str]
) -> str:
    """Makes the card of a model as Markdown.

    Args:
        folder: folder with weights, config.json and tokenizer, or with model.gguf.
        details: details of the model's manifest; see `write_card`.
        facts: facts that a person has stated.
        gaps: collector of missing facts.
        checksums: SHA-256 of each weight file.
    """
    gguf, quantized = _is_gguf(folder), "quantization" in details
    tags = ["headrace", scheme_of(details)]
    if quantized and not gguf:
        tags.append("compressed-tensors")
    tags += [step for step in ("distillation", "pruning") if step in _step_names(details)]
    title = _title(_model_type(folder, details), details)
    library = "gguf" if gguf else "transformers"
    about = of_model(details, facts, gaps, library=library, tags=tags, title=title)
    parts = [as_text(about), f"# {facts.name or title}\n", f"{_summary(folder, details, facts)}\n"]
    parts += how_to_load(
        folder, scheme=scheme_of(details), consumers=details.get("consumers"), tokenizer=details.get("tokenizer")
    )
    parts += [*_origin(details), *_measured(details), *_tasks(details), *_consumers(details)]
    parts += _files(folder, checksums)
    return "\n".join(parts).rstrip() + "\n"


def run_card(details: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> str:
    """Makes the card of a run as Markdown: its lineage and its newest held-out figures.

    Args:
        details: `lineage`, `model_type`, `step`, and `heldout` and `tasks`, if the run was evaluated.
        facts: facts that a person has stated.
        gaps: collector of missing facts.
    """
    title = f"Run of {details['model_type']}, {details['step']:,} optimizer steps"
    about = of_model(details, facts, gaps, library=None, tags=["headrace"], title=title)
    parts = [as_text(about), f"# {facts.name or title}\n"]
    parts += [f"{facts.description}\n"] if facts.description else []
    what = "A training run of Headrace: checkpoint shards and metrics. `headrace export` writes its model."
    parts.append(f"{what}{_license_note(facts)}\n")
    return "\n".join([*parts, *_origin(details), *_heldout(details), *_tasks(details)]).rstrip() + "\n"


def commit_with_card(
    staging: Path,
    final: Path,
    *,
    config: Mapping[str, Any],
    parents: Mapping[str, Any],
    details: Mapping[str, Any],
    replace: bool = False,
) -> Manifest:
    """Writes the card of a model directory, and commits the directory; see `foundation.directory.commit`.

    In a folder that had its own code, config.json no longer names the missing code files.
    """
    drop_remote_code(staging)
    known = write_card(staging, details)
    about: dict[str, Any] = {"config": config, "parents": parents, "details": details}
    return commit(staging, final, kind="model", replace=replace, known_sha256=known, **about)


def scheme_of(details: Mapping[str, Any]) -> str:
    """Returns the scheme of the weights, as users write it: W4A16, Q8_0; the dtype without quantization."""
    quantization = details.get("quantization") or {}
    return str(quantization.get("scheme") or quantization.get("weights") or details.get("dtype") or "unknown")


def _origin(details: Mapping[str, Any]) -> Iterator[str]:
    yield "## Where it comes from\n"
    yield from corpus_lines(details[KEY]["corpora"])
    for number, step in enumerate(details[KEY]["steps"], start=1):
        yield from step_lines(number, step)
    if extra := details.get("extra_weights"):
        what = f"{extra['tensors']:,} tensors that the language model does not use ({', '.join(extra['first'])}, ...)"
        yield f"{what} are those of the model from which this one was made, unchanged.\n"


def _title(kind: str, details: Mapping[str, Any]) -> str:
    count = details.get("parameters")
    size = "" if not count else f", {count / 1e9:.2f}B" if count >= 1e9 else f", {count / 1e6:.2f}M"
    return f"{kind}{size}{' parameters' if size else ''}, {scheme_of(details)}"


def _model_type(folder: Path, details: Mapping[str, Any]) -> str:
    config = folder / "config.json"
    found = read_json(config).get("model_type") if config.is_file() else None
    return str(found or details.get("model_type") or "Language model")


def _summary(folder: Path, details: Mapping[str, Any], facts: CardFacts) -> str:
    names = _step_names(details)
    what = "A causal language model" + (", as a GGUF file" if _is_gguf(folder) else "")
    done = ", then ".join(dict.fromkeys(names)) if names else "no recorded steps"
    text = f"{what}, made with Headrace: {done}.{_license_note(facts)}"
    return f"{facts.description}\n\n{text}" if facts.description else text


def _license_note(facts: CardFacts) -> str:
    return "" if facts.license else " Its license is not recorded here: state it before you publish it."


def _step_names(details: Mapping[str, Any]) -> list[str]:
    return [str(step["step"]) for step in details[KEY]["steps"]]


def _measured(details: Mapping[str, Any]) -> Iterator[str]:
    """Yields held-out figures before and after a compression."""
    before, after = details.get("before") or {}, details.get("after") or {}
    rows = [
        ("weights, MB", "weight_bytes", lambda value: f"{value / 1e6:,.2f}"),
        ("bits per weight", "bits_per_weight", lambda value: f"{value:.2f}"),
        ("held-out loss, nats per token", "loss_nats", lambda value: f"{value:.4f}"),
        ("perplexity", "perplexity", lambda value: f"{value:,.3f}"),
        ("bits per byte", "bits_per_byte", lambda value: f"{value:.4f}"),
    ]
    if not before:
        yield from _heldout(details)
        return
    yield "## Held-out figures\n"
    yield "| | original | this model |\n|---|---:|---:|"
    for name, key, show in rows:
        cells = [show(side[key]) if isinstance(side.get(key), int | float) else "-" for side in (before, after)]
        if cells != ["-", "-"]:
            yield f"| {name} | {' | '.join(cells)} |"
    data = details.get("data") or {}
    where = f"{before.get('tokens', 0):,} tokens of the {data.get('split', 'held-out')} split"
    yield f"\nOver {where}, in windows of {data.get('sequence_length', '?')} tokens.\n"


def _heldout(details: Mapping[str, Any]) -> Iterator[str]:
    """Yields held-out loss during training, if it was measured at this step."""
    found = details.get("heldout")
    if found:
        yield "## Held-out figures\n"
        yield f"Held-out loss {found['loss_nats']:.4f} nats per token, at step {found['step']:,} of the training.\n"


def _tasks(details: Mapping[str, Any]) -> Iterator[str]:
    """Figures of tasks during training, if they were measured at this step."""
    tasks: Mapping[str, Any] = details.get("tasks") or {}
    if not tasks:
        return
    step = next(iter(tasks.values()))["step"]
    yield "## Tasks\n"
    yield f"At step {step:,} of the training; value [95 % interval].\n"
    yield "| task | samples | figure | value |\n|---|---:|---|---:|"
    for task, figures in tasks.items():
        for name in names_in(figures):
            yield f"| {task} | {figures['samples']:,} | {name.replace('_', ' ')} | {with_interval(figures, name)} |"
    yield ""


def _consumers(details: Mapping[str, Any]) -> Iterator[str]:
    """Figures of each program that serves the model, compared with the floating-point original."""
    consumers: Mapping[str, Any] = details.get("consumers") or {}
    if not consumers:
        return
    yield "## Scored by the programs that serve it\n"
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
