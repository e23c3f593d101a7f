"""`headrace islands`: runs the lighthouse and islands of a run on this machine, as processes that may die and restart.

On several machines the lighthouse runs on one (`--only-lighthouse`), and each island is an ordinary training command
with `--set islands.name=NAME islands.lighthouse=HOST:PORT`, from a terminal or a batch script. `headrace replicas` does
the same for replicas of the model.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from foundation.cli import add_config_arguments
from foundation.errors import EXIT_USAGE, ConfigError
from pipeline.config.load import read_config
from pipeline.config.rules.groups import check_islands, is_loopback, refuse_remote_groups
from pipeline.config.sections.groups import IslandsSection, QuorumSection
from pipeline.config.sections.run import Config
from pipeline.runtime.launch.log_file import log_variable

_POLL_S, _HEARTBEAT_TIMEOUT_S = 0.2, 5.0


@dataclass(frozen=True)
class GroupKind:
    """The kind of groups to start: islands, or replicas of the model.

    Attributes:
        field: name of the config's section, a `QuorumSection`; the plural of `word`.
        word: name of one group: "island".
        check: checks the config's section.
    """

    field: str
    word: str
    check: Callable[[Config], None]


ISLANDS = GroupKind("islands", "island", check_islands)


def add_arguments(parser: argparse.ArgumentParser, kind: GroupKind = ISLANDS) -> None:
    """Declares the options."""
    add_config_arguments(parser)
    word, field = kind.word, kind.field
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help=f"processes of every {word} (default: 1)")
    text = f"restarts of each of the {field} that dies (default: 3)"
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help=text)
    text = f"run the lighthouse alone: {field} are started elsewhere, with --set {field}.name=NAME"
    parser.add_argument("--only-lighthouse", action="store_true", help=text)


def run(arguments: argparse.Namespace, kind: GroupKind = ISLANDS) -> int:
    """Runs the lighthouse and the islands; returns the exit code of the first island that failed, or 0."""
    config = read_config(arguments.config, arguments.overrides).config
    section: QuorumSection | None = getattr(config, kind.field)
    if section is None:
        remedy = f'add "{kind.field}": {{"count": 2}}'
        raise ConfigError(kind.field, why="the config has no such section", remedy=remedy)
    refuse_remote_groups(config)
    kind.check(config)
    with ExitStack() as stack:
        stop = _StopSignal(stack)
        lighthouse = _start_lighthouse(section, kind.field)
        stack.callback(lighthouse.shutdown)
        print(f"lighthouse: {section.lighthouse}", flush=True)
        if arguments.only_lighthouse:
            while not stop.signal:
                time.sleep(_POLL_S)
            return 0
        folder = Path(config.run.dir)
        islands = [
            _IslandProcesses(arguments, folder, kind, f"{kind.word}-{number}") for number in range(section.count)
        ]
        for island in islands:
            stack.callback(island.end)
            island.start()
        return _supervise(islands, stop, restarts=arguments.restarts)


def _supervise(islands: list[_IslandProcesses], stop: _StopSignal, *, restarts: int) -> int:
    forwarded, failed = 0, 0
    while any(island.running for island in islands):
        time.sleep(_POLL_S)
        if stop.signal != forwarded:
            forwarded = stop.signal
            for island in islands:
                island.send(forwarded)
        for island in islands:
            code = island.ended()
            if code is None or code == 0 or stop.signal:
                failed = failed or (code or 0)
            elif code == EXIT_USAGE or island.restarts >= restarts:
                print(f"{island.name} ended with exit code {code}: see {island.output}", flush=True)
                failed = failed or code
            else:
                island.restarts += 1
                print(f"{island.name} ended with exit code {code}: restart {island.restarts} of {restarts}", flush=True)
                island.start()
    return failed if failed >= 0 else 128 - failed


class _IslandProcesses:
    """The processes of one island, in a session of their own.

    Args:
        arguments: the parsed arguments of the command.
        folder: the config's `run.dir`.
        kind: island or replica.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, kind: GroupKind, name: str) -> None:
        self.name, self.restarts, self.output = name, 0, folder / f"{name}.log"
        overrides = [*arguments.overrides, f"run.dir={folder / name}", f"{kind.field}.name={name}"]
        sets = [word for text in overrides for word in ("--set", text)]
        processes = ["--nproc", str(arguments.nproc)] if arguments.nproc > 1 else []
        self._command = [
            sys.executable, "-m", "headrace", "train", "--config", str(arguments.config), *sets, *processes,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the island runs, or `ended` has not yet returned its exit code."""
        return self._process is not None

    def start(self) -> None:
        """Starts the island, which appends its output to a file of its own."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            environ = {**os.environ, **log_variable(self.output)}
            self._process = subprocess.Popen(
                self._command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        print(f"{self.name}: process {self._process.pid}, output in {self.output}", flush=True)

    def ended(self) -> int | None:
        """Returns the exit code once, when the island has ended."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            self._process = None
        return code

    def send(self, number: int) -> None:
        """Sends a signal to the island's processes."""
        if self._process is not None:
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kills the processes that still run."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class _StopSignal:
    """The last stop signal of this process; 0 without a signal."""

    def __init__(self, stack: ExitStack) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            stack.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number


def _start_lighthouse(section: QuorumSection, field: str) -> Any:
    host = section.lighthouse.rpartition(":")[0]
    if not is_loopback(host) and section.secret_file is None:
        why = f"{field} of other hosts could join, and nothing would prove that they are of this run"
        remedy = f"give {field}.secret_file, or a loopback address"
        raise ConfigError(f"{field}.lighthouse", section.lighthouse, why=why, remedy=remedy)
    if isinstance(section, IslandsSection) and section.mode == "asynchronous":
        return _start_holder(section)
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        from torchft.coordination import LighthouseServer  # noqa: PLC0415
    except ImportError:
        remedy = "pip install torchft"
        raise ConfigError(field, why="torchft is not installed", remedy=remedy) from None
    try:
        return LighthouseServer(
            bind=section.lighthouse,
            min_replicas=1,
            join_timeout_ms=int(section.wait_s * 1000),
            heartbeat_timeout_ms=int(_HEARTBEAT_TIMEOUT_S * 1000),
        )
    except RuntimeError as error:
        remedy = f"another port in {field}.lighthouse"
        raise ConfigError(f"{field}.lighthouse", section.lighthouse, why=str(error), remedy=remedy) from None


def _start_holder(section: IslandsSection) -> Any:
    # only in this mode does the command itself need torch
    from pipeline.run.groups.islands.build import read_secret  # noqa: PLC0415
    from pipeline.run.groups.islands.holder import Holder  # noqa: PLC0415
    from pipeline.run.groups.islands.holder_server import HolderServer  # noqa: PLC0415

    holder = Holder(section)
    return HolderServer(holder, section.lighthouse, secret=read_secret(section), timeout_s=section.timeout_s)
