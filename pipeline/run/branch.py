"""A run that begins with the state of another run's checkpoint (`run.from`): finds it, and checks that it fits.

The checkpoint is read where it is. One in an object store is copied into the new run's directory first, once. It stays
the oldest checkpoint from which the branch can resume, until the branch has its own; so it is pinned in its own run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from foundation.directory import Manifest
from foundation.errors import CheckpointError, ConfigError, DataError, HeadraceError
from foundation.storage import StorageError
from pipeline.checkpoint.checkpoint import BRANCH, MERGED, Checkpoint, StoredCheckpoint
from pipeline.checkpoint.export.find import RunPlace, checkpoints_of_steps, metadata_of
from pipeline.checkpoint.format.naming import FOLDER
from pipeline.checkpoint.named_state import weight_key
from pipeline.checkpoint.pins import pin
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.accounts import StepAccounts
from pipeline.config.sections.run import RunSection
from pipeline.models.card.lineage import training_lineage
from pipeline.models.construction.meta import parameter_shapes

_COPY = ".from"
"""Folder beside a branch's checkpoints with the copy of a checkpoint from an object store."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint with which a branch begins.

    Attributes:
        place: its run and step, as the config names them.
        checkpoint: the checkpoint, at the path at which it is read.
        manifest: its manifest.
    """

    place: RunPlace
    checkpoint: Checkpoint
    manifest: Manifest

    def details(self) -> dict[str, Any]:
        """Returns the entry `branch` in the details of the branch's checkpoints: run, `details_of`."""
        home = self.place.home
        return {"run": home if isinstance(home, str) else str(home.absolute()), **details_of(self.manifest)}

    def pin(self, run_dir: object) -> str | None:
        """Pins the checkpoint in its run; returns a warning if that run cannot be written to."""
        try:
            pin(self.place.home, self.checkpoint.step, by=str(run_dir))
        except (OSError, StorageError) as error:
            why = str(error).splitlines()[0]
            return f"warning: {self.place.run} cannot keep step {self.checkpoint.step:,} for this run: {why}"
        return None


def details_of(manifest: Manifest) -> dict[str, Any]:
    """Returns step, samples, skips, fingerprint, ledger and lineage of a checkpoint from which training continues."""
    step, samples = manifest.details["step"], manifest.details.get("samples", 0)
    about = {"step": step, "samples": samples, "fingerprint": manifest.fingerprint}
    about |= {"skips": skips} if (skips := manifest.details.get("skips")) else {}
    return {**about, "ledger": recorded_ledger(manifest), "lineage": training_lineage(manifest)}


def find_origin(section: RunSection, own: CheckpointStore, *, steps: int) -> Origin | None:
    """Finds the checkpoint of `run.from`; None without the key, or where it is gone and the run has its own by now.

    Args:
        section: the config's `run`.
        own: the run's own checkpoints.
        steps: number of steps of the run.

    Raises:
        ConfigError: the run began otherwise, or ends before the step.
        CheckpointError: the other run has no checkpoint of the step; the error names the nearest.
        StorageError: the store cannot be read.
    """
    if section.origin is None:
        return None
    place = RunPlace.parse(section.origin)
    assert place.step is not None, "RunSection requires a step"
    if place.step >= steps:
        why = f"the run ends with step {steps:,}"
        raise ConfigError("run.from", section.origin, why=why, remedy=f"more than {place.step:,} run.steps")
    begun = own.candidates()
    _check_same_origin(section, place, begun)
    try:
        [found] = checkpoints_of_steps(place, place.checkpoints(), [place.step])
        if isinstance(found, StoredCheckpoint):
            found = _copied(found, section)
        return Origin(place, found, found.manifest)
    except HeadraceError:
        if begun:
            return None
        raise


def _copied(found: StoredCheckpoint, section: RunSection) -> Checkpoint:
    """Returns a checkpoint in an object store with the path of its copy; the copy itself if it is there."""
    path = section.local_dir / FOLDER / _COPY / found.path.name
    return Checkpoint(path, found.step) if path.is_dir() else StoredCheckpoint(path, found.step, found.url)


def _check_same_origin(section: RunSection, place: RunPlace, begun: list[Checkpoint]) -> None:
    """Refuses a run that has checkpoints of its own and began with another state."""
    for checkpoint in begun:
        with suppress(DataError):  # damaged, which the search for an intact checkpoint reports
            recorded = checkpoint.manifest.details.get(BRANCH)
            if recorded is None or recorded["step"] != place.step:
                was = "initial weights" if recorded is None else f"step {recorded['step']:,} of {recorded['run']}"
                why = f"{checkpoint.path} is of a run that began with {was}"
                raise ConfigError("run.from", section.origin, why=why, remedy="another run.dir, or the value before")
            return


def check_origin(origin: Origin, *, model: nn.Module, tokenizer: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model or tokenizer. Reads no weights.

    Raises:
        CheckpointError: a parameter is missing or has another shape; or the tokenizer differs.
    """
    name, details = f"run.from: {origin.place.run}@{origin.checkpoint.step}", origin.manifest.details
    if "island" in details:
        raise CheckpointError(f"{name} is from an island\n  try: a checkpoint of an ordinary run")
    if (details.get("tokenizer") or {}).get("fingerprint") != tokenizer["fingerprint"]:
        why = "its tokenizer is not that of data.sources: the same token id means different text"
        raise CheckpointError(f"{name}: {why}\n  try: data that was made with the run's tokenizer")
    stored = {each.key: tuple(each.shape) for each in metadata_of(origin.checkpoint).tensors}
    for parameter, shape in parameter_shapes(model).items():
        if stored.get(weight_key(parameter)) != tuple(shape):
            there = stored.get(weight_key(parameter), "nothing")
            why = f"{parameter} has shape {tuple(shape)} in the config's model, and {there} in the checkpoint"
            raise CheckpointError(f"{name}: {why}\n  try: model.config of that run, or keys that keep the shapes")


def refuse_other_counts(start: Checkpoint, accounts: StepAccounts) -> None:
    """Refuses a branch that counts the steps up to its start otherwise than the run from which it comes.

    Everything else may differ: the data and its order, too, since these steps are the other run's.

    Raises:
        CheckpointError: a step has another batch size or sequence length.
    """
    was, now = (_spans(rows) for rows in (recorded_ledger(start.manifest), accounts.ledger(start.step)))
    if was != now:
        shown = [
            ", ".join(f"{size} samples of {length} tokens to step {last}" for last, size, length in each)
            for each in (was, now)
        ]
        raise CheckpointError(
            f"{start.path}: run.from continues its count of tokens, and train_batch_size or data.sequence_length differ"
            f" up to step {start.step}:\n    its steps have {shown[0]}\n    the config has {shown[1]}\n"
            f"  try: put them back; or, to change them after step {start.step}, begin stages with one that has them"
            f' until {{"steps": {start.step}}}; or start another run from the exported weights (model.path)'
        )


def _spans(ledger: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """Returns (last step, samples per step, sequence length) of steps alike, whatever stages they are of."""
    spans: list[tuple[int, int, int]] = []
    for row in ledger:
        alike = row["samples_per_step"], row["sequence_length"]
        if spans and spans[-1][1:] == alike:
            spans.pop()
        spans.append((row["last_step"], *alike))
    return spans


def recorded_ledger(checkpoint: Manifest) -> list[dict[str, Any]]:
    """Returns what the steps up to a checkpoint were: its ledger, or one row where all steps are alike."""
    details = checkpoint.details
    if "ledger" in details:
        return list(details["ledger"])
    step, curve = int(details["step"]), details["curve"]
    return StepAccounts.constant(curve["train_batch_size"], curve["data"]["sequence_length"], step).ledger(step)


def origin_details(manifest: Manifest, origin: Origin | None) -> Mapping[str, Any] | None:
    """Returns the entry `branch` for the checkpoints of a run that continues from a checkpoint; None without one.

    Args:
        manifest: manifest of the checkpoint from which the run continues: its own, a branch's start, or a merged one.
        origin: start of the run, if it is a branch and its start is still there.
    """
    if BRANCH in manifest.details and not (origin is not None and origin.manifest == manifest):
        recorded: Mapping[str, Any] = manifest.details[BRANCH]
        return recorded
    if origin is not None and origin.manifest == manifest:
        return origin.details()
    if MERGED in manifest.details:
        return {"run": str(manifest.config["run"]["dir"]), **details_of(manifest)}
    return None
