"""A resumed run whose data or batch has changed: what it trained so far becomes a stage, so that old numbers stay true.

The stages are written into the config of the run's manifests, from which the next resume takes them. Without `stages`
in its config a run keeps them, whatever else its config changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.directory import Manifest, read_manifest
from foundation.errors import ConfigError, HeadraceError
from foundation.section import parse
from pipeline.config.sections.run import Config
from pipeline.config.sections.stages import StageSection

_DATA = ("sequence_length", "packing", "fim", "mask_documents")
_SOURCE = ("path", "source", "weight")


def continued(config: Config, run_dir: Path) -> Config:
    """Returns the config with a stage for the steps that its run has trained with other data or batches.

    Args:
        config: the config as it was given.
        run_dir: the run's directory on this host.

    Returns:
        The same config if it has stages itself, or if nothing changes; also if `run.allow_change` does not name what
        changes: the check on resume then refuses it.

    Raises:
        ConfigError: the run has such stages already, and another change cannot make one more.
    """
    if config.stages is not None:
        return config
    newest = newest_manifest(run_dir)
    stages = [] if newest is None else _stages(config, newest)
    return config.model_copy(update={"stages": tuple(parse(StageSection, each) for each in stages) or None})


def newest_manifest(run_dir: Path) -> Manifest | None:
    """Reads the manifest of the newest checkpoint with a readable one; None without any."""
    for path in sorted((run_dir / "checkpoints").glob("step-*"), reverse=True):
        with suppress(HeadraceError):
            return read_manifest(path, kind="checkpoint")
    return None


def _stages(config: Config, checkpoint: Manifest) -> list[dict[str, Any]]:
    """Returns the run's stages as plain JSON; none for a run of one stage."""
    step = int(checkpoint.details["step"])
    before, now = checkpoint.config, config.model_dump(mode="json")
    past = [dict(each) for each in before.get("stages") or ()]
    if any(not each.get("implicit") for each in past):
        return []  # written by a person, and removed since: another curve
    was = {**_counted(before, checkpoint), **(past[-1] if past else {})}
    changed = _changed(was, now)
    if not changed:
        return past
    names = config.run.allow_change
    if not all(_is_named(field, names) for field in changed) or _counts_whole_run(was["data"], now["data"]):
        if past:
            why = f"the checkpoint of step {step} has another value, and past steps are counted by it"
            remedy = f"put it back, or, without budgets and a curriculum, run.allow_change: {json.dumps(changed)}"
            raise ConfigError(changed[0], _value(now, changed[0]), why=why, remedy=remedy)
        return []
    ended = {**(past.pop() if past else {"name": f"until-step-{step}"}), "until": {"steps": step}, "implicit": True}
    batch = now["train_batch_size"] or was["train_batch_size"]
    begun = {"name": f"from-step-{step + 1}", "data": now["data"], "train_batch_size": batch, "implicit": True}
    return [*past, {**ended, "data": was["data"], "train_batch_size": was["train_batch_size"]}, begun]


def _value(config: Mapping[str, Any], field: str) -> Any:
    section, _, key = field.partition(".")
    return config[section][key] if key else config[section]


def _counted(before: Mapping[str, Any], checkpoint: Manifest) -> dict[str, Any]:
    """Returns the data section of a checkpoint's config, and the batch size with which it was trained."""
    batch = before.get("train_batch_size") or checkpoint.details["curve"]["train_batch_size"]
    return {"data": before["data"], "train_batch_size": batch}


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists the keys that differ and by which samples and tokens are counted or looked up."""
    found = [f"data.{key}" for key in _DATA if was["data"].get(key) != now["data"][key]]
    sources = [[[each.get(key) for key in _SOURCE] for each in side["data"]["sources"]] for side in (was, now)]
    found += ["data.sources"] if sources[0] != sources[1] else []
    batch = now["train_batch_size"]
    return [*found, "train_batch_size"] if batch not in (None, was["train_batch_size"]) else found


def _is_named(field: str, names: Sequence[str]) -> bool:
    return any(f"{field}.".startswith(f"{name}.") or f"{name}.".startswith(f"{field}.") for name in names)


def _counts_whole_run(*sections: Mapping[str, Any]) -> bool:
    """Tells whether weights follow from the length of the whole run, or from its steps, as no stage's do."""
    budgets = any(source.get(key) for data in sections for source in data["sources"] for key in ("epochs", "tokens"))
    return budgets or any(data.get("curriculum") for data in sections)
