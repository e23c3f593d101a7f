"""`headrace compress verify|consumers`: scores a compressed model again with every consumer, or lists consumers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foundation.directory import MANIFEST, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.paths import FOLDER, PLACE
from foundation.section import parse
from pipeline.evaluation.consumers.bounds import Bound, bound_within
from pipeline.evaluation.consumers.consumer import CONSUMERS, plan_consumers
from pipeline.evaluation.consumers.description import describe
from pipeline.evaluation.consumers.gate import POSITIONS, GateSample, is_pruned, run_gate, run_pruned_gate
from pipeline.evaluation.consumers.table import consumer_table
from pipeline.evaluation.heldout.command import add_window_arguments, window_fields
from pipeline.evaluation.heldout.data import FieldNames, HeldOutData, as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder

EXIT_OUTSIDE = 1


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `verify` and `consumers` to the verbs of `headrace compress`."""
    text = "score a compressed model with every program that serves it, against its original"
    verify = verbs.add_parser("verify", help=text, description=f"{text.capitalize()}; exit code 1 outside the bounds.")
    verify.add_argument(
        "model",
        metavar="FOLDER",
        type=FOLDER,
        help="a compressed model: a Hugging Face folder, or a directory with model.gguf",
    )
    verify.add_argument(
        "--original",
        metavar="FOLDER",
        type=FOLDER,
        help="the model in floating point; default: the parent in the manifest",
    )
    verify.add_argument(
        "--data", metavar="TOKENS", type=PLACE, help="a tokens directory; default: the parent in the manifest"
    )
    verify.add_argument(
        "--consumers",
        metavar="NAME,NAME",
        help=f"consumers that have to run: {', '.join(CONSUMERS)}; default: all that are installed and take the model",
    )
    add_window_arguments(verify)
    text = "compare at most N positions; default: %(default)s"
    verify.add_argument("--positions", type=int, default=POSITIONS, metavar="N", help=text)
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    text = "list the programs that can score models on this machine, and how to get the others"
    verbs.add_parser("consumers", help=text, description=f"{text.capitalize()}.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen verb.

    Raises:
        ConfigError, DataError: a folder is missing or damaged, or a consumer cannot be run.
    """
    return {"verify": _verify, "consumers": _consumers}[arguments.verb](arguments)


def _consumers(_arguments: argparse.Namespace) -> int:
    shown = Table("consumer", "on this machine", title="Programs that score a compressed model")
    for name, consumer in CONSUMERS.items():
        absent = consumer.missing()
        shown.add_row(name, "yes" if absent is None else f"no: {absent}; {consumer.install}")
    Console().print(shown)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    path = Path(arguments.model)
    about = describe(path)
    original = ModelFolder.open(_parent(path, arguments.original, "model", "--original"))
    given = {"path": _parent(path, arguments.data, "data", "--data"), **window_fields(arguments)}
    data = as_trained(parse(HeldOutData, given, at="data"), path)  # a quantization records its evaluation windows
    dataset = open_heldout(data, original, names=FieldNames("--data", "--sequence-length"))
    plan = plan_consumers(about, tuple(arguments.consumers.split(",")) if arguments.consumers else None)
    if not plan.run:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.not_run.items())
        raise ConfigError("consumers", why=f"none can be run: {reasons}", remedy="install one of them")
    vocabulary = original.vocab_size
    of = {"longest": original.longest_sequence, "positions": arguments.positions}
    sample = GateSample.of(dataset, original.path, vocabulary=vocabulary, **of)
    console = Console(stderr=True)
    how: dict[str, Any] = {"sample": sample, "vocabulary": vocabulary, "consumers": plan}
    how |= {"say": lambda line: console.print(line, markup=False)}
    try:
        if is_pruned(path):
            figures = run_pruned_gate(original.path, path, scheme=about.scheme, **how)
        else:
            figures = run_gate(original.path, path, bound=bound_of_folder(path, scheme=about.scheme), **how)
    except DataError as error:
        console.print(f"error: {error}", markup=False)
        return EXIT_OUTSIDE
    if arguments.json:
        print(json.dumps({"model": str(path), "scheme": about.scheme, "consumers": figures}))
    else:
        Console().print(consumer_table(figures, title=f"{path} ({about.scheme}) beside {original.path}"))
    return 0


def bound_of_folder(model: Path, *, scheme: str) -> Bound:
    """The bound of a quantization from its manifest, else its scheme's bound.

    Args:
        model: directory of the model.
        scheme: scheme according to the model's files; "mixed" for a folder with several schemes.
    """
    if not (model / MANIFEST).is_file():
        return bound_within(scheme, None)
    known = read_manifest(model, kind="model")
    given, judged_as = (known.config.get(key) for key in ("max_mean_kl", "scheme"))
    return bound_within(str(judged_as or scheme), None if given is None else float(given))


def _parent(model: Path, given: str | None, name: str, option: str) -> str:
    """The given folder, or else the folder that the manifest names."""
    if given is not None:
        return given
    if (model / MANIFEST).is_file():
        parents = read_manifest(model, kind="model").parents
        if name in parents:
            return str(parents[name]["path"])
    raise ConfigError(option, why=f"{model} has no manifest that names it", remedy=f"give {option} FOLDER")
