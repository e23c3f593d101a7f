"""Reads the configs of a submission: their kinds, their outputs, and which stage waits for which. No torch.

A stage waits for earlier stages whose output its config names: e.g. a training config that reads the tokens of a corpus
config, or a compress config whose model is a run.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation import configfile
from foundation.errors import ConfigError
from foundation.paths import is_url
from foundation.remote_run import working_directory

VERBS = {"prune": ["prune"], "quantize": ["quantize"], "compress": ["compress", "run"]}
"""Kind of a config -> the verb of `python -m pipeline` that runs it in one process."""
_INPUTS = {
    "corpus": ("sources.path", "tokenizer.path"),
    "run": ("model.path", "data.sources.path", "data.sources.heldout"),
}
"""Kind of a config -> keys with the paths that it reads."""
_MODEL_INPUTS = ("model", "data.path")
_TITLES = {"corpus": "data", "run": "train"}


@dataclass(frozen=True)
class Given:
    """A config of a submission.

    Attributes:
        file: path of the config, as the user typed it.
        kind: corpus, run, prune, quantize or compress.
        raw: content of the config, with all files that it extends and all overrides.
        number: number among the configs of the same kind, from 1.
    """

    file: str
    kind: str
    raw: dict[str, Any]
    number: int

    @property
    def name(self) -> str:
        """Name of the stage, unique in a submission: data, train, train-2, ..."""
        title = _TITLES.get(self.kind, self.kind)
        return title if self.number == 1 else f"{title}-{self.number}"

    @property
    def makes(self) -> Path:
        """The directory that the stage makes."""
        return working_directory(self.raw["run"]["dir"]) if self.kind == "run" else Path(self.raw["output"])


def read_configs(files: Sequence[str], overrides: Sequence[str]) -> list[Given]:
    """Reads the configs of a submission.

    Args:
        overrides: `--set` texts; they apply to the training configs, or to the only config if there is just one.

    Raises:
        ConfigError: a file cannot be read, or cannot be submitted; two configs write to one directory; or a pruning or
            quantization names a training, which it cannot read.
    """
    found: list[Given] = []
    kinds = [(file, kind_of(file, configfile.load(file))) for file in files]
    if overrides and len(files) > 1 and all(kind != "run" for _, kind in kinds):
        why = "several configs are given, and it names none of them"
        raise ConfigError("--set", overrides[0], why=why, remedy="give one config, or write the value into the file")
    for file, kind in kinds:
        raw = configfile.load(file, overrides if kind == "run" or len(files) == 1 else ())
        _require_output(file, kind, raw)
        found.append(Given(file, kind, raw, 1 + sum(other.kind == kind for other in found)))
    for number, given in enumerate(found):
        _check_own_output(given, found[:number])
        _check_model_is_exported(given, found)
    return found


def kind_of(file: str, raw: Mapping[str, Any]) -> str:
    """The kind of a config, by its keys.

    Raises:
        ConfigError: the keys match no kind.
    """
    if "sources" in raw and "output" in raw:
        return "corpus"
    if "run" in raw or "train_batch_size" in raw:
        if raw.get("distill"):
            why = "slurm/train.sbatch has no teacher"
            remedy = 'write a compress config: {"model": ..., "output": ..., "distill": {"config": "' + file + '"}}'
            raise ConfigError(f"{file}: distill", raw["distill"], why=why, remedy=remedy)
        return "run"
    if "model" in raw and "output" in raw:
        return "prune" if "target" in raw else "quantize" if "scheme" in raw else "compress"
    why = "it is no config of a corpus, a training, a pruning, a quantization or a compression"
    raise ConfigError("CONFIG", file, why=why, remedy="look at docs/config-reference.md for the keys of each")


def before(stage: Given, others: Sequence[Given]) -> list[Given]:
    """The stages among `others` whose output a stage's config names."""
    named = [Path(text).absolute() for text in _texts(stage.raw) if text]
    return [other for other in others if any(path.is_relative_to(other.makes.absolute()) for path in named)]


def absent_inputs(given: Given) -> list[str]:
    """The paths and globs that a config reads and that match nothing on this machine; URLs are left out."""
    texts = (text for key in _INPUTS.get(given.kind, _MODEL_INPUTS) for text in _texts_at(given.raw, key.split(".")))
    local = (text for text in texts if not is_url(text))
    return [text for text in local if not glob.glob(text, recursive=True)]  # noqa: PTH207  it may be absolute


@dataclass(frozen=True)
class Element:
    """One element of a sweep: its values, as `--set` texts, and its run directory."""

    values: tuple[str, ...]
    run_dir: Path

    @property
    def overrides(self) -> list[str]:
        """The values and the run directory, as texts of `--set`."""
        return [*self.values, f"run.dir={self.run_dir}"]


def elements(run_dir: Path, sweeps: Sequence[str]) -> list[Element]:
    """The elements of a sweep, each with its own directory in `run_dir`; the last key varies fastest.

    Args:
        sweeps: texts of `--sweep`, e.g. `optimizer.params.lr=1e-3,3e-4`; several texts make a grid.

    Raises:
        ConfigError: a text has no key or no value; a value occurs twice; or elements would share a directory.
    """
    lists = []
    for text in sweeps:
        key, _, values = text.partition("=")
        if not key or not all(values.split(",")):
            raise ConfigError("--sweep", text, why="it is not KEY=VALUE,VALUE", remedy="e.g. --sweep run.seed=1,2,3")
        lists.append([f"{key}={value}" for value in values.split(",")])
        if key == "run.dir":
            why = "each element has a directory of its own, below run.dir"
            raise ConfigError("--sweep", text, why=why, remedy="--set run.dir=... moves all of them")
    grid = list(itertools.product(*lists))
    if len(set(grid)) < len(grid):
        twice = next((text for text, each in zip(sweeps, lists, strict=True) if len(set(each)) < len(each)), sweeps[-1])
        raise ConfigError("--sweep", twice, why="a value is there twice", remedy="name each value once")
    found = [Element(values, run_dir / _label(values)) for values in grid]
    if len({each.run_dir for each in found}) < len(found):
        why = "two elements would have one run directory: their values differ in characters that its name cannot have"
        raise ConfigError("--sweep", sweeps[0], why=why, remedy="submit one of them by itself")
    return found


def _label(values: Sequence[str]) -> str:
    """A directory's name, e.g. lr=0.001,seed=2."""
    short = (f"{key.rpartition('.')[2]}={value}" for key, _, value in (text.partition("=") for text in values))
    return re.sub(r"[^A-Za-z0-9._=,+-]", "_", ",".join(short))


def _require_output(file: str, kind: str, raw: Mapping[str, Any]) -> None:
    place = raw.get("run") if kind == "run" else raw
    key, field = ("dir", "run.dir") if kind == "run" else ("output", "output")
    if not isinstance(place, Mapping) or not isinstance(place.get(key), str) or not place[key]:
        raise ConfigError(f"{file}: {field}", why="a job has to know where to write", remedy=f'"{field}": "out/..."')


def _check_own_output(given: Given, others: Sequence[Given]) -> None:
    same = next((other for other in others if other.makes.absolute() == given.makes.absolute()), None)
    if same is not None:
        field = "run.dir" if given.kind == "run" else "output"
        why = f"{same.file} of the same submission writes there, too"
        remedy = "a directory of its own for each config"
        raise ConfigError(f"{given.file}: {field}", str(given.makes), why=why, remedy=remedy)


def _check_model_is_exported(given: Given, others: Sequence[Given]) -> None:
    """Refuses to prune or quantize a run of the submission: only a compression exports a run first."""
    model = given.raw.get("model")
    if given.kind not in ("prune", "quantize") or not isinstance(model, str) or (Path(model) / "config.json").is_file():
        return
    runs = [each for each in before(given, others) if each.kind == "run"]
    inside = [each for each in runs if Path(model).absolute().is_relative_to(each.makes.absolute())]
    if inside:
        why = f"it is the run of {inside[0].file}, and a {given.kind} config reads an exported model"
        section = '"prune": {...}' if given.kind == "prune" else '"quantize": {"NAME": {"scheme": ...}}'
        remedy = f'write a compress config, which exports it first: {{"model": ..., "output": ..., {section}}}'
        raise ConfigError(f"{given.file}: model", model, why=why, remedy=remedy)


def _texts_at(value: Any, keys: Sequence[str]) -> Iterator[str]:
    """All texts under a path of keys; a list on the way stands for each of its items."""
    if isinstance(value, list):
        yield from (text for each in value for text in _texts_at(each, keys))
    elif not keys:
        yield from _texts(value)
    elif isinstance(value, Mapping):
        yield from _texts_at(value.get(keys[0]), keys[1:])


def _texts(value: Any) -> Iterator[str]:
    """All texts in a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in _texts(each))
