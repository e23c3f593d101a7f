"""Checks whether a config may continue in a run's directory: as the same run, and never silently from the start."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foundation.directory import MANIFEST, Manifest, existing_parent, read_manifest
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.remote_directory import CACHE, cache_root
from foundation.section import suggest
from pipeline.checkpoint.checkpoint import MERGED, Checkpoint
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.accounts import StepAccounts
from pipeline.config.rules.curve import (
    Curve,
    allows_stage,
    changed_fields,
    is_allowed,
    is_implicit,
    miscounts,
    recorded_schedule,
    written_keys,
)
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import kind_of
from pipeline.config.sections.run import RunSection
from pipeline.run.branch import refuse_other_counts
from pipeline.runtime.launch import Rendezvous
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.launch.missing_ranks import deadline
from pipeline.runtime.metrics.attempts_journal import NAME as ATTEMPTS
from pipeline.runtime.metrics.journal import NAME as JOURNAL

_PATIENCE_S = 10.0
_OF_A_RUN = (".lock", ".bucket.json", ".agents", "submissions", ATTEMPTS, JOURNAL, "checkpoints")
"""Possible entries of a run's directory before its first manifest."""


def check_run_dir(section: RunSection, store: CheckpointStore, curve: Curve, *, accounts: StepAccounts) -> None:
    """Refuses to resume another run, to start over silently, and to train into a directory that belongs to no run.

    Raises:
        CheckpointError: the newest checkpoint has fields that give another loss curve.
        ConfigError: `run.resume` is never and there are checkpoints; there are more steps than `run.steps`; the
            directory belongs to something other than a run, or cannot be written.
    """
    run_dir = section.local_dir
    _check_is_run(run_dir)
    checkpoints = store.candidates()
    if not checkpoints:
        _refuse_lost_checkpoints(run_dir, begun=store.start.step if store.start is not None else 0)
        _check_writable(run_dir)
        if store.start is not None:
            refuse_other_counts(store.start, accounts)
        return
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
        refuse_other_curve(readable, curve, allowed=section.allow_change)


def refuse_other_curve(checkpoint: Checkpoint, curve: Curve, *, allowed: Sequence[str]) -> None:
    """Refuses differing fields that are not in `allowed`, and names in `allowed` that match no field.

    Raises:
        CheckpointError: a field differs that is not, or cannot be, allowed.
        ConfigError: a name matches no field, or the checkpoint is from islands.
    """
    was = checkpoint.manifest.details["curve"]
    fields = {*_paths(was), *_paths(curve)}
    known = {*fields, *(part for field in fields for key in written_keys(field) for part in _parents(key))}
    for name in allowed:
        if name not in known and not _off(name, was, curve):
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


def begins_afresh(run: ResolvedRun, step: int) -> str | None:
    """Returns the name of a stage that begins after a step with optimizer states of zero; None for any other step."""
    section = None if run.place is None else run.place.stage.section
    if section is None or section.optimizer_states == "keep" or not 0 < step == run.first_step - 1:
        return None
    return section.name


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
    then = f"the learning rate of step {step:,} is then {rates[1]:.3g}"
    return f"{then}; by the checkpoint's schedule it is {rates[0]:.3g}"


def changes_since(checkpoint: Checkpoint, curve: Curve) -> list[tuple[str, Any, Any]]:
    """Lists the fields that differ from the checkpoint's: (dotted path, before, now)."""
    return changed_fields(checkpoint.manifest.details["curve"], curve)


def check_shared(run_dir: Path, rendezvous: Rendezvous) -> None:
    """Refuses a run directory that not all hosts see. Collective.

    Raises:
        ConfigError: some ranks do not see rank 0's file there; the error names them.
    """
    if rendezvous.world_size == 1:
        return
    with deadline(rendezvous, "when it was asked whether it sees the run's directory", extra_s=_PATIENCE_S):
        blind = _ranks_without_view(run_dir)
    if blind:
        why = f"{', '.join(blind[:8])} do not see the file that rank 0 has written there"
        remedy = "choose a directory that all hosts share"
        if run_dir.is_relative_to(cache_root()):
            remedy = f"set {CACHE} to a directory that all hosts share"
        raise ConfigError("run.dir", str(run_dir), why=why, remedy=remedy)


def _ranks_without_view(run_dir: Path) -> list[str]:
    """Lists the ranks, with hosts, that do not see a file that rank 0 writes into a directory."""
    token = on_rank_zero(lambda: _leave_token(run_dir))
    deadline = time.monotonic() + _PATIENCE_S
    while not (seen := (run_dir / token).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a network file system may show the file a moment later
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if seen else f"rank {dist.get_rank()} on {socket.gethostname()}")
    on_rank_zero(lambda: (run_dir / token).unlink(missing_ok=True))
    return [who for who in everyone if who]


def _leave_token(run_dir: Path) -> str:
    name = f".seen-{secrets.token_hex(8)}"
    (run_dir / name).touch()
    return name


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


def _refuse_lost_checkpoints(run_dir: Path, *, begun: int) -> None:
    """Refuses to restart a run that had a checkpoint after step `begun`, its first, and has none any more."""
    if not (run_dir / MANIFEST).exists():
        return
    step = read_manifest(run_dir, kind="run").details.get("step", 0)
    if step > begun:
        why = f"it was trained to step {step}, but its checkpoints are gone"
        remedy = f"put {run_dir}/checkpoints back, or choose another run.dir to start over"
        raise ConfigError("run.dir", str(run_dir), why=why, remedy=remedy)


def _manifest_or_none(checkpoint: Checkpoint) -> Manifest | None:
    """Reads the manifest; None if damaged, which the search for an intact checkpoint reports."""
    try:
        return checkpoint.manifest
    except DataError:
        return None


def _check_is_run(run_dir: Path) -> None:
    """Refuses to train into a directory that another stage made, whose manifest would be lost."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return
    if (run_dir / MANIFEST).exists():
        read_manifest(run_dir, kind="run")
    elif not any((run_dir / name).exists() for name in _OF_A_RUN):
        why = "it holds files that no run has put there"
        raise ConfigError("run.dir", str(run_dir), why=why, remedy="choose a directory that does not exist yet")


def _check_writable(run_dir: Path) -> None:
    parent = existing_parent(run_dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError("run.dir", str(run_dir), why=f"{parent} cannot be written", remedy="choose another directory")
