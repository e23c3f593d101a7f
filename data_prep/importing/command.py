"""`headrace import PREFIX OUT`: finds other tools' tokens, checks them, and writes a tokens directory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foundation.errors import ConfigError, DataError
from foundation.paths import FOLDER, LOCAL, PLACE

if TYPE_CHECKING:  # these import numpy and pyarrow, for which --help does not wait
    from data_prep.importing.documents import TokenSource
    from data_prep.importing.find import FoundTokens
    from data_prep.importing.task import Borders, ImportTask, Rules
    from foundation.directory import Manifest

_SHARD_BYTES = 512 << 20
_WORKER_BYTES = 256 << 20
"""Bytes of input per worker process: starting a process takes longer than reading fewer bytes."""
_DTYPES = ("uint16", "uint32", "int32", "int64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "tokens", metavar="PREFIX", type=LOCAL.as_path(), help="folder, file or PREFIX that another tool wrote"
    )
    parser.add_argument("out", metavar="OUT|RUN_DIR", type=PLACE, help="directory to write")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        type=FOLDER.as_path(),
        help="for tokens: Hugging Face folder of the tokenizer that made them",
    )
    parser.add_argument(
        "--heldout",
        metavar="PREFIX",
        type=LOCAL.as_path(),
        help="tokens of the held-out split; default: files named val, ...",
    )
    parser.add_argument(
        "--borders",
        choices=("format", "eos", "none"),
        help="where documents end: as the format records (rows, an index), by the end-of-text id, or with each file;"
        " default: format, or eos where it records none",
    )
    parser.add_argument("--eos-id", metavar="ID", type=int, help="end-of-text id; default: the tokenizer's")
    parser.add_argument(
        "--eos", choices=("first", "last"), help="end-of-text begins a document (llm.c) or ends it; default: by format"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the ids, for formats that do not record it")
    parser.add_argument("--workers", metavar="N", type=int, help="processes (default: the available cores)")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from data_prep.executors.base import default_workers  # noqa: PLC0415

    manifest = import_tokens(
        args.tokens,
        Path(args.out),
        tokenizer=args.tokenizer,
        heldout=args.heldout,
        choices=StatedFacts(borders=args.borders, eos_id=args.eos_id, eos=args.eos, dtype=args.dtype),
        workers=default_workers() if args.workers is None else args.workers,
    )
    made = manifest.details["imported"]
    print(f"{args.tokens}: {made['format']}, documents by {_BORDERS[made['borders']].format(**made)}")
    named = made["made_with"]
    said = f"the tokens name {named}: compare the two" if named else "the tokens record none: nothing to compare"
    print(f"tokenizer: {args.tokenizer}; {said}")
    for name in made["left_out"]:
        print(f"not read: {name}")
    for split, entry in manifest.details["splits"].items():
        shards = f"{len(entry['shards'])} shards"
        print(f"{split:>8}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, {shards}")
    print(f"  output: {args.out}, fingerprint {manifest.fingerprint[:16]}")


@dataclass(frozen=True)
class StatedFacts:
    """The command's options for facts that a format may not record; None to take them from format or tokenizer."""

    borders: Borders | None = None
    eos_id: int | None = None
    eos: Literal["first", "last"] | None = None
    dtype: str | None = None


_BORDERS = {"format": "its own record", "eos": "the id {eos_id}", "none": "file"}


def import_tokens(
    tokens: Path,
    out: Path,
    *,
    tokenizer: Path,
    heldout: Path | None = None,
    choices: StatedFacts = StatedFacts(),
    workers: int = 1,
) -> Manifest:
    """Writes the tokens of another tool as a tokens directory; see the options of the command.

    Documents keep their order. All headers, sizes and the first ids are checked before anything is written.

    Raises:
        DataError: the format is not known, a file is damaged or holds an id that the tokenizer does not have, or OUT
            exists.
        ConfigError: an option contradicts the files, or a needed option is missing.
    """
    from data_prep.importing.find import find  # noqa: PLC0415
    from data_prep.tokenizer.existing import import_tokenizer  # noqa: PLC0415
    from data_prep.tokenizer.load import describe  # noqa: PLC0415
    from foundation.directory import commit, staged  # noqa: PLC0415

    if out.exists():
        raise DataError(f"{out} exists already\n  try: remove it, or choose another output")
    details = describe(tokenizer, kind="given")
    found = find(tokens, dtype=choices.dtype, vocab_size=details["vocab_size"])
    if heldout is not None:
        _add_heldout(found, find(heldout, dtype=choices.dtype, vocab_size=details["vocab_size"]), heldout)
    _check_tokenizer(found, details["fingerprint"], tokenizer)
    rules = _rules(found, tokens, choices, tokenizer=details)
    _check_first(found, rules, chosen=choices.borders is not None)
    with staged(out) as staging:
        import_tokenizer(str(tokenizer), _made(staging / "tokenizer"))
        tasks = _tasks(found, staging, rules)
        done = _run(tasks, workers=workers, size=sum(_size(each) for each in _all(found)))
        imported = {
            "format": found.kind,
            "borders": rules.borders,
            "eos_id": rules.eos,
            "eos_first": rules.eos_first,
            "made_with": found.made_with,
            "left_out": found.left_out,
        }
        known = {
            f"{task.prefix.parent.name}/{task.prefix.name}{suffix}": sha256
            for task in tasks
            for suffix, sha256 in done[task].pop("sha256").items()
        }
        label = tokens.resolve().name
        return commit(
            staging,
            out,
            kind="tokens",
            config={"tokens": str(tokens), "heldout": str(heldout) if heldout else None, "dtype": choices.dtype},
            parents={label: _parent(found, tokens)},
            details={"tokenizer": details, "imported": imported, "skipped": {}, "splits": _splits(tasks, done, label)},
            known_sha256=known,
        )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _all(found: FoundTokens) -> list[TokenSource]:
    return [source for sources in found.sources.values() for source in sources]


def _add_heldout(found: FoundTokens, heldout: FoundTokens, path: Path) -> None:
    if heldout.kind != found.kind:
        why = f"it holds {heldout.kind}, and the tokens are {found.kind}"
        raise ConfigError("--heldout", str(path), why=why, remedy="give tokens of one format, or run two imports")
    if found.sources["heldout"]:
        named = found.sources["heldout"][0].path
        raise ConfigError("--heldout", str(path), why=f"{named} is held out by its name", remedy="leave it out")
    found.sources["heldout"] = _all(heldout)


def _check_tokenizer(found: FoundTokens, fingerprint: str, tokenizer: Path) -> None:
    from data_prep.tokenizer.fingerprint import TOKENIZER_JSON, tokenizer_fingerprint  # noqa: PLC0415

    named = Path(found.made_with or "")
    folder = named.parent if named.suffix == ".json" else named
    if not found.made_with or not (folder / TOKENIZER_JSON).is_file():
        return
    if tokenizer_fingerprint(folder) != fingerprint:
        why = f"the tokens say that they were made with {named}, which is another tokenizer"
        raise ConfigError("--tokenizer", str(tokenizer), why=why, remedy=str(folder))


def _rules(found: FoundTokens, tokens: Path, choices: StatedFacts, *, tokenizer: dict[str, Any]) -> Rules:
    from data_prep.importing.task import Rules  # noqa: PLC0415

    chosen: Borders = choices.borders or ("format" if found.borders else "eos")
    if chosen == "format" and not found.borders:
        why = f"{found.kind} does not record where documents end"
        raise ConfigError("--borders", chosen, why=why, remedy="--borders eos, or none")
    number = tokenizer["eos_id"] if choices.eos_id is None else choices.eos_id
    if chosen == "eos" and number is None:
        why = f"{tokens} records no document borders, and the tokenizer names no end-of-text token"
        raise ConfigError("--eos-id", why=why, remedy="--eos-id ID, or --borders none (one document per file)")
    first = found.eos_first if choices.eos is None else choices.eos == "first"
    masked = any(source.masked for source in _all(found))
    return Rules(tokenizer["vocab_size"], chosen, number if chosen == "eos" else None, first, masked)


def _check_first(found: FoundTokens, rules: Rules, *, chosen: bool) -> None:
    """Checks the first documents of every split: ids, end-of-text, and rows that are windows.

    Raises:
        DataError: there are no training tokens, a file is damaged, or an id is not in the tokenizer.
        ConfigError: the end-of-text id does not occur, or rows look like windows over documents.
    """
    if not found.sources["train"]:
        held = found.sources["heldout"]
        why = f"no training tokens: {held[0].path.name} is held out by its name" if held else "no training tokens"
        raise DataError(f"{why}\n  try: name the folder of the training tokens, with --heldout for the others")
    for sources in found.sources.values():
        for source in sources[:1]:
            part = next(rules.checked(source), None)
            if part is None:
                continue
            if rules.borders == "eos" and not (part.tokens == rules.eos).any():
                why = f"it does not occur in the first {part.tokens.size:,} tokens of {source.path}"
                remedy = "--eos-id ID, the id that ends a document, or --borders none (one document per file)"
                raise ConfigError("--eos-id", rules.eos, why=why, remedy=remedy)
            if found.rows and not chosen and len(part.lengths) > 1 and len(set(part.lengths.tolist())) == 1:
                why = (
                    f"every row of {source.path} has {part.lengths[0]:,} tokens: they look like windows over documents"
                )
                remedy = "--borders eos (documents go across rows, and end with end-of-text), or --borders format"
                raise ConfigError("--borders", why=why, remedy=remedy)


def _tasks(found: FoundTokens, staging: Path, rules: Rules) -> list[ImportTask]:
    from data_prep.formats.tokenfile import shard_prefix  # noqa: PLC0415
    from data_prep.importing.task import ImportTask  # noqa: PLC0415

    tasks = []
    for split, sources in found.sources.items():
        if sources:
            (staging / split).mkdir()
        for number, group in enumerate(_groups(sources)):
            prefix = shard_prefix(staging, split, number)
            tasks.append(ImportTask(tuple(group), prefix, staging / "tokenizer", rules, split == "heldout"))
    return tasks


def _groups(sources: list[TokenSource]) -> list[list[TokenSource]]:
    """Groups consecutive files into shards of `_SHARD_BYTES`, or one larger file: no sample crosses shards."""
    groups: list[list[TokenSource]] = []
    held = 0
    for source in sources:
        size = _size(source)
        if not groups or held + size > _SHARD_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(source)
        held += size
    return groups


def _size(source: TokenSource) -> int:
    path = source.path
    return (path if path.is_file() else Path(f"{path}.bin")).stat().st_size


def _run(tasks: list[ImportTask], *, workers: int, size: int) -> dict[Any, dict[str, Any]]:
    from data_prep.executors.local import LocalExecutor  # noqa: PLC0415

    if workers < 1:
        raise ConfigError("--workers", workers, why="must be positive", remedy="1 or more")
    used = min(workers, len(tasks), 1 + size // _WORKER_BYTES)
    if used == 1:
        return {task: task.run(lambda _counts: None) for task in tasks}
    with LocalExecutor(used) as executor:
        return dict(executor.run(tasks, report=lambda _counts: None))


def _parent(found: FoundTokens, tokens: Path) -> dict[str, Any]:
    """The manifest's entry for the source: names and sizes; the output's checksums cover the contents."""
    from foundation.directory import fingerprint_of  # noqa: PLC0415

    files = [(source.path.name, _size(source)) for source in _all(found)]
    sizes = sum(size for _, size in files)
    return {"path": str(tokens), "fingerprint": fingerprint_of(files), "files": len(files), "bytes": sizes}


def _splits(tasks: list[ImportTask], done: dict[Any, dict[str, Any]], label: str) -> dict[str, Any]:
    from data_prep.tasks.reduce import sum_shards  # noqa: PLC0415

    splits: dict[str, Any] = {}
    for split in dict.fromkeys(task.prefix.parent.name for task in tasks):
        shards = [done[task] for task in tasks if task.prefix.parent.name == split]
        sums = sum_shards(shards)
        if not sums["tokens"]:
            raise DataError(f"the split {split} has no tokens\n  try: another folder")
        entries = [
            {"source": label} | {key: s[key] for key in ("name", "documents", "tokens", "bytes")} for s in shards
        ]
        splits[split] = {**sums, "shards": entries, "sources": {label: sums}}
    return splits
