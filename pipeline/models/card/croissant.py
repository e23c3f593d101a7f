"""Croissant metadata of a tokens directory: JSON-LD of MLCommons, version 1.1. No torch.

Format: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html. Every file that the manifest lists is a
`FileObject` with its SHA-256; splits and their sources are record sets, and so is the list of input files.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from foundation.directory import Manifest
from pipeline.models.card.dataset_card import summary_of, title_of
from pipeline.models.card.facts import CardFacts, Gaps
from pipeline.models.card.lineage import corpus_of

JsonLd = dict[str, Any]
"""A node of JSON-LD."""

NAME = "croissant.json"
VERSION = "http://mlcommons.org/croissant/1.1"
_TERMS = (
    "citeAs column equivalentProperty extract field fileProperty fileObject fileSet format includes isLiveDataset "
    "jsonPath key md5 parentField path recordSet references regex repeated replace samplingRate separator source "
    "subField transform"
)
_CONTEXT: JsonLd = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}
"""JSON-LD context, as in the specification."""
_FORMATS = {".json": "application/json", ".jsonl": "application/jsonlines", ".jinja": "text/plain"}
_SIZES = {"documents": "documents", "tokens": "tokens", "bytes": "bytes of UTF-8"}
_INPUTS = "sources.jsonl"
_INPUT_FIELDS = {
    "source": ("sc:Text", "name of the source"),
    "file": ("sc:Text", "name of the input file"),
    "bytes": ("sc:Integer", "its size"),
    "xxh128": ("sc:Text", "XXH3-128 of its bytes"),
}


def croissant(manifest: Manifest, facts: CardFacts, gaps: Gaps) -> JsonLd:
    """Makes the metadata as a JSON object, for a file beside the manifest.

    Args:
        manifest: manifest of the tokens directory.
        facts: facts that a person has stated.
        gaps: collector of missing facts that Croissant requires or recommends.
    """
    about = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": VERSION,
        "name": title_of(manifest, facts),
        "description": summary_of(manifest, facts),
        "version": _or_gap("version", facts.version, gaps),
        "license": _or_gap("license", facts.license, gaps),
        "url": _or_gap("url", facts.url, gaps),
        "datePublished": _or_gap("published", facts.published, gaps),
        "creator": _creator(facts, gaps),
        "citeAs": _or_gap("citation", facts.citation, gaps),
        "inLanguage": facts.language or corpus_of(manifest)["languages"] or None,
        "identifier": f"sha256:{manifest.fingerprint}",
        "distribution": [_file(name, entry) for name, entry in manifest.files.items()],
        "recordSet": _record_sets(manifest),
    }
    return {key: value for key, value in about.items() if value is not None}


def _or_gap(key: str, value: str | None, gaps: Gaps) -> str | None:
    if value is None:
        gaps.mark(key)
    return value


def _creator(facts: CardFacts, gaps: Gaps) -> JsonLd | None:
    name = _or_gap("provider.name", facts.provider.name, gaps)
    return None if name is None else {"@type": "sc:Organization", "name": name}


def _file(name: str, entry: JsonLd) -> JsonLd:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{entry['bytes']} B",
        "encodingFormat": _FORMATS.get(PurePosixPath(name).suffix, "application/octet-stream"),
        "sha256": entry["sha256"],
    }


def _record_sets(manifest: Manifest) -> list[JsonLd]:
    splits = [{"split": name, **corpus_of(manifest, split=name)} for name in manifest.details["splits"]]
    of_splits = [{key: split[key] for key in ("split", "documents", "tokens")} for split in splits]
    of_sources = [
        {"split": split["split"], **{key: source[key] for key in ("name", *_SIZES)}}
        for split in splits
        for source in split["sources"]
    ]
    sets = [
        _inline("splits", "The splits and their sizes.", of_splits, key=["split"]),
        _inline("split_sources", "Sizes of each source in each split.", of_sources, key=["split", "name"]),
    ]
    return [*sets, _inputs()] if _INPUTS in manifest.files else sets


def _inline(name: str, text: str, rows: list[JsonLd], *, key: list[str]) -> JsonLd:
    """Makes a record set whose records are in the metadata itself."""
    fields = [
        _field(f"{name}/{column}", "sc:Integer" if column in _SIZES else "sc:Text", _SIZES.get(column, column))
        for column in rows[0]
    ]
    keys = [{"@id": f"{name}/{column}"} for column in key]
    data = [{f"{name}/{column}": value for column, value in row.items()} for row in rows]
    about = {"@type": "cr:RecordSet", "@id": name, "name": name, "description": text}
    return about | {"key": keys, "field": fields, "data": data}


def _inputs() -> JsonLd:
    fields = [
        _field(f"inputs/{column}", kind, text)
        | {"source": {"fileObject": {"@id": _INPUTS}, "extract": {"column": column}}}
        for column, (kind, text) in _INPUT_FIELDS.items()
    ]
    about = {"@type": "cr:RecordSet", "@id": "inputs", "name": "inputs"}
    return about | {"description": "The input files that data prep read.", "field": fields}


def _field(name: str, kind: str, text: str) -> JsonLd:
    return {"@type": "cr:Field", "@id": name, "name": name, "description": text, "dataType": kind}
