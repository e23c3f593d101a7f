"""The Slurm jobs of a run: squeue, and sacct where the site has it. The rest of a status needs nothing from here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation import configfile
from foundation.errors import HeadraceError
from foundation.remote_run import working_directory
from foundation.slurm import run_slurm

_TIMEOUT_S = 5.0
_FORMAT = "%i|%j|%T|%r|%M|%L|%D|%N|%S|%Z"
_SET = re.compile(r"run\.dir=(.*)")
_FIELD_END = r"(?= +[A-Z][A-Za-z/:]*=| *\n| *$)"
"""End of a field of `scontrol show --oneliner`: it reaches to the next field, since values may have spaces."""
_WORDS = {
    "None": "",
    "AccountNotAllowed": "this partition is not for its account",
    "BadConstraints": "no node has what it asks for (--constraint, --gpus, --mem)",
    "BeginTime": "its earliest start has not come; after a requeue that is up to two minutes",
    "Cleaning": "its last start is still being cleaned up after a requeue",
    "Dependency": "a job that it depends on has not ended",
    "DependencyNeverSatisfied": "a job that it depends on has failed: it will never start",
    "FedJobLock": "the federation of clusters decides where it starts",
    "InactiveLimit": "the job was inactive for too long",
    "InvalidAccount": "its account is not valid: give another --account",
    "InvalidQOS": "its QOS is not valid: give another --qos",
    "JobArrayTaskLimit": "as many elements of the array run as it allows at one time",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held: 'scontrol release JOB' lets it go",
    "JobLaunchFailure": "it could not be launched: a node or the file system has a fault",
    "Licenses": "it waits for a license",
    "NodeDown": "a node that it needs is down",
    "NonZeroExitCode": "it ended with an exit code other than 0",
    "OutOfMemory": "it ran out of memory",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows, or nodes of it are down",
    "PartitionTimeLimit": "its --time is longer than its partition allows: it will not start",
    "Priority": "jobs with a higher priority are before it",
    "Prolog": "the prolog of its nodes is running",
    "QOSNotAllowed": "this partition is not for its QOS",
    "RaisedSignal": "it was ended by a signal",
    "Reservation": "it waits for its reservation to begin",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved (maintenance?)",
    "Resources": "it is next, and waits for enough free nodes",
    "SystemFailure": "Slurm, the file system or the network failed",
    "TimeLimit": "it reached its time limit",
}
_PARTS = (
    ("QOS", "a limit of its QOS is reached"),
    ("Assoc", "a limit of its account or user is reached"),
    ("MaxNodePerAccount", "its account has as many nodes as it may"),
    ("Node", "nodes that it needs are not available"),
    ("launch failed requeued held", "it was requeued after a failed launch and is held: 'scontrol release JOB'"),
)


@dataclass(frozen=True)
class QueuedJob:
    """A job as Slurm reports it.

    Attributes:
        id: number of the job.
        state: PENDING, RUNNING, ...
        reason: why the job waits or how it ended, in Slurm's word.
        why: the reason in plain words; empty where there is none.
        elapsed: time since its start, as Slurm prints it.
        left: time until its time limit, as Slurm prints it.
        nodes: number of nodes.
        nodelist: names of the nodes, as Slurm abbreviates them.
        start: time when the job began, or is expected to begin.
        workdir: directory from which it was submitted.
    """

    id: str
    name: str = ""
    state: str = "UNKNOWN"
    reason: str = ""
    why: str = ""
    elapsed: str = ""
    left: str = ""
    nodes: str = ""
    nodelist: str = ""
    start: str = ""
    workdir: str = ""


def find_jobs(ids: Sequence[str]) -> list[QueuedJob]:
    """Finds the jobs with these numbers; sacct also knows jobs that the controller has forgotten."""
    if not ids or shutil.which("squeue") is None:
        return []
    found = _queue("--states=all", f"--jobs={','.join(ids)}")
    known = {job.id for job in found}
    return found + [job for each in ids if each not in known and (job := _accounted(each)) is not None]


def own_jobs() -> list[QueuedJob]:
    """Lists this user's waiting and running jobs; none where there is no Slurm."""
    if shutil.which("squeue") is None:
        return []
    return _queue("--states=PENDING,RUNNING,COMPLETING,SUSPENDED,CONFIGURING,REQUEUED", f"--user={os.getuid()}")


def run_dir_of_job(job: QueuedJob) -> Path | None:
    """Returns the run directory of a job of `slurm/train.sbatch`; None where it is unknown.

    `headrace submit` writes it into the job's comment; a job submitted by hand has it in its command line.
    """
    text = _output("scontrol", "show", "job", "--oneliner", job.id) or ""
    commented = re.search(rf" Comment=(/.*?){_FIELD_END}", text)
    if commented is not None:
        return Path(commented[1])
    found = re.search(rf" Command=(.*?) WorkDir=(.*?){_FIELD_END}", text)
    if found is None:
        return None
    words, workdir = _words(found[1])[1:], Path(found[2])
    sets = [match[1] for word in words if (match := _SET.fullmatch(word.removeprefix("--set=")))]
    if sets:
        return workdir / working_directory(sets[-1].strip('"'))
    for word in words:
        if Path(word).suffix in configfile.SUFFIXES:
            return _configured(workdir / word, workdir)
    return None


def output_files(ids: Sequence[str]) -> list[Path]:
    """Lists the output files of the jobs that the controller still knows."""
    found = [_output("scontrol", "show", "job", "--oneliner", each) for each in ids if shutil.which("scontrol")]
    names = [re.search(rf" StdOut=(/.*?){_FIELD_END}", text or "") for text in found]
    return [Path(name[1]) for name in names if name is not None]


def _words(command: str) -> list[str]:
    """Splits a job's command line into words; Slurm prints it without its quotes."""
    try:
        return shlex.split(command)
    except ValueError:  # a word has an apostrophe
        return command.split()


def _configured(config: Path, workdir: Path) -> Path | None:
    try:
        run = configfile.load(config).get("run")
    except (HeadraceError, OSError, json.JSONDecodeError):
        return None
    named = run.get("dir") if isinstance(run, dict) else None
    return workdir / working_directory(named) if isinstance(named, str) else None


def _queue(*options: str) -> list[QueuedJob]:
    text = _output("squeue", "--noheader", f"--format={_FORMAT}", *options)
    rows = [line.strip().split("|") for line in (text or "").splitlines()]
    return [_job(*row) for row in rows if len(row) == _FORMAT.count("|") + 1]


def _job(number: str, name: str, state: str, reason: str, *rest: str) -> QueuedJob:
    names = ("elapsed", "left", "nodes", "nodelist", "start", "workdir")
    more: dict[str, Any] = dict(zip(names, rest, strict=True))
    return QueuedJob(number, name, state, reason, in_words(reason), **more)


def _accounted(number: str) -> QueuedJob | None:
    if shutil.which("sacct") is None:
        return None
    fields = "JobName,State,Reason,Elapsed,NNodes,NodeList,Start"
    text = _output("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}", f"--format={fields}")
    row = (text or "").strip().splitlines()[-1:]
    if not row or row[0].count("|") != fields.count(","):
        return None
    name, state, reason, elapsed, nodes, nodelist, start = row[0].split("|")
    more = {"elapsed": elapsed, "nodes": nodes, "nodelist": nodelist, "start": start}
    return QueuedJob(number, name, state.partition(" ")[0], reason, in_words(reason), **more)


def _output(*command: str) -> str | None:
    """Returns a command's output; None where it fails or does not answer."""
    done = run_slurm(*command, timeout_s=_TIMEOUT_S)
    return None if done.returncode else done.stdout


def in_words(reason: str) -> str:
    """Puts Slurm's reason into plain words; keeps an unknown reason as it is."""
    name = reason.strip("()").partition(",")[0].strip()
    if name in _WORDS:
        return _WORDS[name]
    return next((text for part, text in _PARTS if name.startswith(part)), name)
