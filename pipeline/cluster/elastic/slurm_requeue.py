"""Requeues a run's Slurm job, ends it where its batch script is gone, and gets nodes to replace lost ones.

To Slurm a job ends with its batch script, which runs on the job's first node. slurm/ranks.sh documents the files that
each start of the script reads and writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foundation.directory import write_text
from foundation.errors import EXIT_REQUEUE
from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import RanksPlan

STARTS_WITHOUT_PROGRESS = 3
"""Number of starts from one checkpoint after which a job is held rather than queued."""
_ASK_S, _UPDATE_S, _TIMEOUT_S = 30.0, 15.0, 60.0

Say = Callable[[str], None]


@dataclass
class SlurmJob:
    """The job of the run, seen from one of the nodes that train.

    Args:
        number: id of the job; ARRAY_ELEMENT for an element of an array.
        batch_host: node on which the batch script runs.
        records: directory of the run's agents (`.agents`), which has the list of the job's starts.
        outcome: file with the exit code and the reason, which the batch script reads at its end.
        tasks: number of ranks on each node.
        wanted: number of nodes that the job was submitted for.
        commands: runs Slurm's commands.
        join: command line of `slurm/join.sbatch` for one more node, without the options of sbatch; empty to ask for no
            nodes.
    """

    number: str
    batch_host: str
    records: Path
    outcome: Path
    tasks: int
    wanted: int
    commands: Commands
    join: Sequence[str] = ()
    _asked: float = field(default=-_ASK_S, init=False)
    _refused: bool = field(default=False, init=False)
    _joining: set[str] = field(default_factory=set, init=False)
    _failed: set[str] = field(default_factory=set, init=False)

    def ask_for(self, missing: int, *, guests: int, excluded: Sequence[str], say: Say) -> None:
        """Submits one job for each missing node, less the jobs that were submitted before.

        Args:
            missing: number of nodes that the run lacks.
            guests: number of nodes of these jobs that take part already.
            excluded: names of nodes that are left out, or take part already.
            say: prints a line for people.
        """
        if missing <= 0 or not self.join or time.monotonic() - self._asked < _ASK_S:
            return
        self._asked = time.monotonic()
        listed = self._run("squeue", "--noheader", "--states=all", f"--name={self._join_name}", "--format=%i %T %N")
        if listed.returncode:
            return  # the controller does not answer just now
        jobs = [line.split() for line in listed.stdout.splitlines()]
        self._note_failed(jobs, say=say)
        # a dead node looks idle until Slurm takes it out of the job
        avoided = ",".join(sorted({*excluded, *self._failed, *self._nodes()}))
        for number, state, *_ in jobs:
            if state == "PENDING":
                self._run("scontrol", "update", f"JobId={number}", f"ExcNodeList={avoided}")
        for _ in range(missing - max(0, len(self._joining) - guests)):
            command = ["sbatch", *self._join_options(avoided), *self.join]
            # Slurm keeps a refused job as FAILED, but not a refused test
            submitted = self._run(*command[:1], "--test-only", *command[1:])
            submitted = submitted if submitted.returncode else self._run(*command)
            if submitted.returncode:
                if not self._refused:  # perhaps for now: Slurm may know only the job's own nodes
                    say(f"no node can be asked for yet: {submitted.stderr.strip()}; the run goes on with those it has")
                self._refused = True
                return
            number = submitted.stdout.strip().partition(";")[0]  # ID, or ID;CLUSTER
            self._joining.add(number)
            say(f"job {number} is queued for another node")

    def _note_failed(self, jobs: Sequence[Sequence[str]], *, say: Say) -> None:
        """Reports jobs for other nodes that have failed since the last check, and avoids their nodes."""
        for number, state, *nodes in jobs:
            if state == "FAILED" and number in self._joining:
                self._failed.update(nodes)
                log = self.records / f"{self._join_name}-{number}.log"
                why = (log.read_text(errors="replace") if log.exists() else "").strip().rpartition("\n")[2]
                again = "it is" if len(nodes) == 1 else "they are"
                say(f"job {number} for another node failed on {', '.join(nodes)}; {again} not asked for again: {why}")
        self._joining = {number for number, state, *_ in jobs if state in ("PENDING", "RUNNING", "COMPLETING")}

    def after_sigterm(self) -> Literal["runs", "preempted", "ends"]:
        """Tells whether the job runs on, was preempted or ends, after a SIGTERM to its agents.

        A job `ends` if Slurm cancels it, ends it at its time limit, or requeues it by itself. Slurm requeues a job
        `preempted` with a grace period only when the period is over: a run that exits earlier must requeue itself. A
        job that `runs` on got the signal from a person (`scancel --signal=TERM`).
        """
        shown = self._run("scontrol", "show", "job", "--oneliner", self.number).stdout
        if " JobState=RUNNING " not in shown:
            return "ends"
        return "preempted" if re.search(r" PreemptTime=\d", shown) else "runs"

    def note(self, plan: RanksPlan) -> None:
        """Writes the outcome for the batch script before agents end: the script restarts an agent that leaves none.

        The file has the exit code and the reason, one line each (slurm/ranks.sh).
        """
        write_text(self.outcome, f"{plan.outcome}\n{_in_a_line(plan.reason)}\n")

    def end(self, plan: RanksPlan, *, step: int, nodes: int, script_lives: bool, say: Say) -> None:
        """Ends or requeues the job, depending on the outcome of the run.

        Args:
            plan: last plan, with the outcome.
            step: step of the newest checkpoint.
            nodes: number of this job's own nodes that are alive and not left out.
            script_lives: whether the node of the batch script is alive.
            say: prints a line for people.
        """
        self.withdraw()
        if plan.outcome == EXIT_REQUEUE:
            self._queue_again(plan, step=step, nodes=nodes, say=say)
        elif not script_lives:
            self._complete(plan, say=say)

    def _complete(self, plan: RanksPlan, *, say: Say) -> None:
        """Ends the job without its script, whose node is gone: ending needs no node, and so no place in the queue."""
        say(f"the batch script is gone with its node: job {self.number} ends with code {plan.outcome} without it")
        number = self._run("squeue", "--noheader", f"--jobs={self.number}", "--format=%A").stdout.strip()
        done = self._run(sys.executable, "-m", "pipeline.cluster.elastic.slurm_end", number, str(plan.outcome))
        if done.returncode:
            why = _in_a_line(done.stderr) or f"code {done.returncode}"
            say(f"Slurm could not end it with that code ({why}): it is canceled; submit again what waited for it")
            self._run("scancel", self.number)

    def withdraw(self) -> None:
        """Takes the jobs that wait for more nodes out of the queue."""
        self._run("scancel", f"--name={self._join_name}", "--state=PENDING")

    def _queue_again(self, plan: RanksPlan, *, step: int, nodes: int, say: Say) -> None:
        """Requeues the job for the nodes that are alive and not left out; after a start with too few, for all nodes."""
        if self._starts_at(step) >= STARTS_WITHOUT_PROGRESS:
            remedy = f"raise --time or the 180 of --signal, then: scontrol release {self.number}"
            say(f"{plan.reason}; held, since {STARTS_WITHOUT_PROGRESS} starts have not made a new checkpoint: {remedy}")
            self._control("requeuehold", say=say)
            return
        say(f"{plan.reason}; back into the queue")
        changes = [f"ExcNodeList={self._excluded(plan)}"] if plan.excluded else []
        if 0 < nodes < self.wanted and not plan.short:  # otherwise the job keeps the tasks and cores of its old size
            cores = nodes * int(os.environ.get("SLURM_CPUS_PER_TASK", self.tasks))  # the agent is its node's only task
            changes += [f"NumNodes={nodes}", f"NumTasks={nodes * self.tasks}", f"NumCPUs={cores}"]
        if self._control("requeue", say=say) and changes:
            self._update(changes, say=say)

    def _update(self, changes: Sequence[str], *, say: Say) -> None:
        """Changes the queued job.

        Slurm answers "the DB index is being set" for a job that a lost node has made smaller: for a moment where Slurm
        keeps accounts, always where it keeps none. The job then waits for as many nodes as before.
        """
        deadline = time.monotonic() + _UPDATE_S  # the job's processes have KillWait seconds, 30 by default
        while True:
            done = self._run("scontrol", "update", f"JobId={self.number}", *changes)
            if not done.returncode:
                return
            if time.monotonic() > deadline:
                say(f"the queued job is not changed ({' '.join(changes)}): {done.stderr.strip()}")
                return
            time.sleep(1)

    def _excluded(self, plan: RanksPlan) -> str:
        """Lists nodes excluded by the user, and bad nodes that were left out."""
        shown = self._run("scontrol", "show", "job", "--oneliner", self.number).stdout
        found = re.search(r" ExcNodeList=(\S+)", shown)
        before = [] if found is None or found[1] == "(null)" else [found[1]]
        return ",".join([*before, *plan.excluded])

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a Slurm command without this job's environment variables, which sbatch would hand to the next job."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
        return self.commands.run(command, environ=kept, timeout_s=_TIMEOUT_S)

    def _nodes(self) -> list[str]:
        """Lists the nodes of the job, as Slurm knows them."""
        listed = self._run("squeue", "--noheader", f"--jobs={self.number}", "--format=%N").stdout.strip()
        return self._run("scontrol", "show", "hostnames", listed).stdout.split() if listed else []

    def _starts_at(self, step: int) -> int:
        """Counts the starts of this job, this one included, that began at a step."""
        lines = (self.records / "starts").read_text().splitlines()
        return lines.count(f"{self.number} {step}")

    def _control(self, how: str, *, say: Say) -> bool:
        done = self._run("scontrol", how, self.number)
        if done.returncode:
            say(f"the job could not be queued: {done.stderr.strip()}; submit it again, it resumes")
        return not done.returncode

    @property
    def _join_name(self) -> str:
        return f"headrace-join-{self.number}"

    def _join_options(self, avoided: str) -> list[str]:
        env, left = os.environ, self._run("squeue", "--noheader", f"--jobs={self.number}", "--format=%L").stdout.strip()
        options = {
            "job-name": self._join_name,
            "nodes": "1",
            "ntasks": "1",
            "cpus-per-task": env.get("SLURM_CPUS_ON_NODE", ""),
            "gpus-per-node": env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE", ""),
            "mem": env.get("SLURM_MEM_PER_NODE", ""),
            "partition": env.get("SLURM_JOB_PARTITION", ""),
            "account": env.get("SLURM_JOB_ACCOUNT", ""),
            "qos": env.get("SLURM_JOB_QOS", ""),
            "time": left if left[:1].isdigit() else "",
            "exclude": avoided,
            "output": str(self.records / f"{self._join_name}-%j.log"),
        }
        return ["--parsable", *(f"--{name}={value}" for name, value in options.items() if value)]


def _in_a_line(reason: str) -> str:
    """Shortens a reason to the last line of the job's log: for a traceback, the error alone."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    traceback = next((at for at, line in enumerate(lines) if line.startswith("Traceback")), None)
    return " ".join(lines if traceback is None else [*lines[:traceback], lines[-1]])
