"""`python -m headrace.doctor.rank JOB`: the process of a check, or one of its ranks; an agent starts it.

For a check of ranks the first process is the local launcher, which starts this module again as every rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

from foundation.cli import leave
from foundation.errors import HeadraceError
from headrace.doctor.check import Check, Context, Finding
from pipeline.config.load import load_config
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch import Launch, detect, process_group, supervise_pod
from pipeline.runtime.launch.pod import PodPlace

BROKEN = "the check itself could not be made, so nothing is known about what it checks"


def main() -> int:
    """Makes the check, or starts its ranks; returns a code other than 0 if it could not be made.

    JOB is a JSON file with a check, its context, and the port of the rendezvous on the first node; findings are
    appended to the file `findings` beside it.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    check, context, ranks = Check(**job["check"]), _context(**job["context"]), list(job["context"]["nodes"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if check.place == "ranks" and "RANK" not in os.environ:
        first, size = context.processes * ranks.index(context.node), context.processes * len(ranks)
        place = PodPlace(first, context.processes, size, context.nodes[ranks[0]], job["port"])
        return supervise_pod([sys.executable, "-m", "headrace.doctor.rank", sys.argv[1]], place)
    launch, code = detect() if check.place == "ranks" else None, 0
    # unbuffered: one write for each line, as all ranks of the node append
    with Path(sys.argv[1]).with_name("findings").open("ab", buffering=0) as file:
        for code, finding in _findings(check, context, launch):  # noqa: B007  the last one's code is returned
            if launch is None or launch.rank == 0:
                file.write(json.dumps(asdict(finding)).encode() + b"\n")
            elif finding.passed is False:  # of the other ranks, failures alone
                where = finding.where or f"rank {launch.rank} on {socket.gethostname()}"
                file.write(json.dumps(asdict(replace(finding, where=where))).encode() + b"\n")
    return code


def _context(config: str | None, work: str, overrides: list[str], **others: object) -> Context:
    return Context(config and Path(config), tuple(overrides), Path(work), **others)  # type: ignore[arg-type]


def _findings(check: Check, context: Context, launch: Launch | None) -> Iterator[tuple[int, Finding]]:
    """Yields an exit code and a finding; an error of the check is a finding, too, with its traceback in the log."""
    try:
        found = import_module(check.module).run(context) if launch is None else _as_rank(check, context, launch)
        yield from ((0, finding) for finding in found)
    except HeadraceError as error:
        remedy = str(error).partition("\n  try: ")[2]
        yield error.exit_code, Finding(False, error.cause, "a training would end with this error", remedy)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        yield 1, Finding(False, text, BROKEN, "the check's log has the traceback")


def _as_rank(check: Check, context: Context, launch: Launch) -> Iterator[Finding]:
    """Joins the process group as a training does, and makes the check."""
    from pipeline.engines.build import pick_device  # noqa: PLC0415  imports torch
    from pipeline.runtime.launch.device import bind_to_gpu, has_gpu, set_up_allocator  # noqa: PLC0415

    section = load_config(context.config, context.overrides).launch if context.config else LaunchSection()
    # a rank that does not join is named before the check's limit
    section = section.model_copy(update={"timeout": min(section.timeout, context.limit_s / 2)})
    set_up_allocator(gpu=has_gpu(section))
    device = pick_device(launch, section)
    bind_to_gpu(device.index, section)
    with process_group(launch, gpu=device.index, timeout_s=context.limit_s, config=section):
        yield from import_module(check.module).run(context)


if __name__ == "__main__":
    leave(main())
