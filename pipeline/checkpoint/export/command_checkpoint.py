"""`headrace checkpoint ls|verify|export|torch`: lists, verifies and exports checkpoints, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from foundation.errors import DataError
from foundation.paths import OUTPUT, RUN
from foundation.remote_directory import fetch
from foundation.storage import StorageError
from pipeline.checkpoint.checkpoint import Checkpoint, StoredCheckpoint
from pipeline.checkpoint.export import command_export

if TYPE_CHECKING:
    from pipeline.checkpoint.export.verify import Problem

EXIT_INTACT, EXIT_DAMAGED = 0, 1
_SHOWN = 8
"""Largest number of problems printed per checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headrace checkpoint`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ls|verify|export|torch")
    text = "the checkpoints of a run, or the tensors of one checkpoint"
    listing = verbs.add_parser("ls", help=text, description=f"Lists {text}.")
    listing.add_argument("path", metavar="RUN|CHECKPOINT", type=RUN, help="a run directory, or one of its checkpoints")
    listing.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    text = "read every byte and compare it with the checksums and the manifest"
    verify = verbs.add_parser(
        "verify", help=text, description=f"{text.capitalize()}; exit code 1 when a checkpoint is damaged."
    )
    verify.add_argument(
        "path",
        metavar="RUN|CHECKPOINT",
        type=RUN,
        help="a run directory (its newest checkpoint is read), or one checkpoint",
    )
    verify.add_argument("--all", action="store_true", help="read all checkpoints of the run")
    export = verbs.add_parser("export", help="write the model as a Hugging Face folder: as headrace export")
    command_export.add_arguments(export)
    text = "write all tensors, optimizer states too, as one file of torch.save, as torch's dcp_to_torch_save does"
    plain = verbs.add_parser("torch", help=text, description=f"{text.capitalize()}.")
    plain.add_argument("path", metavar="RUN|CHECKPOINT", type=RUN, help="a run directory, or one of its checkpoints")
    plain.add_argument(
        "out", metavar="OUT.pt", type=OUTPUT, help="the file to write; the whole state is held in memory once"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen verb.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    verbs = {"ls": _list, "verify": _verify, "export": command_export.run, "torch": _torch}
    return verbs[arguments.verb](arguments)


def _list(arguments: argparse.Namespace) -> int:
    # these import torch, which takes seconds: `--help` should not wait for it
    from pipeline.checkpoint.export import find, listing  # noqa: PLC0415

    path = Path(arguments.path)
    found = find.find_checkpoints(path)
    one = find.is_checkpoint(path)
    rows = listing.tensor_rows(found[0]) if one else listing.checkpoint_rows(found)
    if arguments.json:
        print(json.dumps(rows))
        return 0
    console = _console()
    if one:
        title = f"{found[0].path}: {len(rows)} tensors, {listing.format_bytes(sum(row['bytes'] for row in rows))}"
        console.print(listing.tensor_table(rows, title))
        return 0
    console.print(listing.checkpoint_table(rows))
    for name in listing.unfinished_checkpoints(path):
        console.print(f"{name}: being written, or left by a killed run; the next start removes it", markup=False)
    console.print("only file sizes were checked; headrace checkpoint verify reads every byte", markup=False)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.checkpoint.export.find import find_checkpoints  # noqa: PLC0415

    found = find_checkpoints(Path(arguments.path))
    chosen = found if arguments.all else found[:1]
    damaged = 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    for checkpoint in chosen:
        with Progress(*columns, console=_console(error=True), transient=True) as bar:
            task = bar.add_task(checkpoint.path.name, total=_bytes(checkpoint.path) or None)
            problems = _problems(checkpoint, partial(bar.advance, task))
        damaged += bool(problems)
        where = checkpoint.url if isinstance(checkpoint, StoredCheckpoint) else checkpoint.path
        print(f"{where}: {'damaged' if problems else 'intact'}")
        for problem in problems[:_SHOWN]:
            print(f"  {problem.place}: {problem.what}")
        if len(problems) > _SHOWN:
            print(f"  and {len(problems) - _SHOWN} more")
    if damaged:
        print(_advice(damaged, len(chosen), every=len(chosen) == len(found)))
    return EXIT_DAMAGED if damaged else EXIT_INTACT


def _problems(checkpoint: Checkpoint, progress: Callable[[int], None]) -> list[Problem]:
    """Verifies a checkpoint; copies it to this host first if it is in an object store."""
    from pipeline.checkpoint.export.verify import Problem, verify_checkpoint  # noqa: PLC0415

    if not isinstance(checkpoint, StoredCheckpoint):
        return verify_checkpoint(checkpoint, progress=progress)
    with tempfile.TemporaryDirectory(dir=checkpoint.path.parents[1], prefix=".verified-") as work:
        path = Path(work) / checkpoint.path.name
        try:
            fetch(checkpoint.url, path, progress=progress)
        except StorageError:
            raise
        except DataError as error:
            return [Problem(checkpoint.url, str(error).splitlines()[0])]
        return verify_checkpoint(Checkpoint(path, checkpoint.step))


def _torch(arguments: argparse.Namespace) -> int:
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415
    from pipeline.checkpoint.format.torch_reader import save_for_torch  # noqa: PLC0415

    out = Path(arguments.out)
    if out.exists():
        raise DataError(f"{out} exists already\n  try: another name")
    checkpoint = find_checkpoint(Path(arguments.path))
    print(f"{out}: {save_for_torch(checkpoint.path, out)} tensors of {checkpoint.path}")
    return 0


def _advice(damaged: int, read: int, *, every: bool) -> str:
    if damaged < read:
        return "  try: nothing; a resume skips damaged checkpoints, and takes the newest that is intact"
    if every:
        return "  try: restore a copy; a resume refuses to start over while the run has only damaged checkpoints"
    return "  try: --all, to see whether an older one is intact; a resume falls back to it by itself"


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file())


def _console(*, error: bool = False) -> Console:
    stream = sys.stderr if error else sys.stdout
    console = Console(file=stream, highlight=False)
    # a log has no width to wrap at
    return console if console.is_terminal else Console(file=stream, highlight=False, width=160)
