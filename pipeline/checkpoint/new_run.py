"""Places for runs that a command writes, not a training: a directory without checkpoints, or a URL to upload to."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import DataError
from foundation.paths import is_url
from foundation.remote_publish import check_can_publish, remove_probes
from foundation.remote_run import remote_checkpoints, working_directory
from foundation.run_copy import publish_run
from pipeline.checkpoint.format.naming import finished_checkpoints


def free_run_dir(out: str) -> Path:
    """Returns the local directory of a run without checkpoints, neither there nor in an object store.

    Raises:
        DataError: there are checkpoints, or the store cannot be published to.
        StorageError: the store cannot be read or written.
    """
    run_dir = working_directory(out)
    if is_url(out):
        check_can_publish(out)
        if stored := remote_checkpoints(out):
            raise DataError(f"{stored[0].url} exists already\n  try: another run directory")
    if existing := finished_checkpoints(run_dir):
        upload = f"headrace copy {run_dir} {out}, which uploads what was made, or " if is_url(out) else ""
        raise DataError(f"{existing[0][1]} exists already\n  try: {upload}another run directory")
    return run_dir


def upload_run(run_dir: Path, url: str) -> None:
    """Uploads a run that a command has written, and prints its size.

    Raises:
        DataError, StorageError: the upload failed; the run stays on this host, and the message says where.
    """
    try:
        sizes = publish_run(run_dir, url)
    except DataError as error:
        kept = f"what was made is kept: {run_dir}; headrace copy {run_dir} {url} uploads it"
        raise type(error)(f"{error}\n  {kept}") from None
    remove_probes(url)
    print(f"uploaded to {url}: {len(sizes)} files, {sum(sizes.values()) / 1e9:,.3f} GB")
