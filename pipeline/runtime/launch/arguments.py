"""The command line of the entry points that a launcher may start. No torch: errors come at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.cli import add_config_arguments, leave
from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from foundation.remote_run import up_to_date
from pipeline.config.load import LoadedConfig, read_config
from pipeline.config.past_stages import continued
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology
from pipeline.runtime.launch import Launch, detect, place_of_pod, supervise, supervise_pod
from pipeline.runtime.metrics.journal import NAME as JOURNAL


def parse_arguments(description: str) -> argparse.Namespace:
    """Parses the command line of an entry point."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of an entry point that trains."""
    add_config_arguments(parser)
    text = "start N processes on this machine, one per GPU (as torchrun --standalone --nproc-per-node N does)"
    parser.add_argument("--nproc", type=int, metavar="N", help=text)
    # the deepspeed launcher appends it; the rank is read from the environment instead
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def resolve_run(
    arguments: argparse.Namespace,
    *,
    change: Callable[[Config], Config] = lambda config: config,
    check: Callable[[ResolvedRun], object] = lambda _run: None,
) -> ResolvedRun:
    """Resolves the config for the number of processes that were started.

    With `--nproc N`, and in a pod of Kubeflow's Trainer, this process only starts the processes that train, and exits
    with their exit code.

    Args:
        arguments: parsed arguments that `add_arguments` declares.
        change: makes the run's config from the command line's config.
        check: refuses a run before processes are started for it.

    Raises:
        ConfigError: the config cannot run.
    """
    # torch's C++ warnings print a page of stack where we print a sentence; set this before torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    loaded, launch = read_config(arguments.config, arguments.overrides), detect()
    config = change(loaded.config)
    run_dir = up_to_date(config.run.dir)
    config, begun = continued(config, run_dir), has_begun(run_dir, config=config)
    if arguments.nproc is None:
        _start_pod(
            lambda processes: _check_no_spare(resolve(config, world_size=processes, begun=begun).topology, processes)
        )
        run = resolve(config, world_size=launch.world_size, begun=begun)
        check(run)
        if launch.rank == 0:
            _print_notes(loaded)
        return run
    _check_nproc(arguments.nproc, launch)
    run = resolve(config, world_size=arguments.nproc, begun=begun)
    check(run)
    processes = run.topology.world_size
    if run.spare:
        print(f"the layout takes {processes} of {arguments.nproc} processes: so many are started", file=sys.stderr)
    if processes > 1:
        _supervise(processes)
    _print_notes(loaded)
    return run


def start_processes(arguments: argparse.Namespace) -> None:
    """Starts processes with the same command line (`--nproc N`, or in a pod), and exits with their exit code."""
    if arguments.nproc is None:
        return _start_pod(lambda _world_size: None)
    _check_nproc(arguments.nproc, detect())
    if arguments.nproc > 1:
        _supervise(arguments.nproc)
    return None


def _check_no_spare(topology: Topology, processes: int) -> None:
    """Raises ConfigError for spare processes: a pod of them would end as if the run had finished."""
    if topology.world_size != processes:
        why = f"the pods have {processes} processes, and the layout takes {topology.world_size}"
        remedy = "another number of pods or of processes in each, or another layout in the section parallel"
        raise ConfigError("PET_NNODES, PET_NPROC_PER_NODE", why=why, remedy=remedy)


def _start_pod(check: Callable[[int], object]) -> None:
    """In a pod of Kubeflow's Trainer, checks the config for all pods' ranks, starts this pod's ranks, and exits."""
    place = place_of_pod()
    if place is not None:
        check(place.world_size)
        leave(supervise_pod([sys.executable, *sys.orig_argv[1:]], place))


def _supervise(processes: int) -> None:
    command = [sys.executable, *_without_nproc(sys.orig_argv[1:])]
    leave(supervise(command, processes=processes))


def _print_notes(loaded: LoadedConfig) -> None:
    for label, texts in loaded.notes:
        print(f"{label}: {', '.join(texts)}", flush=True)


def has_begun(run_dir: Path, *, config: Config) -> bool:
    """Tells whether the run has trained in its directory before: if so, it goes on with the present processes.

    Another batch size makes it another run, whose sizes have to divide as in any new run.
    """
    if not (run_dir / JOURNAL).exists() and not (run_dir / "checkpoints").is_dir():
        return False
    try:
        before = read_manifest(run_dir, kind="run").config
    except DataError:  # killed before its first checkpoint; any other problem is reported where the directory is opened
        return True
    return bool(before.get("train_batch_size") == config.model_dump(mode="json")["train_batch_size"])


def _check_nproc(processes: int, launch: Launch) -> None:
    if processes < 1:
        raise ConfigError("--nproc", processes, why="it is a number of processes", remedy="use 1 or more")
    if launch.launcher != "python":
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in launch.variables)
        why = f"the processes are started by {launch.launcher} already, by the environment ({given})"
        remedy = f"leave --nproc out; or, where these are left over, unset {' '.join(launch.variables)}"
        raise ConfigError("--nproc", processes, why=why, remedy=remedy)


def _without_nproc(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--nproc" and word != "--nproc" and not word.startswith("--nproc="):
            kept.append(word)
    return kept
