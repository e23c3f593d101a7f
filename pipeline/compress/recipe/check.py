"""Refuses a recipe that would fail at a later step, before the first step. Only checking a distillation needs torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foundation.configfile import ConfigTree
from foundation.directory import read_manifest
from foundation.errors import ConfigError, HeadraceError, problems_in, refuse_all
from foundation.section import parse, problems_of
from pipeline.checkpoint.export.find import find_checkpoint
from pipeline.compress.pruning import rules as pruning
from pipeline.compress.pruning.config import PruneConfig, TargetSection
from pipeline.compress.quantization import rules as compress
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.compress.recipe.steps import CONFIGS, ORIGINAL, Recipe, Step, is_folder
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.evaluation.heldout.data import as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder

Fingerprint = Callable[[Path], str]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TAKEN = re.compile(rf"{ORIGINAL}|{CONFIGS}|runs|(pruned|distilled|distillation)(-\d+)?")
_SHAPE_FIELDS = ("group_size", "calibration.samples", "target", "budget.bytes", "budget.bits_per_weight")
"""First parts of field names whose values may fit the pruned model but not the original."""


def check_recipe(config: RecipeConfig) -> None:
    """Checks the parts of a config that need no model, and that the model exists.

    Raises:
        ConfigError: the recipe has no step, a name is not allowed for a directory, or a target is met before its round.
        CheckpointError: the model is neither a folder nor a run with a checkpoint.
    """
    check_names(config)
    if not is_folder(Path(config.model)):
        find_checkpoint(Path(config.model))


def check_names(config: RecipeConfig) -> None:
    """Checks the parts of a config that need no model.

    Raises:
        ConfigError: the recipe has no step, a name is not allowed for a directory, or a target is met before its round.
    """
    if not config.rounds and config.distill is None and not config.quantize:
        raise ConfigError("quantize", why="the recipe has no step", remedy='add {"int4": {"scheme": "W4A16"}}')
    for name in config.quantize:
        if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
            why = "it names a directory in the output, beside those of the other steps"
            raise ConfigError(f"quantize.{name}", why=why, remedy="use another name, e.g. int4-gptq")
    _check_rounds(config.rounds)


def _check_rounds(rounds: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a target that an earlier round already meets: targets are absolute, and a step would refuse it."""
    smallest: dict[tuple[str, object], int] = {}
    for number, fields in enumerate(rounds, 1):
        for (name, dtype), size in _sizes(fields):
            before = smallest.get((name, dtype))
            smallest[name, dtype] = size
            if before is not None and (size > before or (size == before and "shape" not in name)):
                why = f"round {number} cannot reach it: an earlier round leaves {before:,} at most"
                raise ConfigError(f"prune.{name}", size, why=why, remedy=f"use less than {before} there")


def _sizes(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, object], int]]:
    """Yields ((name, dtype), size) for a round's target; nothing for a target that its step refuses."""
    target = fields.get("target")
    if not isinstance(target, Mapping) or problems_of(TargetSection, target):
        return
    given = parse(TargetSection, target).model_dump()
    sizes = {f"shape.{axis}": size for axis, size in (given["shape"] or {}).items()}
    for name, size in {**sizes, "parameters": given["parameters"], "bytes": given["bytes"]}.items():
        if size is not None:
            yield (f"target.{name}", fields.get("dtype") if name == "bytes" else None), size


def check_steps(recipe: Recipe) -> None:
    """Checks the configs of all steps at once, against the models that exist now.

    If a step's own model does not exist yet, the original is used: the step itself checks fields that depend on the
    pruned shape. A distillation is checked with a student of that shape.

    Raises:
        ConfigError: a step would be refused, or was done with another config or from another model.
        DataError: the model or the data is missing or damaged.
    """
    folder = ModelFolder.open(recipe.original)
    open_heldout(as_trained(recipe.config.data, folder.path), folder)
    # the fingerprint of a folder without a manifest reads it whole, and several steps start from one folder
    fingerprint = cache(lambda source: ModelFolder.open(source).fingerprint())
    problems = [problem for step in recipe.steps for problem in _problems(recipe, step, fingerprint)]
    refuse_all(problems)


def _problems(recipe: Recipe, step: Step, fingerprint: Fingerprint) -> Iterator[ConfigError]:
    if step.done:
        yield from _changed(recipe, step, fingerprint)
        return
    made = is_folder(step.source)
    try:
        if step.verb == "quantize":
            compress.prepare(parse(QuantizeConfig, _with_existing_model(step, recipe)))
        elif step.verb == "prune":
            pruning.prepare(parse(PruneConfig, _with_existing_model(step, recipe)))
        elif step.verb == "distill":
            _check_distill(step, recipe)
    except ConfigError as error:
        for each in problems_in(error):
            if made or not recipe.config.rounds or not each.field.startswith(_SHAPE_FIELDS):
                yield ConfigError(f"{_place(recipe, step)}{each.field}", each.value, why=each.why, remedy=each.remedy)


def _place(recipe: Recipe, step: Step) -> str:
    """Prefix of a step's fields in messages: their place in the recipe."""
    if recipe.config.distill is not None and step.verb == "distill":
        return f"{recipe.config.distill.config}: "
    return "prune." if step.verb == "prune" else f"{step.verb}.{step.name}."


def _with_existing_model(step: Step, recipe: Recipe) -> ConfigTree:
    """A step's config with a model that exists, and an output that does not."""
    model = step.source if is_folder(step.source) else recipe.original
    return {**step.config, "model": str(model), "output": str(recipe.output / ".check")}


def _check_distill(step: Step, recipe: Recipe) -> None:
    """Runs all checks of the training with the student's future shape, or the original's if a latency decides it."""
    assert recipe.config.distill is not None
    from pipeline.run.prepare import prepare  # noqa: PLC0415  imports torch

    with TemporaryDirectory() as folder:
        student, fresh = step.source, False
        if not is_folder(student):
            student, fresh = _unmade_student(step, recipe, Path(folder, "student")), True
        # the step itself compares its config with a run begun there
        places = {"model.path": student, "distill.teacher": recipe.original, "run.dir": Path(folder, "run")}
        overrides = [f"{key}={json.dumps(str(path))}" for key, path in places.items()]
        if fresh:
            overrides.append("model.fresh=true")
        config = load_config(recipe.config.distill.config, [*recipe.config.distill.overrides, *overrides])
        prepare(resolve(config, world_size=recipe.config.distill.processes, begun=True))


def _unmade_student(step: Step, recipe: Recipe, folder: Path) -> Path:
    """Makes a folder with a future pruned model's config, without weights; the original's if its shape is unknown."""
    before = next((other for other in recipe.steps if other.output == step.source and other.verb == "prune"), None)
    try:
        plan = None if before is None else pruning.prepare(parse(PruneConfig, _with_existing_model(before, recipe)))
    except ConfigError:  # the pruning's own check reports it
        plan = None
    if plan is None or plan.shape is None:
        return recipe.original
    from pipeline.compress.pruning.cutting import write_config  # noqa: PLC0415  imports torch

    write_config(plan, plan.shape, folder)
    return folder


def _changed(recipe: Recipe, step: Step, fingerprint: Fingerprint) -> Iterator[ConfigError]:
    """Yields errors for changes since a step was done."""
    stored = recipe.output / CONFIGS / f"{step.name}.json"
    remedy = f"remove {step.result} to do the step again, or choose another output"
    if step.config and stored.is_file():
        before = json.loads(stored.read_text())
        changed = sorted(different(before, json.loads(json.dumps(step.config))))
        if changed:
            why = f"it was done with another config ({', '.join(changed)})"
            yield ConfigError(str(step.result), why=why, remedy=remedy)
    if _is_of_another_model(step, fingerprint):
        places = f"{step.result} and {step.output}" if step.verb == "distill" else step.result
        remedy = f"remove {places} to do the step again, or choose another output"
        yield ConfigError(str(step.result), why=f"it was made from another {step.source}", remedy=remedy)


def _is_of_another_model(step: Step, fingerprint: Fingerprint) -> bool:
    """Whether the source of a step was remade or replaced since the step was done."""
    if step.verb == "export":
        return _is_of_another_checkpoint(step)
    if not is_folder(step.source):
        return True
    made, kind, key = (step.output, "run", "model.path") if step.verb == "distill" else (step.result, "model", "model")
    if step.verb == "distill" and not made.is_dir():
        return False  # the run was removed, its export is kept
    try:
        recorded = read_manifest(made, kind=kind).parents[key]["fingerprint"]
        return bool(recorded != fingerprint(step.source))
    except (HeadraceError, KeyError):
        return True


def _is_of_another_checkpoint(step: Step) -> bool:
    try:
        now = find_checkpoint(step.source).manifest.fingerprint
    except HeadraceError:
        return False  # the run was removed, its export is kept
    recorded = read_manifest(step.result, kind="model").parents.get("checkpoint") or {}
    return bool(recorded.get("fingerprint") != now)


def different(before: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yields the dotted names of fields that differ between two configs."""
    for key in {*before, *now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from different(old, new, f"{at}{key}.")
        elif old != new:
            yield f"{at}{key}"
