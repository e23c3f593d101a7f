"""`headrace branch RUN --at STEP --config CHANGES`: writes the config of a run that begins with a step of another."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.configfile import ConfigTree, load, merge, overridden
from foundation.directory import write_json
from foundation.errors import ConfigError, DataError
from foundation.paths import LOCAL, PLACE, is_url
from foundation.section import parse

_ALTERNATIVES = (("steps", "tokens"), ("checkpoint_every", "checkpoint_minutes"))
"""Keys of `run` of which a change of one replaces the other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run", metavar="RUN", type=PLACE, help="the run to branch from, or its URL")
    text = "step with a checkpoint, after which the branch goes on (default: the newest)"
    parser.add_argument("--at", type=int, metavar="STEP", help=text)
    text = "config of what differs from RUN: JSON or YAML, e.g. another schedule and other data"
    parser.add_argument("--config", metavar="CHANGES", type=LOCAL, help=text)
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="change one field, repeatable"
    )
    text = "the config to write (default: RUN-NAME.json, after the name of CHANGES; run.dir is then RUN-NAME)"
    parser.add_argument("--out", metavar="FILE", type=LOCAL, help=text)
    text = "number of processes for which the branch is checked (default: 1)"
    parser.add_argument("--processes", type=int, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Checks the branch as a start would, writes its config, and pins the checkpoint.

    Raises:
        HeadraceError: the step has no checkpoint, the branch is impossible, or the config file exists.
    """
    changes = overridden(load(arguments.config) if arguments.config else {}, arguments.overrides)
    name = Path(arguments.config).stem if arguments.config else "branch"
    run_dir = (changes.get("run") or {}).get("dir") or f"{arguments.run.rstrip('/')}-{name}"
    out = Path(arguments.out or (f"{name}-branch.json" if is_url(run_dir) else f"{run_dir}.json"))
    if out.exists():
        raise DataError(f"{out} exists already\n  try: --out FILE, another name")
    # these import torch, which takes seconds: `--help` should not wait for it
    from pipeline.checkpoint.export.find import RunPlace, checkpoints_of_steps  # noqa: PLC0415
    from pipeline.config.rules.resolve import resolve  # noqa: PLC0415
    from pipeline.config.sections.run import Config  # noqa: PLC0415
    from pipeline.run.prepare import prepare  # noqa: PLC0415
    from pipeline.runtime.launch import detect  # noqa: PLC0415

    place = RunPlace.parse(arguments.run)
    found = place.checkpoints()
    step = arguments.at or place.step or found[0].step
    [checkpoint] = checkpoints_of_steps(place, found, [step])
    base = parse(Config, checkpoint.manifest.config).model_dump(mode="json", exclude_defaults=True)
    tree = branched(base, changes, start=f"{place.run}@{step}", run_dir=str(run_dir))
    prepared = prepare(resolve(parse(Config, tree), world_size=arguments.processes or detect().world_size))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, tree)
    assert prepared.origin is not None, "the config names one"
    if warning := prepared.origin.pin(out):
        print(warning)
    print(f"{out}: begins after step {step:,} of {place.run}, to step {prepared.run.steps:,} in {run_dir}")
    print(f"  it goes on with: {shlex.join(['headrace', 'train', '--config', str(out)])}")
    return 0


def branched(base: ConfigTree, changes: Mapping[str, Any], *, start: str, run_dir: str) -> ConfigTree:
    """Merges changes into the config of a run, and makes it the config of a branch.

    Args:
        base: config of the run.
        changes: keys of the branch; another type of scheduler or optimizer replaces the whole section.
        start: value of `run.from`.
        run_dir: value of `run.dir`.

    Raises:
        ConfigError: the changes name another start.
    """
    own = changes.get("run") or {}
    if own.get("from", start) != start:
        raise ConfigError("run.from", own["from"], why="the command names the run and its step", remedy="remove it")
    kept = {key: value for key, value in base.items() if not _is_replaced(value, changes.get(key))}
    given = [names for names in _ALTERNATIVES if any(own.get(name) is not None for name in names)]
    replaced = {"allow_change", *(name for names in given for name in names)}
    section = {key: value for key, value in (base.get("run") or {}).items() if key not in replaced}
    return merge(merge({**kept, "run": section}, changes), {"run": {"from": start, "dir": run_dir}})


def _is_replaced(old: Any, new: Any) -> bool:
    """Whether a section gets another `type`, with which the other keys lose their meaning."""
    return isinstance(old, dict) and isinstance(new, dict) and new.get("type", old.get("type")) != old.get("type")
