"""The end of a job: writes all files beside the shards, and commits the output by a rename."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from data_prep.config.corpus import TOKENIZER_PARENT, CorpusConfig, changed_fields
from data_prep.formats.tokenfile import SPLITS
from data_prep.job import uploads
from data_prep.job.changed_inputs import describe_changes
from data_prep.job.directory import Job
from data_prep.job.dropped_duplicates import DUPLICATES_FILE, count_duplicates, describe_clusters, duplicate_bytes
from data_prep.job.preflight import check_splits_not_empty
from data_prep.job.uploads import SKIPPED, SOURCES
from data_prep.sources.bad_records import BadRecordCount
from data_prep.sources.records import BadRecord
from data_prep.task import MARKER, Marker, read_marker
from data_prep.tasks.cleaning import DROPPED_TEXTS, EXAMPLES
from data_prep.tasks.make_tokenizer import tokenizer_folder
from data_prep.tasks.map import NAMED_DOCUMENTS, sum_counts
from data_prep.tasks.reduce import sum_shards
from data_prep.tasks.sorted_runs import list_runs
from data_prep.tasks.texts import BAD_RECORDS
from foundation.directory import Manifest, Parents, commit
from foundation.errors import ConfigError, DataError
from foundation.remote_output import finished
from foundation.storage import read_file

_MARKER_KEYS = {"runs", "counts", "skipped", "dropped", "edited", "files"}


def load_map_markers(job: Job) -> list[Marker]:
    """Loads the markers of all map tasks, in order.

    Raises:
        DataError: some tasks have not finished, or have fewer runs than they wrote; too many records were unreadable,
            or a split is empty.
    """
    tasks = len(job.load_plan())
    found = [read_marker(job.map_directory(i)) for i in range(tasks)]
    missing = [i for i, done in enumerate(found) if done is None]
    if missing:
        few = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise DataError(
            f"{len(missing)} of {tasks} map tasks have not finished: {few}\n  try: run them, then reduce again"
        )
    markers = [done for done in found if done is not None]
    for i, done in enumerate(markers):
        directory = job.map_directory(i)
        if not done.keys() >= _MARKER_KEYS:
            raise DataError(f"{directory / MARKER} is damaged\n  try: rm -r {directory} and run again")
        if (runs := len(list_runs(directory))) != done["runs"]:
            why = f"{directory} has {runs} runs, and {done['runs']} were written"
            raise DataError(f"{why}\n  try: remove it and run again")
    bad = BadRecordCount(job.config)
    bad.add_all(_bad_records(job, tasks))
    documents = sum_counts(markers)[:, :, 0].sum(axis=0).tolist()
    check_splits_not_empty(
        dict(zip(SPLITS, documents, strict=True)), job.config, dropped=count_by_reason(markers, "dropped"), bad=bad
    )
    return markers


def finish(
    job: Job, *, markers: list[Marker], results: list[tuple[str, Marker]], runs: Sequence[Path], tokenizer: str | None
) -> Manifest:
    """Completes `out/`, commits it as the output, and removes the job directory.

    Args:
        markers: completion markers of the map tasks, in order.
        results: (split, result) of the reduce tasks, in order.
        runs: directories of the runs of all map tasks, in order.
        tokenizer: fingerprint of the given tokenizer's files, or None.
    """
    shards = {split: [done for of_split, done in results if of_split == split] for split in SPLITS}
    known, sizes = _of_shard_files(results, "sha256"), _of_shard_files(results, "sizes")
    files = _write_sources(job.out / SOURCES, markers)
    _write_skipped(job, len(markers))
    _copy_tokenizer(tokenizer_folder(job.tokenizer), job.out / "tokenizer")
    _remove_unknown_files(job.out, set(known))
    _write_dropped(job, len(markers))
    details = {
        "tokenizer": read_marker(job.tokenizer),
        "splits": {split: _split_entry(shards[split], job.config) for split in SPLITS if shards[split]},
        **{key: count_by_reason(markers, key) for key in ("skipped", "edited")},
        "dropped": count_by_reason(markers, "dropped") | count_duplicates(job),
        "dropped_bytes": count_by_reason(markers, "dropped_bytes") | duplicate_bytes(job, runs),
        "cleaning": (job.saved_identity() or {}).get("cleaning"),
    }
    present = {
        "clusters": describe_clusters(job, runs),
        "long_words": name_long_words(markers),
        "dropped_by_source": _dropped_by_source(markers),
        "unprinted": count_by_reason(markers, "unprinted"),
    }
    details |= {key: value for key, value in present.items() if value}
    about: Parents = {"config": job.config.identity(), "parents": _parents(job, files, tokenizer)}
    about |= {"kind": "tokens", "details": details}
    if job.url is None:
        manifest = commit(job.out, job.output, known_sha256=known, **about)
    else:
        uploaded = {name: {"bytes": size, "sha256": known[name]} for name, size in sizes.items()}
        manifest = uploads.commit(job.out, job.url, uploaded=uploaded, about=about)
    job.remove()
    return manifest


def _of_shard_files(results: list[tuple[str, Marker]], key: str) -> Marker:
    """Collects one value of every shard file from the results of the reduce tasks: name -> value."""
    return {f"{s}/{done['name']}{suffix}": value for s, done in results for suffix, value in done.get(key, {}).items()}


def is_finished(job: Job, identity: dict[str, Any], *, files: Mapping[tuple[str, str], int]) -> bool:
    """Whether the output exists and was made with this config from files with these names and sizes.

    Args:
        files: (source, name) -> size of each input, without builders.

    Raises:
        DataError: an output of this name was made differently.
    """
    output = str(job.output) if job.url is None else job.url
    if job.output.is_file():
        remedy = "choose another output; a directory is made there"
        raise ConfigError("output", output, why="it exists, and is a file", remedy=remedy)
    manifest = finished(output, kind="tokens")
    if manifest is None:
        return False
    made_from = _sources(output, {s.label for s in job.config.sources if s.builder})
    inputs = _listing(made_from)
    tokenizer = manifest.parents.get(TOKENIZER_PARENT, {}).get("fingerprint")
    found = [] if inputs == identity["inputs"] else ["inputs"]
    found += [] if tokenizer == identity["tokenizer"] else ["tokenizer"]
    found += [] if manifest.details.get("cleaning") == identity["cleaning"] else ["cleaning"]
    found += changed_fields(identity["config"], manifest.config)
    if found:
        remedy = f"remove {output}" if job.url is not None else f"rm -r {output} to make it anew"
        changes = describe_changes(made_from, files) if "inputs" in found else ""
        raise DataError(
            f"{output} exists, and was made differently: {', '.join(found)}{changes}\n"
            f"  try: {remedy}, or --set output=... to keep both"
        )
    return True


def _sources(output: str, builders: set[str]) -> dict[tuple[str, str], int]:
    """Sizes of the files of an output's sources, in order, without builders.

    Raises:
        DataError: the list is missing or damaged.
    """
    path = f"{output}/{SOURCES}"
    try:
        rows = [json.loads(line) for line in read_file(path).splitlines()]
        return {(row["source"], row["file"]): row["bytes"] for row in rows if row["source"] not in builders}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}\n  try: remove {output} and run again") from None


def _listing(files: Mapping[tuple[str, str], int]) -> str:
    """The `listing_fingerprint` of files."""
    digest = hashlib.sha256()
    for (source, file), size in files.items():
        digest.update(json.dumps([source, file, size]).encode() + b"\n")
    return digest.hexdigest()


def _bad_records(job: Job, tasks: int) -> Iterator[BadRecord]:
    for i in range(tasks):
        with (job.map_directory(i) / BAD_RECORDS).open() as lines:
            yield from (BadRecord(**json.loads(line)) for line in lines)


def _write_skipped(job: Job, tasks: int) -> None:
    with (job.out / SKIPPED).open("wb") as out:
        for i in range(tasks):
            out.write((job.map_directory(i) / BAD_RECORDS).read_bytes())


def _dropped_by_source(markers: Sequence[Marker]) -> dict[str, dict[str, dict[str, Any]]]:
    """Source -> "step: reason" -> `documents`, the number that cleaning dropped, and the first few as `examples`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for marker in markers:  # markers of older versions have no such counts
        for source, reasons in marker.get("dropped_by_source", {}).items():
            for reason, count in reasons.items():
                entry = found.setdefault(source, {}).setdefault(reason, {"documents": 0, "examples": []})
                entry["documents"] += count
                entry["examples"] += marker["dropped_examples"][source][reason]
                del entry["examples"][EXAMPLES:]
    return found


def _write_dropped(job: Job, tasks: int) -> None:
    if job.config.list_dropped == "no":
        return
    with (job.out / DROPPED_TEXTS).open("wb") as out:
        for i in range(tasks):
            with (job.map_directory(i) / DROPPED_TEXTS).open("rb") as listed:
                shutil.copyfileobj(listed, out)
        if (job.root / DUPLICATES_FILE).exists():
            with (job.root / DUPLICATES_FILE).open("rb") as listed:
                shutil.copyfileobj(listed, out)


def count_by_reason(markers: list[Marker], key: str) -> dict[str, int]:
    """Sums the counts of all map tasks by reason, from the dictionaries under `key` in the markers that have it."""
    total: Counter[str] = sum((Counter(marker.get(key, {})) for marker in markers), Counter())
    return dict(sorted(total.items()))


def name_long_words(markers: list[Marker]) -> list[Marker]:
    """The documents with the longest words, longest first: {characters, source, file, "line", "row" or "record"}."""
    found = {tuple(document) for marker in markers for document in marker.get("long_words", ())}
    longest = sorted(found, key=lambda document: (-document[0], document[1:]))[:NAMED_DOCUMENTS]
    return [
        {"characters": characters, "source": source, "file": file, unit: at}
        for characters, source, file, unit, at in longest
    ]


def _write_sources(path: Path, markers: list[Marker]) -> list[Marker]:
    """Writes one line per input file: source, file, bytes, xxh128 (for a file read in parts, of the parts' hashes)."""
    files: list[dict[str, Any]] = []
    with path.open("w", encoding="ascii") as out:
        sums: list[str] = []
        for source, file, size, part, parts, xxh128 in (entry for marker in markers for entry in marker["files"]):
            sums.append(xxh128)
            if part == parts - 1:
                whole = xxh128 if parts == 1 else xxhash.xxh3_128_hexdigest("".join(sums).encode())
                files.append({"source": source, "file": file, "bytes": size, "parts": parts, "xxh128": whole})
                out.write(json.dumps(files[-1]) + "\n")
                sums = []
    return files


def _parents(job: Job, files: list[Parents], tokenizer: str | None) -> Parents:
    """Parents for the manifest: each source's path, and a fingerprint of its files' names, sizes and hashes."""
    parents: Parents = {}
    for source in job.config.sources:
        own = [f for f in files if f["source"] == source.label]
        digest = hashlib.sha256("".join(json.dumps([f["file"], f["bytes"], f["xxh128"]]) + "\n" for f in own).encode())
        parents[source.label] = {
            "path": source.path if source.builder is None else source.builder,
            "fingerprint": digest.hexdigest(),
            "files": len(own),
            "bytes": sum(f["bytes"] for f in own),
        }
    if tokenizer is not None:
        parents[TOKENIZER_PARENT] = {"path": job.config.tokenizer.path, "fingerprint": tokenizer}
    return parents


def _split_entry(shards: list[dict[str, Any]], config: CorpusConfig) -> dict[str, Any]:
    labels = [source.label for source in config.sources]
    entries = [{**shard, "source": labels[shard["source"]]} for shard in shards]
    for entry in entries:
        del entry["sha256"], entry["lengths"]
        entry.pop("sizes", None)
    sources = {label: sum_shards([s for s in shards if labels[s["source"]] == label]) for label in labels}
    return {**sum_shards(shards), "shards": entries, "sources": {k: v for k, v in sources.items() if v["documents"]}}


def _copy_tokenizer(folder: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, copy_function=shutil.copyfile)


def _remove_unknown_files(out: Path, shards: set[str]) -> None:
    """Removes all files that are not known, such as the partial manifest of a killed commit."""
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        known = name in shards | {SKIPPED, SOURCES, DROPPED_TEXTS} or name.startswith("tokenizer/")
        if path.is_file() and not known:
            path.unlink()
