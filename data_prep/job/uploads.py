"""Outputs in object stores: reduce tasks upload their shards as they finish, and the manifest follows at the end.

    s3://bucket/tokens/.job.json                         the job that makes this output, until it is finished
    s3://bucket/tokens/train/shard-00000.bin, ...        shards of finished reduce tasks
    s3://bucket/tokens/manifest.json                     the last object that is written, if none exists

Jobs with one identity (config and inputs) write the same bytes: a job that is started again, on any host, may find the
uploads of an earlier start. A job with another identity is refused: the two would mix their shards.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.job.directory import Job
from data_prep.task import read_marker_file
from data_prep.tasks.cleaning import DROPPED_TEXTS
from foundation.directory import MANIFEST, Manifest, entries, fingerprint_of, write_manifest
from foundation.errors import DataError
from foundation.lock import lock_file
from foundation.remote_directory import find_manifest, for_each
from foundation.remote_output import local_output
from foundation.remote_publish import publish, remove_probes
from foundation.storage import Stat, delete, objects_below, put_if_absent, put_object, read_object

CLAIM = ".job.json"
SKIPPED, SOURCES = "skipped.jsonl", "sources.jsonl"
_SHARD = re.compile(r"(?:train|heldout)/shard-\d+\.(?:bin|idx|mask)")
_BESIDE = re.compile(rf"tokenizer/[^/]+|{re.escape(SKIPPED)}|{re.escape(SOURCES)}|{re.escape(DROPPED_TEXTS)}")


@dataclass(frozen=True)
class Leftovers:
    """Objects that a job has left in an object store.

    Attributes:
        objects: name -> size and version; the claim comes last.
        claim: host and job directory of the job; empty if the output is finished.
        finished: whether there is a finished output; its files are not listed.
    """

    objects: Mapping[str, Stat]
    claim: str
    finished: bool


def claim(job: Job, identity: Mapping[str, Any]) -> None:
    """Marks an output as belonging to an unfinished job. Needs the exclusive lock.

    Raises:
        DataError: there is an unfinished job with another identity, in another directory.
        StorageError: the store cannot be written to.
    """
    assert job.url is not None
    own = {"identity": fingerprint_of(identity), "host": socket.gethostname(), "directory": str(job.root.absolute())}
    place, text = f"{job.url}/{CLAIM}", json.dumps(own).encode()
    if put_if_absent(place, text):
        return
    other = _read_claim(job.url)
    if other.get("identity") == own["identity"]:
        return
    if any(other.get(key) != own[key] for key in ("host", "directory")):
        why = f"{job.url} has shards of an unfinished job with other settings or inputs, working in {_where(other)}"
        raise DataError(f"{why}\n  try: headrace prep clean {job.url}, or another output")
    put_object(place, text)  # that job was in this directory; this job has its lock


def forget_lost(job: Job) -> None:
    """Removes the markers of shards that the store lacks: their tasks then run again. Needs the lock."""
    assert job.url is not None
    markers = list((job.root / "reduce").glob("[!.]*.json"))
    there = objects_below(job.url) if markers else {}
    for path in markers:
        done = read_marker_file(path, remove=path) or {}
        split = path.stem.rpartition("-")[0]
        sizes = {f"{split}/{done.get('name')}{suffix}": size for suffix, size in done.get("sizes", {}).items()}
        if not sizes or any(name not in there or there[name].bytes != size for name, size in sizes.items()):
            path.unlink()


def commit(out: Path, url: str, *, uploaded: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> Manifest:
    """Completes an output of uploaded shards with the files of a local directory; the manifest comes last.

    Args:
        out: local directory with all files except the shards.
        url: URL of the output.
        uploaded: name of each shard file -> {"bytes", "sha256"}.
        about: kind, config, parents and details of the manifest.

    Raises:
        DataError: a shard has disappeared from the store, or another process has written a directory there.
        StorageError: the store cannot be written to.
    """
    there = objects_below(url)
    lost = [name for name, entry in uploaded.items() if name not in there or there[name].bytes != entry["bytes"]]
    if lost:
        why = f"{url}/{lost[0]} was uploaded, and is not there any more ({len(lost)} of {len(uploaded)} files)"
        raise DataError(f"{why}\n  try: run the job again, with 'prep prepare' before the shares: it makes them again")
    for_each(lambda name: delete(f"{url}/{name}"), [n for n in there if _SHARD.fullmatch(n) and n not in uploaded])
    manifest = write_manifest(out, files=entries(out) | dict(uploaded), **about)
    publish(out, url, uploaded=uploaded)
    remove_probes(url)
    release(url)
    return manifest


def release(url: str) -> None:
    """Removes the claim of a finished output, and the job's files on this host."""
    if _read_claim(url):  # a user with only read access may start a finished job again
        delete(f"{url}/{CLAIM}")
    shutil.rmtree(local_output(url).parent, ignore_errors=True)


def leftovers(url: str) -> Leftovers:
    """Lists the objects that an unfinished job has left, except files in a finished output's manifest.

    Raises:
        DataError: a manifest or a claim is damaged.
        StorageError: the store cannot be read.
    """
    there, manifest = objects_below(url), find_manifest(url)
    finished = manifest is not None
    kept = {MANIFEST, *manifest.files} if manifest is not None else set[str]()
    if CLAIM not in there:
        return Leftovers({}, "", finished)
    own = [name for name in there if _SHARD.fullmatch(name) or _BESIDE.fullmatch(name)]
    names = [*sorted(name for name in own if name not in kept), CLAIM]
    return Leftovers({name: there[name] for name in names}, _where(_read_claim(url)), finished)


def clean(url: str, found: Leftovers) -> None:
    """Deletes an unfinished job's objects in the store and its files on this host; the claim last.

    Raises:
        DataError: a job on this host is making this output.
        StorageError: the store does not allow deletion.
    """
    place = local_output(url).parent
    lock = place / f".{local_output(url).name}.job" / "lock"
    with ExitStack() as stack:
        if lock.parent.is_dir():
            stack.enter_context(lock_file(lock, doing=f"making {url} on this host"))
        for_each(lambda name: delete(f"{url}/{name}"), [name for name in found.objects if name != CLAIM])
        if found.objects:
            delete(f"{url}/{CLAIM}")
        shutil.rmtree(place, ignore_errors=True)


def _read_claim(url: str) -> dict[str, Any]:
    try:
        found = json.loads(read_object(f"{url}/{CLAIM}"))
    except FileNotFoundError:  # released meanwhile
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url}/{CLAIM} is damaged: {error}\n  try: delete it, when no job works for {url}") from None
    return found if isinstance(found, dict) else {}


def _where(found: Mapping[str, Any]) -> str:
    return f"{found.get('directory', 'an unknown directory')} of {found.get('host', 'an unknown host')}"
