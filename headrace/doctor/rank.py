"""`python -m headrace.doctor.rank JOB`: the process of a check, or one of its ranks; an agent starts it.

For a check of ranks the first process is the local launcher, which starts this module again as every rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from foundation.cli import leave
from foundation.errors import HeadraceError
from headrace.doctor.check import Check, Context, Finding
from pipeline.config.load import load_config
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch import Launch, detect, process_group, supervise_pod
from pipeline.runtime.launch.pod import PodPlace

BROKEN = "the check itself could not be made, so nothing is known about what it checks"


@dataclass(frozen=True)
class DoctorJob:
    """A check to make on this node.

    Attributes:
        check: the check.
        context: what the check is given.
        findings: file of this node to which processes append findings, one JSON line each.
        port: port of the rendezvous on the first node.
    """

    check: Check
    context: Context
    findings: Path
    port: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> DoctorJob:
        """Makes a job from JSON."""
        given = raw["context"]
        config = None if given["config"] is None else Path(given["config"])
        paths = {"config": config, "work": Path(given["work"]), "overrides": tuple(given["overrides"])}
        return cls(Check(**raw["check"]), Context(**{**given, **paths}), Path(raw["findings"]), raw["port"])

    def as_json(self) -> str:
        """Writes the job as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @property
    def place(self) -> PodPlace:
        """The ranks of this node among those of all nodes."""
        nodes, here = list(self.context.nodes), self.context.processes
        first, address = nodes.index(self.context.node) * here, self.context.nodes[nodes[0]]
        return PodPlace(first, here, here * len(nodes), address, self.port)


def main() -> int:
    """Makes the check, or starts its ranks; returns 1 if it could not be made."""
    job = DoctorJob.read(json.loads(Path(sys.argv[1]).read_text()))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if job.check.place != "ranks":
        return _report(job, lambda: import_module(job.check.module).run(job.context))
    if "RANK" not in os.environ:
        return supervise_pod([sys.executable, "-m", "headrace.doctor.rank", sys.argv[1]], job.place)
    launch = detect()
    return _report(job, lambda: _as_rank(job, launch), launch)


def _as_rank(job: DoctorJob, launch: Launch) -> Iterable[Finding]:
    """Joins the process group as a training does, and makes the check."""
    from pipeline.engines.build import pick_device  # noqa: PLC0415  imports torch
    from pipeline.runtime.launch.device import bind_to_gpu, has_gpu, set_up_allocator  # noqa: PLC0415

    context = job.context
    section = load_config(context.config, context.overrides).launch if context.config else LaunchSection()
    # a rank that does not join is named before the check's limit
    section = section.model_copy(update={"timeout": min(section.timeout, context.limit_s / 2)})
    set_up_allocator(gpu=has_gpu(section))
    device = pick_device(launch, section)
    bind_to_gpu(device.index, section)
    with process_group(launch, gpu=device.index, timeout_s=context.limit_s, config=section):
        yield from import_module(job.check.module).run(context)


def _report(job: DoctorJob, make: Any, launch: Launch | None = None) -> int:
    """Appends the findings of a check to the job's file as they come; of a rank above 0, only failures.

    An error of the check is a finding, too; its traceback goes into the check's log.
    """
    code = 0
    with job.findings.open("ab", buffering=0) as file:  # one write for each line: all ranks append
        try:
            for finding in make():
                _append(file, finding, launch)
        except HeadraceError as error:
            code, remedy = error.exit_code, str(error).partition("\n  try: ")[2]
            _append(file, Finding(False, error.cause, "a training would end with this error", remedy), launch)
        except Exception as error:
            code, cause = 1, (str(error).strip().splitlines() or [""])[0]
            traceback.print_exc()
            remedy = "the check's log has the traceback"
            _append(file, Finding(False, f"{type(error).__name__}: {cause}", BROKEN, remedy), launch)
    return code


def _append(file: Any, finding: Finding, launch: Launch | None) -> None:
    if launch is not None and launch.rank > 0:
        if finding.passed is not False:
            return
        finding = replace(finding, where=finding.where or f"rank {launch.rank} on {socket.gethostname()}")
    file.write(json.dumps(asdict(finding)).encode() + b"\n")


if __name__ == "__main__":
    leave(main())
