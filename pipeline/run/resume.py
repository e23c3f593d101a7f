"""Checks whether a config may continue in a run's directory: as the same run, and never silently from the start."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from foundation.directory import MANIFEST, existing_parent, read_manifest
from foundation.errors import ConfigError
from foundation.remote_directory import CACHE, cache_root
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.accounts import StepAccounts
from pipeline.config.rules.curve import Curve
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import RunSection
from pipeline.run.branch import refuse_other_counts
from pipeline.run.same_run import refuse_checkpoints
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
    refuse_checkpoints(section, checkpoints, curve, accounts=accounts)


def begins_afresh(run: ResolvedRun, step: int) -> str | None:
    """Returns the name of a stage that begins after a step with optimizer states of zero; None for any other step."""
    section = None if run.place is None else run.place.stage.section
    if section is None or section.optimizer_states == "keep" or not 0 < step == run.first_step - 1:
        return None
    return section.name


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


def _refuse_lost_checkpoints(run_dir: Path, *, begun: int) -> None:
    """Refuses to restart a run that had a checkpoint after step `begun`, its first, and has none any more."""
    if not (run_dir / MANIFEST).exists():
        return
    step = read_manifest(run_dir, kind="run").details.get("step", 0)
    if step > begun:
        why = f"it was trained to step {step}, but its checkpoints are gone"
        remedy = f"put {run_dir}/checkpoints back, or choose another run.dir to start over"
        raise ConfigError("run.dir", str(run_dir), why=why, remedy=remedy)


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
