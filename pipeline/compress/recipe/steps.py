"""The steps of a compression: commands, configs and directories. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.configfile import load, merge
from foundation.directory import MANIFEST
from pipeline.compress.recipe.config import RecipeConfig

CONFIGS = "configs"
"""Directory of the steps' configs in the output."""
ORIGINAL = "original"
_VERBS = {"prune": "Prune", "distill": "Distil", "export": "Export", "quantize": "Quantize"}


@dataclass(frozen=True)
class Step:
    """One command of a recipe.

    Attributes:
        name: name of its directory in the output, e.g. `pruned`.
        verb: subcommand of `headrace`.
        output: directory that it makes; for a training the run directory.
        source: directory of the model from which it starts.
        result: directory that exists, complete, once the step is done; for a training, its export.
        config: fields of its config file; empty if the verb takes none.
        words: arguments of the verb besides its config.
    """

    name: str
    verb: str
    output: Path
    source: Path
    result: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the step has been done."""
        return (self.result / MANIFEST).is_file()

    @property
    def title(self) -> str:
        """Title of the step, for people."""
        return f"{_VERBS[self.verb]}: {self.name}"

    def command(self, configs: Path) -> list[str]:
        """Arguments of `headrace` that run the step.

        Args:
            configs: directory of the steps' configs.
        """
        config = ["--config", str(configs / f"{self.name}.json")] if self.config else []
        return [self.verb, *config, *self.words]


@dataclass(frozen=True)
class Recipe:
    """All steps, in order.

    Attributes:
        config: config of the recipe.
        steps: steps in order; each starts from the results of earlier ones.
        original: folder of the model to compress.
        models: name -> folder of every model to evaluate: first the one that is quantized, then its quantizations, then
            the models it was made from.
    """

    config: RecipeConfig
    steps: tuple[Step, ...]
    original: Path
    models: Mapping[str, Path]

    @property
    def output(self) -> Path:
        """The directory of all results."""
        return Path(self.config.output)


def plan_steps(config: RecipeConfig) -> Recipe:
    """Plans the steps of a config.

    Raises:
        ConfigError: the training config cannot be read.
    """
    out, given = Path(config.output), Path(config.model)
    original = given if is_folder(given) else out / ORIGINAL
    steps = [] if original == given else [_export(ORIGINAL, original, source=given)]
    rounds = list(_rounds(config, original))
    steps += rounds
    trained = {step.name: step.output for step in rounds if step.verb != "distill"}
    made = {ORIGINAL: original, **trained}
    name, last = list(made.items())[-1]
    quantized = [_quantize(config, name, fields, source=last) for name, fields in config.quantize.items()]
    models = {name: last, **{step.name: step.output for step in quantized}, **made}
    return Recipe(config, (*steps, *quantized), original, models)


def is_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder rather than a run directory or a checkpoint."""
    return (path / "config.json").is_file()


def _rounds(config: RecipeConfig, original: Path) -> Iterator[Step]:
    """Yields pruning, distillation and export of every round; without pruning one distillation, if configured."""
    out, source = Path(config.output), original
    count = len(config.rounds) or 1
    for number in range(1, count + 1):
        suffix = f"-{number}" if count > 1 else ""
        if config.rounds:
            step = _prune(config, f"pruned{suffix}", config.rounds[number - 1], source=source)
            yield step
            source = step.output
        if config.distill is not None:
            result = out / f"distilled{suffix}"
            training = _distill(config, f"distillation{suffix}", source=source, teacher=original, result=result)
            yield training
            step = _export(result.name, result, source=training.output)
            yield step
            source = step.output


def _export(name: str, output: Path, *, source: Path) -> Step:
    return Step(name, "export", output, source, output, words=(str(source), str(output)))


def _prune(config: RecipeConfig, name: str, fields: Mapping[str, Any], *, source: Path) -> Step:
    return _with_data(config, name, "prune", fields, source=source)


def _quantize(config: RecipeConfig, name: str, fields: Mapping[str, Any], *, source: Path) -> Step:
    consumers = {} if config.consumers is None else {"consumers": config.consumers}
    return _with_data(config, name, "quantize", {**consumers, **fields}, source=source)


def _with_data(config: RecipeConfig, name: str, verb: str, fields: Mapping[str, Any], *, source: Path) -> Step:
    output = Path(config.output) / name
    places = {"model": str(source), "output": str(output)}
    data = config.data.model_dump(exclude_unset=True)
    return Step(name, verb, output, source, output, {**places, "data": data, **fields})


def _distill(config: RecipeConfig, name: str, *, source: Path, teacher: Path, result: Path) -> Step:
    assert config.distill is not None
    run_dir = Path(config.output) / "runs" / name
    fixed = {"model": {"path": str(source)}, "distill": {"teacher": str(teacher)}, "run": {"dir": str(run_dir)}}
    fields = merge(load(config.distill.config, config.distill.overrides), fixed)
    processes = config.distill.processes
    return Step(name, "distill", run_dir, source, result, fields, ("--nproc", str(processes)) if processes > 1 else ())
