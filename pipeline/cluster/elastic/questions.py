"""An agent's questions about the run, answered by other programs in their own processes, which import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import DataError
from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import RanksPlan
from pipeline.cluster.node_checks.bad_nodes import add_fault, nodes_left_out
from pipeline.cluster.node_checks.before_start import check_command, read_verdict
from pipeline.config.sections.node_checks import NodeChecksSection
from pipeline.runtime.faults.report import append_fault_once, silent_hosts_row

_LEAVE_S = 60.0
"""Seconds for the imports and the end of the checks, on top of `launch.node_checks.timeout`."""


@dataclass
class Questions:
    """Asks `headrace check` about layouts, and runs the checks of nodes.

    Args:
        arguments: the run's --config and --set.
        tasks: number of ranks on a host.
        write: prints a text for people.
        commands: runs the other programs.
        node_checks: thresholds of the checks of nodes.
    """

    arguments: Sequence[str]
    tasks: int
    write: Callable[[str], None]
    commands: Commands
    node_checks: NodeChecksSection
    _told: bool = False
    _run_dir: Path | None = None

    def refusal(self, nodes: int) -> str | None:
        """Returns why there is no layout for a number of hosts; None where there is one."""
        done = self._check("--processes", str(nodes * self.tasks))
        if done.returncode:
            return done.stderr.strip() or f"headrace check ended with code {done.returncode}"
        if not self._told:
            self._told = True
            self.write(done.stdout)
        return None

    def step(self) -> int:
        """Reads the step of the newest checkpoint; 0 without a checkpoint."""
        word, _, run_dir = self._check("--progress").stdout.rstrip("\n").partition(" ")
        self._run_dir = Path(run_dir) if run_dir else self._run_dir
        return int(word) if word.isdecimal() else 0

    def left_out(self) -> Mapping[str, str]:
        """Returns node -> why it is left out, from the list in the run's directory, which `step` has found."""
        with suppress(DataError, OSError):
            return {} if self._run_dir is None else nodes_left_out(self._run_dir)
        return {}

    def note_fault(self, node: str, fault: str) -> None:
        """Lists a fault in the run's directory, which `step` must have found."""
        with suppress(DataError, OSError):  # the run goes on even if its list of faults cannot be written
            if self._run_dir is not None:
                add_fault(self._run_dir, node, fault.partition("\n")[0], faults=self.node_checks.faults)

    def note_silent(self, plan: RanksPlan, nodes: Sequence[str]) -> None:
        """Records nodes that do not answer as the fault that ended a start, in the run's directory.

        Args:
            plan: plan of that start, with the step of the newest checkpoint.
            nodes: nodes of that start that do not answer.
        """
        if self._run_dir is None:
            return
        rank_hosts = dict(enumerate(node for node in plan.members for _ in range(self.tasks)))
        lost = {rank: node for rank, node in rank_hosts.items() if node in nodes}
        row = silent_hosts_row(lost, step=plan.step, world_size=len(rank_hosts))
        append_fault_once(self._run_dir, row, token=f"{plan.address}:{plan.port}")

    def check_nodes(self, node: str, directory: Path, nodes: Mapping[str, str], number: int) -> None:
        """Checks this node together with the others (`python -m pipeline.cluster.node_checks`).

        Args:
            node: name of this node.
            directory: directory for the records of this job.
            nodes: node -> address of the nodes that are checked.
            number: version of the plan that asked for these checks.
        """
        command = check_command(nodes, node, directory, attempt=_attempt(directory, number), arguments=self.arguments)
        self.commands.run(command, timeout_s=self.node_checks.timeout + _LEAVE_S)

    def bad_nodes(self, directory: Path, number: int) -> Mapping[str, str]:
        """Returns node -> its problems, from the checks; empty also for a refused config, which `refusal` reports.

        Prints the problems that the checks blame on no node as warnings.

        Args:
            directory: directory of the records.
            number: version of the plan that asked for the checks.
        """
        found = read_verdict(directory, attempt=_attempt(directory, number))
        for text in () if found is None else found.warnings:
            self.write(f"node checks: warning: {text}\n")
        return {} if found is None else {name: "; ".join(why) for name, why in found.bad.items()}

    def _check(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.commands.run([sys.executable, "-m", "pipeline", "check", *options, *self.arguments])


def _attempt(directory: Path, number: int) -> str:
    return f"{directory.parent.name}-{number}"
