"""Reasons why a Slurm job waits, in plain words, by squeue's codes (`man squeue`, JOB REASON CODES)."""

from __future__ import annotations

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


def in_words(reason: str) -> str:
    """A reason in words; the reason itself where it is not known, and empty where there is none."""
    name = reason.strip("()").partition(",")[0].strip()
    if name in _WORDS:
        return _WORDS[name]
    return next((text for part, text in _PARTS if name.startswith(part)), name)
