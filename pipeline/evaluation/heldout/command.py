"""`python -m pipeline eval MODEL --data TOKENS`: held-out loss, perplexity and bits per byte of a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foundation.paths import FOLDER, PLACE
from foundation.section import parse
from foundation.task_figures import Figures
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.heldout.data import FieldNames, HeldOutData, as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.runtime.metrics.perplexity import show_bits_per_byte

Show = Callable[[int, int], None]


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declares the command's arguments, with the defaults of `HeldOutData`.

    Args:
        parser: parser of the command.
        optional: whether MODEL and --data may be left out, as in a comparison of several models.
    """
    defaults = HeldOutData(path="")
    count: dict[str, Any] = {"nargs": "?"} if optional else {}
    parser.add_argument(
        "model", metavar="MODEL", type=FOLDER, help="a Hugging Face model folder, quantized or not", **count
    )
    parser.add_argument("--data", required=not optional, metavar="TOKENS", type=PLACE, help="a tokens directory")
    parser.add_argument("--split", default=defaults.split, help="default: %(default)s")
    add_window_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, metavar="B", help="default: %(default)s")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="evaluate about N tokens, evenly spaced; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that default to the values of the model's training."""
    parser.add_argument(
        "--sequence-length", type=int, metavar="T", help="default: as trained, by the model's manifest; 256 without one"
    )
    parser.add_argument(
        "--mask-documents",
        action=argparse.BooleanOptionalAction,
        help="attention and loss within documents alone; default: as trained, by the model's manifest",
    )


def window_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The given arguments among those of `add_window_arguments`, as fields of `HeldOutData`."""
    given = {"sequence_length": args.sequence_length, "mask_documents": args.mask_documents}
    return {name: value for name, value in given.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    """Checks, loads, evaluates, prints; torch is imported only after the checks have passed.

    Raises:
        ConfigError, DataError: the model or the data is missing, damaged or unusable, or they do not fit together.
    """
    folder = ModelFolder.open(args.model)
    data = parse(
        HeldOutData,
        {
            "path": args.data,
            "split": args.split,
            **window_fields(args),
            "batch_size": args.batch_size,
            "max_tokens": args.max_tokens,
        },
        at="data",
    )
    data = as_trained(data, folder.path)
    dataset = open_heldout(data, folder, names=FieldNames("--data", "--sequence-length"))
    result = _with_bar(folder, data, dataset)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))
    return 0


def _with_bar(folder: ModelFolder, data: HeldOutData, dataset: TokenDataset) -> Figures:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"evaluating {folder.path.name}", total=None)
        show: Show = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        return evaluate_folder(folder, data, dataset, progress=show)[1]


def evaluate_folder(
    folder: ModelFolder, data: HeldOutData, dataset: TokenDataset, *, progress: Show = lambda _done, _all: None
) -> tuple[Any, Figures]:
    """Loads a model on the first GPU, or the CPU without one, and evaluates it.

    Args:
        folder: opened folder of the model.
        data: held-out section of the evaluation.
        dataset: dataset that `open_heldout` returns.
        progress: called with (windows done, all).

    Returns:
        The model, and the figures that `headrace eval --json` prints.

    Raises:
        DataError: the model cannot be loaded (`load_model`).
    """
    from pipeline.evaluation.heldout.heldout_loss import evaluate  # noqa: PLC0415  (brings in torch)
    from pipeline.models.folder.loading import load_model, pick_device  # noqa: PLC0415
    from pipeline.models.padding import check_padded_positions  # noqa: PLC0415

    device = pick_device()
    model = load_model(folder.path, device=device)
    check_padded_positions(model, sequence_length=data.sequence_length)
    heldout = evaluate(
        model,
        dataset,
        batch_size=data.batch_size,
        device=device,
        max_windows=data.max_windows,
        mask_documents=data.mask_documents,
        progress=progress,
    )
    where = {
        "model": str(folder.path),
        "data": str(data.path),
        "split": data.split,
        "sequence_length": data.sequence_length,
        "mask_documents": data.mask_documents,
    }
    how = {"weight_bytes": folder.weight_bytes, "dtype": str(model.dtype).removeprefix("torch."), "device": device.type}
    return model, {**where, **how, **asdict(heldout)}


def _table(result: Figures) -> Table:
    table = Table(title=f"{result['model']} on {result['data']} ({result['split']})", show_header=False)
    rows = {
        "loss": f"{result['loss_nats']:.4f} nats/token",
        "perplexity": f"{result['perplexity']:.3f}",
        "bits per byte": show_bits_per_byte(result["bits_per_byte"]),
        "tokens scored": f"{result['tokens']:,} in windows of {result['sequence_length']}"
        + (", within documents" if result["mask_documents"] else ""),
        "speed": f"{result['tokens_per_second']:,.0f} tokens/s ({result['dtype']}, {result['device']})",
        "weights on disk": f"{result['weight_bytes'] / 1e6:.2f} MB",
        **{f"loss on {name}": f"{loss:.4f} nats/token" for name, loss in result["sources"].items()},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
