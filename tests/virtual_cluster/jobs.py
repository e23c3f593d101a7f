"""Parses the jobs in the output of `scontrol show job`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}


@dataclass(frozen=True)
class Job:
    """One job, or one element of an array.

    Fields: `id` of the job, of the whole array for an element; `element` within it, None for other jobs; `exit_code`
    of the batch script, 128 + n after signal n; `nodes` as Slurm abbreviates them (`n[1-2]`).
    """

    id: int
    element: str | None
    name: str
    state: str
    reason: str
    exit_code: int
    nodes: str

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


def parse_jobs(text: str) -> list[Job]:
    """The jobs in the output of `scontrol show job --oneliner`, oldest first."""
    jobs = [_parse(line) for line in text.splitlines() if line.startswith("JobId=")]
    return sorted(jobs, key=lambda job: (job.id, job.element or ""))


def _parse(line: str) -> Job:
    field = dict(re.findall(r"(\w+)=(\S*)", line))
    code, signal = (int(part) for part in field["ExitCode"].split(":"))
    return Job(
        id=int(field.get("ArrayJobId", field["JobId"])),
        element=field.get("ArrayTaskId"),
        name=field["JobName"],
        state=field["JobState"],
        reason=field["Reason"],
        exit_code=128 + signal if signal else code,
        nodes=field["NodeList"],
    )
