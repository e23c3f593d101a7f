"""`headrace card DIRECTORY [OUT]`: writes the papers of a tokens directory, run or model, from manifests and facts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST, Manifest, kind_of, read_manifest, write_json, write_text
from foundation.errors import DataError
from foundation.foreign_json import read_json
from foundation.paths import DIRECTORY, LOCAL, OUTPUT
from foundation.remote_directory import cache_root
from pipeline.models.card import croissant, sbom, training_summary
from pipeline.models.card.card import NAME, model_card, run_card, weight_files
from pipeline.models.card.dataset_card import dataset_card, title_of
from pipeline.models.card.facts import CardFacts, Gaps, facts_of, known_sources, load_facts
from pipeline.models.card.lineage import KEY as LINEAGE
from pipeline.models.card.lineage import corpus_of, lineage_of, training_lineage

_TEXT = """\
Writes the papers of a directory, from its manifest and those of its parents.

Tokens directory: README.md (dataset card), croissant.json (Croissant 1.1), sbom.cdx.json (CycloneDX 1.6). A run
or a model: README.md (model card), training-content-summary.md (the EU's template for Article 53(1)(d) of the AI Act),
sbom.cdx.json. Facts that only a person knows come from --facts; missing ones are marked in the papers and listed."""
Papers = dict[str, str | dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "a tokens directory, a run, one of its checkpoints, or a model that headrace wrote"
    parser.add_argument("directory", metavar="RUN|FOLDER", type=DIRECTORY, help=text)
    parser.add_argument(
        "out", metavar="OUT", type=OUTPUT, nargs="?", help="folder to write them into (default: RUN|FOLDER)"
    )
    parser.add_argument("--facts", metavar="FILE", type=LOCAL, help="JSON or YAML file of facts: headrace schema card")
    parser.add_argument("--replace", action="store_true", help="replace papers that exist")


def run(arguments: argparse.Namespace) -> int:
    """Writes the papers, and lists the gaps.

    Raises:
        ConfigError: the facts are wrong.
        DataError: the directory does not exist, or a paper exists and may not be replaced.
    """
    directory = Path(arguments.directory)
    out = Path(arguments.out) if arguments.out else directory
    if arguments.out is None and out.is_relative_to(cache_root()):
        why = f"{out} is a copy of a directory in an object store, to which nothing is added"
        raise DataError(f"{why}\n  try: a folder or a URL for the papers, as second argument")
    facts = load_facts(arguments.facts) if arguments.facts else None
    gaps = Gaps()
    papers = _papers(directory, facts, gaps)
    _check_place(out, directory)
    _check_target(out, papers, replace=arguments.replace)
    out.mkdir(parents=True, exist_ok=True)
    for name, paper in papers.items():
        if isinstance(paper, str):
            write_text(out / name, paper)
        else:
            write_json(out / name, paper)
        print(out / name)
    if croissant.NAME in papers and not (out / MANIFEST).is_file():
        print(f"{out / croissant.NAME} names files beside itself: put it beside the shards of {directory}")
    _print_gaps(gaps)
    return 0


def _print_gaps(gaps: Gaps) -> None:
    if not gaps.missing:
        print("no gaps")
        return
    print(f"{len(gaps.missing)} gaps, which only a person can fill, by --facts FILE:")
    for key, meaning in gaps.missing.items():
        print(f"  {key}: {meaning}")


def _papers(directory: Path, facts: CardFacts | None, gaps: Gaps) -> Papers:
    kind = kind_of(directory)
    if kind == "tokens":
        return _of_tokens(read_manifest(directory, kind="tokens"), facts or CardFacts(), gaps)
    if kind in ("run", "checkpoint"):
        return _of_run(directory, facts or CardFacts(), gaps)
    return _of_model(directory, facts, gaps)


def _of_tokens(manifest: Manifest, facts: CardFacts, gaps: Gaps) -> Papers:
    known_sources(facts, [source["name"] for source in corpus_of(manifest)["sources"]])
    return {
        NAME: dataset_card(manifest, facts, gaps),
        croissant.NAME: croissant.croissant(manifest, facts, gaps),
        sbom.NAME: sbom.sbom(manifest, name=title_of(manifest, facts)),
    }


def _of_run(directory: Path, facts: CardFacts, gaps: Gaps) -> Papers:
    # imports torch, which takes seconds: `--help` should not wait for it
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415
    from pipeline.checkpoint.export.heldout import heldout_figures  # noqa: PLC0415

    checkpoint = find_checkpoint(directory)
    manifest = checkpoint.manifest
    model_type = (manifest.details.get("hf_config") or {}).get("model_type") or "a model of another loop"
    details = {LINEAGE: training_lineage(manifest), "model_type": model_type, "step": checkpoint.step}
    card = run_card(details | heldout_figures(checkpoint), facts, gaps)
    return {NAME: card, **_of_training(manifest, details, facts, gaps)}


def _of_model(directory: Path, facts: CardFacts | None, gaps: Gaps) -> Papers:
    manifest = read_manifest(directory, kind="model")
    facts = facts or facts_of(manifest.details)
    details = manifest.details | {LINEAGE: lineage_of(directory)}
    checksums = {file.name: manifest.files[file.name]["sha256"] for file in weight_files(directory)}
    card = model_card(directory, details, facts, gaps, checksums)
    return {NAME: card, **_of_training(manifest, details, facts, gaps)}


def _of_training(manifest: Manifest, details: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> Papers:
    """Makes the papers of a run or a model besides its card: training content summary and SBOM."""
    lineage = details[LINEAGE]
    known_sources(facts, [source["name"] for source in training_summary.distinct_sources(lineage)])
    return {
        training_summary.NAME: training_summary.training_summary(lineage, facts, gaps),
        sbom.NAME: sbom.sbom(manifest, name=facts.name or str(details.get("model_type") or "model")),
    }


def _check_place(out: Path, directory: Path) -> None:
    """Refuses to put papers beside another directory's files, which the papers would seem to describe."""
    manifest = out / MANIFEST
    if not manifest.is_file() or directory.resolve().is_relative_to(out.resolve()):
        return
    if manifest.read_bytes() != (directory / MANIFEST).read_bytes():
        why = f"{out} is a finished directory itself: the papers of {directory} would be taken for its own"
        raise DataError(f"{why}\n  try: headrace card {directory}, or another folder as second argument")


def _check_target(out: Path, papers: Papers, *, replace: bool) -> None:
    """Refuses to overwrite files whose checksums are in a manifest; without --replace, refuses to overwrite any file.

    Raises:
        DataError: a file may not be overwritten; names it.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file\n  try: a folder")
    listed = _listed_files(out)
    for name in papers:
        if name in listed:
            why = f"{out / name} has a checksum in {MANIFEST}, which would no longer be right"
            raise DataError(
                f"{why}\n  try: another folder: headrace card DIRECTORY OUT; or headrace export --facts FILE"
            )
        if (out / name).exists() and not replace:
            raise DataError(f"{out / name} exists already\n  try: another folder, or --replace")


def _listed_files(out: Path) -> set[str]:
    if not (out / MANIFEST).is_file():
        return set()
    return set(read_json(out / MANIFEST, remedy="another folder").get("files") or ())
