"""Checks whether a config continues a run's checkpoints as the same run. No torch: before ranks are started, too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from foundation.directory import Manifest
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.paths import is_url
from foundation.section import suggest
from pipeline.checkpoint.checkpoint import MERGED, Checkpoint
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.config.accounts import StepAccounts
from pipeline.config.rules.curve import (
    STAGES,
    Curve,
    allows_stage,
    changed_fields,
    curve_fields,
    is_allowed,
    is_implicit,
    miscounts,
    recorded_schedule,
    written_keys,
)
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import kind_of
from pipeline.config.sections.run import RunSection

_DIGITS = range(3, 18)
"""Digits in which two learning rates are printed: as few as tell them apart."""


def refuse_before_start(run: ResolvedRun) -> None:
    """Refuses to resume another run by its config alone, in milliseconds, before ranks are started and import torch.

    Data and model, which take longer to read, are compared when the run is prepared (`check_run_dir`); so are stages
    after the first, and checkpoints in an object store.

    Raises:
        CheckpointError: The newest checkpoint has other fields.
        ConfigError: The run may not resume, or its checkpoint is beyond `run.steps`.
    """
    section = run.config.run
    if is_url(section.dir):
        return
    found = [Checkpoint(path, step) for step, path in finished_checkpoints(section.local_dir)]
    if found:
        curve = curve_fields((run.stages or (run,))[0])
        refuse_checkpoints(section, found, curve, accounts=run.accounts, whole=False)


def refuse_checkpoints(
    section: RunSection, checkpoints: Sequence[Checkpoint], curve: Curve, *, accounts: StepAccounts, whole: bool = True
) -> None:
    """Refuses to resume from the newest of a run's checkpoints if the config is another run's.

    Args:
        section: the section `run` of the config.
        checkpoints: the run's checkpoints, newest first; at least one.
        curve: the config's fields that determine the loss curve.
        accounts: samples and tokens of the run's steps.
        whole: whether the curve has all fields; otherwise only those that it has are compared.

    Raises:
        CheckpointError: the newest readable checkpoint has fields that give another loss curve.
        ConfigError: `run.resume` is never; or there are more steps than `run.steps`.
    """
    newest = checkpoints[0]
    if section.resume == "never":
        why = f"it holds {newest.path.name}, and run.resume is never"
        raise ConfigError("run.dir", section.dir, why=why, remedy="choose another run.dir, or set run.resume to auto")
    if newest.step > accounts.steps:
        why = f"{newest.path} is of step {newest.step} already"
        remedy = f"use more than {newest.step}, or another run.dir"
        raise ConfigError("run.steps", accounts.steps, why=why, remedy=remedy)
    readable = next((c for c in checkpoints if _manifest_or_none(c) is not None), None)
    if readable is not None:
        refuse_other_curve(readable, curve, allowed=section.allow_change, whole=whole)


def refuse_other_curve(checkpoint: Checkpoint, curve: Curve, *, allowed: Sequence[str], whole: bool = True) -> None:
    """Refuses differing fields that are not in `allowed`, and names in `allowed` that match no field.

    Args:
        checkpoint: the checkpoint to resume from.
        curve: the config's fields that determine the loss curve.
        allowed: fields that may differ.
        whole: whether the curve has all fields; otherwise only those that it has are compared.

    Raises:
        CheckpointError: a field differs that is not, or cannot be, allowed.
        ConfigError: a name matches no field, or the checkpoint is from islands.
    """
    was = checkpoint.manifest.details["curve"]
    if not whole:
        was = {key: value for key, value in was.items() if key in curve and key != STAGES}
    fields = {*_paths(was), *_paths(curve)}
    known = {*fields, *(part for field in fields for key in written_keys(field) for part in _parents(key))}
    for name in allowed:
        if name not in known and not _off(name, was, curve):
            if not whole:
                return  # it may be a field that is not here; the whole comparison tells
            near = suggest(name, sorted(known))
            remedy = f"did you mean '{near}'?" if near else f"name one of: {', '.join(sorted({*was, *curve}))}"
            raise ConfigError("run.allow_change", name, why="no such field alters the curve", remedy=remedy)
    differing = _without_params_of_another_type(changed_fields(was, curve))
    changed = [row for row in differing if not any(is_allowed(row[0], name) for name in allowed)]
    changed = [row for row in changed if not is_implicit(*row)]
    _refuse_miscounting(checkpoint, was, curve, differing, changed)
    if was.get("islands") and not curve.get("islands"):
        why = "islands made the checkpoint, and count their place in the data in rounds"
        remedy = 'keep the section, with "count": 1, or start another run.dir from this model'
        raise ConfigError("islands", why=why, remedy=remedy)
    if changed:
        listed = "\n".join(f"    {line}" for line in describe_changes(changed)[:8])
        names = ", ".join(f'"{name}"' for name in _names(changed))
        raise CheckpointError(
            f"{checkpoint.path}: the config differs from the checkpoint's in keys that change the loss curve:\n"
            f"{listed}\n{_rates(checkpoint, was, curve)}{_states(checkpoint, curve)}"
            f"  try: choose another run.dir, put the fields back{_words_back(changed)}, or, if it is meant,"
            f" run.allow_change: [{names}]"
        )


def _refuse_miscounting(
    checkpoint: Checkpoint,
    was: Curve,
    now: Curve,
    differing: Sequence[tuple[str, Any, Any]],
    changed: Sequence[tuple[str, Any, Any]],
) -> None:
    """Refuses changes of fields by which the steps before the checkpoint are counted and looked up, even if allowed.

    Args:
        checkpoint: checkpoint from which the run continues.
        was: the checkpoint's fields.
        now: the config's fields.
        differing: (field, before, now) of all fields that differ.
        changed: part of `differing` that is not allowed; the message names it, too.
    """
    samples = checkpoint.manifest.details["samples"]
    wrong = [row for row in differing if miscounts(row[0], was, now, samples=samples, step=checkpoint.step)]
    wrong = [row for row in wrong if row not in changed or not allows_stage(row[0], was, now)]
    if not wrong:
        return
    later = ""
    weights = all(row[0].startswith(("data.weights", "data.schedule")) for row in wrong)
    if weights and isinstance(was["train_batch_size"], int):
        later = (
            f", keep the weights so far as the first stage of data.curriculum and begin another after step"
            f" {samples // was['train_batch_size']} or later"
        )
    listed = "\n".join(f"    {line}" for line in describe_changes(wrong)[:8])
    if others := describe_changes([row for row in changed if row not in wrong])[:8]:
        listed += "\n  and these differ, too:\n" + "\n".join(f"    {line}" for line in others)
    export = f"headrace export {shlex.quote(str(checkpoint.path.parent.parent))} MODEL"
    raise CheckpointError(
        f"{checkpoint.path}: the config differs from the checkpoint's in keys that count past steps, samples and"
        f" tokens; run.allow_change cannot allow that:\n{listed}\n"
        f"  try: put the fields back{_words_back(wrong)}{later}, or train its weights on in another run: {export},"
        " then train with --set model.config=auto --set model.path=MODEL --set run.dir=..."
    )


def _words_back(changed: Sequence[tuple[str, Any, Any]]) -> str:
    """Returns `--set` arguments that restore all fields, even if a default has changed; "" where that is impossible."""
    was = {field: before for field, before, _ in changed}
    words = [f"--set {shlex.quote(f'{name}={json.dumps(was.get(name))}')}" for name in _names(changed)]
    plain = all(isinstance(was.get(name), bool | int | float | str | list) for name in _names(changed))
    return f" ({' '.join(words)})" if plain else ""


def _rates(checkpoint: Checkpoint, was: Curve, now: Curve) -> str:
    line = learning_rate_change(checkpoint, was, now)
    return f"  {line}\n" if line else ""


def _states(checkpoint: Checkpoint, now: Curve) -> str:
    line = fresh_optimizer_line(checkpoint, now)
    return f"  {line}\n" if line else ""


def fresh_optimizer_line(checkpoint: Checkpoint, now: Curve) -> str | None:
    """Tells why the optimizer starts afresh from a checkpoint; None if it takes the checkpoint's state."""
    if MERGED in checkpoint.manifest.details:
        return "the optimizer's state starts at zero: the checkpoint is merged from others, and has weights alone"
    before, after = (kind_of(curve.get("optimizer") or {}) for curve in (checkpoint.manifest.details["curve"], now))
    if before == after:
        return None
    return f"the optimizer's state starts at zero: the checkpoint has a state of {before}, the run needs one of {after}"


def _without_params_of_another_type(changed: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Drops changed parameters, except the rate, if the optimizer's type has changed: the type covers them."""
    if not any(field == "optimizer.type" for field, _, _ in changed):
        return changed
    kept = ("optimizer.type", "optimizer.params.lr")
    return [row for row in changed if row[0] in kept or not row[0].startswith("optimizer.")]


def learning_rate_change(checkpoint: Checkpoint, was: Curve, now: Curve) -> str | None:
    """Tells how another schedule, such as a longer run's, changes the learning rate; None if unchanged."""
    if not was.get("scheduler") or not now.get("scheduler"):
        return None
    step = checkpoint.step + 1
    before, after = (recorded_schedule(curve, step) for curve in (was, now))
    if before == after:
        return None
    rates = [schedule.lr(step) for schedule in (before, after)]
    if rates[0] == rates[1]:
        return f"the learning rate of step {step:,} is {rates[1]:.3g} by both schedules: they differ later"
    shown = ([f"{rate:.{digits}g}" for rate in rates] for digits in _DIGITS)
    old, new = next(texts for texts in shown if texts[0] != texts[1])
    return f"the learning rate of step {step:,} is then {new}; by the checkpoint's schedule it is {old}"


def changes_since(checkpoint: Checkpoint, curve: Curve) -> list[tuple[str, Any, Any]]:
    """Lists the fields that differ from the checkpoint's: (dotted path, before, now)."""
    return changed_fields(checkpoint.manifest.details["curve"], curve)


def describe_changes(changed: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Formats a line for each key that a person wrote: old and new value of a field that follows from it."""
    lines: dict[str, str] = {}
    names = _names(changed)
    for field, was, now in sorted(changed, key=lambda row: row[0] not in names):  # keys first, then derived fields
        key = next(key for key in written_keys(field) if key in names)
        derived = field.removeprefix(f"{key}.")
        label = key if key == field else f"{key} ({derived})"
        lines.setdefault(key, f"{label}: was {was!r}, now {now!r}")
    return list(lines.values())


def _names(changed: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Returns the keys to name in `run.allow_change`, each once; none for a field that a named key explains."""
    names: list[str] = []
    for field in sorted((row[0] for row in changed), key=lambda field: len(written_keys(field))):
        keys = written_keys(field)
        if not any(key in names for key in keys):
            names.append(keys[0])
    return names


def _parents(key: str) -> Iterator[str]:
    """Yields a dotted path, then the paths of its sections."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _off(name: str, *curves: Curve) -> bool:
    """Tells whether a field's section is null in one of the curves, such as fp16's in a bf16 run."""
    parents = [name.rpartition(".")[0][: len(name)]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return any(parent in curve and curve[parent] is None for parent in parents for curve in curves)


def _paths(value: Any, at: str = "") -> Iterator[str]:
    """Yields the dotted paths of all entries in nested dicts."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        path = f"{at}.{key}" if at else key
        yield path
        yield from _paths(inner, path)


def _manifest_or_none(checkpoint: Checkpoint) -> Manifest | None:
    """Reads the manifest; None if damaged, which the search for an intact checkpoint reports."""
    try:
        return checkpoint.manifest
    except DataError:
        return None
