"""`headrace copy FROM TO`: copies finished directories between a disk and an object store."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from foundation.directory import MANIFEST
from foundation.errors import DataError
from foundation.paths import local_path
from foundation.remote_directory import fetch, local_manifest, remote_manifest
from foundation.remote_publish import check_can_publish, publish, remove_probes, sizes_below
from foundation.run_copy import fetch_run, publish_run
from foundation.storage import is_remote

_TEXT = """\
Copies a finished directory (tokens, a model, logits, a run with its checkpoints) to an object store, or from one.

The copy appears whole or not at all: its manifest is written last, and only where none exists; a copy on a disk gets
its name when every checksum is right. URLs are fsspec's: s3://BUCKET/PREFIX, gs://, az://. Credentials and endpoints
are read as the store's own tools do (AWS_PROFILE, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...); pip installs
its package: s3fs, gcsfs, adlfs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    parser.add_argument("source", metavar="FROM", help="the finished directory to copy, or its URL")
    parser.add_argument("target", metavar="TO", help="URL or path of the copy; nothing may exist there yet")


def run(arguments: argparse.Namespace) -> int:
    """Copies, and prints what was copied."""
    source, target = arguments.source, arguments.target
    if is_remote(source) == is_remote(target):
        between = "both are in object stores" if is_remote(source) else "neither is in an object store"
        raise DataError(f"{between}: {source}, {target}\n  try: a path and a URL such as s3://BUCKET/PREFIX")
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn  # noqa: PLC0415

    local = Path(local_path(target if is_remote(source) else source))
    manifest = remote_manifest(source) if is_remote(source) else local_manifest(local)[1]
    if is_remote(target):
        check_can_publish(target)
    run = manifest.kind == "run"
    known = manifest.bytes if is_remote(source) else sum(sizes_below(local).values())
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("copying", total=known or None)

        def progress(count: int) -> None:
            bar.advance(task, count)

        if is_remote(source):
            sizes = (fetch_run if run else _fetch)(source, local, progress=progress)
        else:
            sizes = (publish_run if run else publish)(local, target, progress=progress)
            remove_probes(target)
    what = f"{manifest.kind}, {len(sizes)} files, {sum(sizes.values()) / 1e9:,.3f} GB"
    beside = len(sizes.keys() - manifest.files.keys())
    what += f", {beside} of them not in its {MANIFEST}" if beside and not run else ""
    print(f"{target}: {what}" + ("" if run else f", fingerprint {manifest.fingerprint[:16]}"))
    return 0


def _fetch(url: str, final: Path, *, progress: Callable[[int], None]) -> dict[str, int]:
    """Copies a directory other than a run from an object store; returns the bytes of every file."""
    files = fetch(url, final, progress=progress, beside=True).files
    return {name: int(entry["bytes"]) for name, entry in files.items()}
