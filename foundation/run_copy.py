"""Copies runs to and from an object store, with all checkpoints; `remote_run` describes the store's layout.

The copying process holds the run's lease in the store, like a training process: of two writers, one is refused. The
manifest is written last.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from foundation.directory import staged
from foundation.errors import DataError
from foundation.lease import SILENT_S, held, newest_lease, wait_until_free
from foundation.lock import NoLocksError, lock_file
from foundation.remote_directory import (
    Progress,
    fetch,
    fetch_files,
    files_beside,
    find_manifest,
    give_name,
    local_manifest,
    read_remote_manifest,
    refuse_existing,
    require_room,
)
from foundation.remote_publish import publish, taken
from foundation.remote_run import (
    CHECKPOINTS,
    RUN_LOCK,
    claim,
    is_small_name,
    remote_checkpoints,
    working_directory,
)
from foundation.storage import patiently

T = TypeVar("T")
LATEST = "latest"


def publish_run(run_dir: Path, url: str, *, progress: Progress = lambda _bytes: None) -> dict[str, int]:
    """Copies a run to an object store, where it can be resumed. A repetition sends only missing files.

    Args:
        run_dir: directory of the run, in which no process trains.
        url: URL of the run, which has no manifest yet.
        progress: function called with the bytes of each sent file.

    Returns:
        The bytes of every file in the store, without the run's manifest.

    Raises:
        DataError: a process trains in `run_dir` or writes to `url`; the URL has a finished run, or checkpoints that the
            run lacks; a checkpoint is damaged; or the store's listing differs from the sent files.
        LeaseLostError: another process has taken over the lease while this one was paused.
        StorageError: the store cannot be written to.
    """
    token, place = secrets.token_hex(16), url.rstrip("/")
    with _without_training(run_dir):
        if working_directory(place) == run_dir:  # this copy is also the host's record of the store
            claim(place, token)
        with held(place, token=token, silent_s=SILENT_S, say=_say) as lease:
            if find_manifest(place) is not None:  # before any checkpoint is sent: a run there would resume from it
                raise taken(place)
            # the newest first: a run would resume from the checkpoints of a killed copy
            paths = sorted((run_dir / CHECKPOINTS).glob("step-*"), reverse=True)
            paths = [path for path in paths if path.name.removeprefix("step-").isdecimal()]
            found = {path: local_manifest(path) for path in paths}
            there = {read_remote_manifest(each.url)[0]: each.url for each in remote_checkpoints(place)}
            if others := [url for text, url in there.items() if text not in {text for text, _ in found.values()}]:
                why = f"{others[0]} is not a checkpoint of {run_dir}: the copy would mix two runs"
                raise DataError(f"{why}\n  try: delete everything below {place}, or choose another place")
            sizes: dict[str, int] = {}

            def checked(act: Callable[[], T]) -> T:
                lease.check()
                return act()

            for path, (text, manifest) in found.items():
                sent = {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
                if text not in there:
                    to = f"{place}/{CHECKPOINTS}/{path.name}.{lease.number}"
                    sent = publish(path, to, progress=progress, trying=checked)
                sizes |= {f"{CHECKPOINTS}/{path.name}/{name}": size for name, size in sent.items()}
            return sizes | publish(run_dir, place, progress=progress, trying=checked, beside=is_small_name)


@contextmanager
def _without_training(run_dir: Path) -> Iterator[None]:
    """Keeps processes from training in a run; none can where it cannot be written to."""
    with ExitStack() as stack:
        if os.access(run_dir, os.W_OK):
            try:
                stack.enter_context(lock_file(run_dir / RUN_LOCK, doing=f"training in {run_dir}"))
            except NoLocksError as error:
                remedy = "when none does, copy the run to a local disk with cp -r, and run this command on the copy"
                raise DataError(f"{error.cause}: a process may train there\n  try: {remedy}") from None
        yield


def fetch_run(url: str, final: Path, *, progress: Progress = lambda _bytes: None) -> dict[str, int]:
    """Copies a run from an object store to a disk, with its newest checkpoint of every step, completely or not at all.

    Args:
        url: URL of the run, to which no process writes.
        final: path of the copy, which must not exist.
        progress: function called with the bytes of each copied file.

    Returns:
        The bytes of every copied file, without the run's manifest.

    Raises:
        DataError: a process writes to `url`, `final` exists, the disk has no room, or a checksum differs.
        StorageError: the store cannot be read.
    """
    refuse_existing(final)
    if (lease := patiently(partial(newest_lease, url))) is not None:
        wait_until_free(url, lease, say=_say)
    text, _ = read_remote_manifest(url)
    files = files_beside(url, wanted=is_small_name)
    newest = {each.step: each for each in reversed(remote_checkpoints(url))}
    found = {f"step-{step:08d}": (each.url, read_remote_manifest(each.url)) for step, each in newest.items()}
    sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    for name, (_, (_, manifest)) in found.items():
        sizes |= {f"{CHECKPOINTS}/{name}/{file}": int(entry["bytes"]) for file, entry in manifest.files.items()}
    require_room(sum(sizes.values()), final)
    with staged(final) as staging:
        for name, (place, manifest_there) in found.items():
            fetch(place, staging / CHECKPOINTS / name, progress=progress, found=manifest_there)
        fetch_files(url, files, staging, progress=progress)
        if found:
            with suppress(OSError):  # the file system may lack symbolic links
                (staging / CHECKPOINTS / LATEST).symlink_to(max(found))
        give_name(staging, final, text)
    return sizes


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
