"""Pins: records, beside a run's checkpoints, of the branches and merges that need one of them. Retention keeps these.

    runs/base/checkpoints/.pins/step-00040000.0123456789abcdef.json     {"by": "/runs/anneal_a", "host": "node1"}

A run in an object store has its pins there, under the same names. A pin on a disk lapses when the path that it names is
gone, as seen from the host that made the pin; a pin in a store lapses when somebody deletes it.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foundation.directory import write_json
from foundation.paths import is_url
from foundation.remote_run import CHECKPOINTS
from foundation.storage import StorageError, delete, objects_below, put_object
from pipeline.checkpoint.format.naming import PREFIX, step_of

_FOLDER = ".pins"


def pin(run: Path | str, step: int, *, by: Path | str) -> None:
    """Keeps the checkpoint of a step for as long as `by` needs it.

    Args:
        run: directory of the checkpoint's run, or its URL in an object store.
        step: step of the checkpoint.
        by: run, config file or output that needs the checkpoint: a path, or a URL.

    Raises:
        OSError: the directory cannot be written.
        StorageError: the store cannot be written.
    """
    content = {"by": str(by) if is_url(by) else str(Path(by).absolute()), "host": socket.gethostname()}
    name = f"{CHECKPOINTS}/{_FOLDER}/{_name(step, content['by'])}"
    if isinstance(run, str):
        put_object(f"{run}/{name}", json.dumps(content).encode())
        return
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    write_json(run / name, content)


def unpin(run: Path | str, step: int, *, by: Path | str) -> None:
    """Removes a pin, if it exists; the arguments are those of `pin`."""
    name = f"{CHECKPOINTS}/{_FOLDER}/{_name(step, str(by) if is_url(by) else str(Path(by).absolute()))}"
    if isinstance(run, str):
        delete(f"{run}/{name}")
    else:
        (run / name).unlink(missing_ok=True)


@contextmanager
def pinned(run: Path | str, step: int, *, by: Path | str) -> Iterator[None]:
    """Keeps a checkpoint while the block runs; without effect where the run cannot be written to."""
    written = False
    with suppress(OSError, StorageError):
        pin(run, step, by=by)
        written = True
    try:
        yield
    finally:
        if written:
            unpin(run, step, by=by)


def pinned_steps(run_dir: Path) -> set[int]:
    """Steps whose checkpoints are pinned, of a run on a disk; deletes pins that have lapsed."""
    steps: set[int] = set()
    for path in (run_dir / CHECKPOINTS / _FOLDER).glob(f"{PREFIX}*.json"):
        step = step_of(path.name.split(".")[0])
        if step is None:
            continue
        if _lapsed(path):
            path.unlink(missing_ok=True)
        else:
            steps.add(step)
    return steps


def pinned_steps_in_store(url: str) -> set[int]:
    """Steps whose checkpoints are pinned, of a run in an object store.

    Raises:
        StorageError: the store cannot be listed.
    """
    names = objects_below(f"{url}/{CHECKPOINTS}/{_FOLDER}")
    return {step for name in names if (step := step_of(name.split(".")[0])) is not None}


def _lapsed(path: Path) -> bool:
    try:
        content = json.loads(path.read_text())
        by, host = str(content["by"]), content["host"]
    except (OSError, ValueError, KeyError):
        return False
    return not is_url(by) and host == socket.gethostname() and not Path(by).exists()


def _name(step: int, by: str) -> str:
    return f"{PREFIX}{step:08d}.{hashlib.sha256(by.encode()).hexdigest()[:16]}.json"
