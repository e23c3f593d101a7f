"""Reports failures in a chain of Slurm jobs: the chain's last job prints them and writes them to the job directory.

Slurm forgets a job MinJobAge (300 s by default) after its end, which may be long before the other elements of its array
have ended. So the logs decide which elements failed; where Slurm still has a reason, it is added.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.job.slurm import CHAIN_LOG, FAILURE, run_command
from foundation.directory import write_text
from foundation.errors import ConfigError

_FAILED = "F,TO,OOM,NF,CA,PR,BF,DL"
_SHOWN, _LINES = 5, 5
_UNKNOWN = "failed; Slurm no longer has the reason"


@dataclass(frozen=True)
class Failure:
    """A failed job; `element`: its index in an array, or -1; `log`: its log, or None if it has not written one."""

    name: str
    number: str
    element: int
    reason: str
    log: Path | None

    def lines(self) -> Iterator[str]:
        """Yields the failure's lines in the report."""
        which = f"{self.name} {self.element}" if self.element >= 0 else self.name
        yield f"{which} (job {self.number}): {self.reason}"
        if self.log is not None and self.log.is_file():
            yield f"the end of {self.log}:"
            yield from (f"    {line}" for line in _end_of(self.log))


def report(logs: Path, root: Path, shares: int, jobs: Sequence[str]) -> list[str]:
    """Describes a chain's failed jobs, with the ends of their logs; writes the text to `FAILURE` in the job directory.

    Args:
        logs: directory of the chain's logs.
        root: the job directory.
        shares: number of elements of each array.
        jobs: NAME=ID of each job of the chain, in order.
    """
    numbers = [(name, number) for name, _, number in (job.partition("=") for job in jobs)]
    reasons = _reasons([number for _, number in numbers])
    failed = [each for name, number in numbers for each in _failures(name, number, logs, shares, reasons)]
    lines = [f"error: the job was not finished: {len(failed)} of its Slurm jobs failed. The first of them:"]
    lines += [line for each in failed[:_SHOWN] for line in each.lines()]
    if not failed:
        lines = [f"error: the job was not finished, and Slurm no longer knows why: see {logs / CHAIN_LOG}"]
    lines.append("  try: fix the cause, then submit again: finished tasks are skipped")
    with suppress(OSError):  # a full disk may be the cause
        write_text(root / FAILURE, "\n".join(lines) + "\n")
    return lines


def _failures(
    name: str, number: str, logs: Path, shares: int, reasons: dict[tuple[str, int], str]
) -> Iterator[Failure]:
    known = {element: reason for (job, element), reason in reasons.items() if job == number}
    if -1 in known:  # prepare, finish or a whole array
        yield Failure(name, number, -1, known[-1], logs / CHAIN_LOG if name in ("prepare", "finish") else None)
        return
    for element in range(shares):
        log = logs / f"{name}-{element}.out"
        if element in known or (log.is_file() and not _succeeded(log, element, shares)):
            yield Failure(name, number, element, known.get(element, _UNKNOWN), log)


def _succeeded(log: Path, element: int, shares: int) -> bool:
    return any(line.startswith(f"share {element} of {shares}: ") for line in _end_of(log))


def _end_of(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-_LINES:]


def _reasons(numbers: Sequence[str]) -> dict[tuple[str, int], str]:
    """Reasons that Slurm still has: (job, element or -1) -> why it failed."""
    form = "--format=%F|%K|%T|%r"
    rows: list[str] = []
    for number in numbers:
        with suppress(ConfigError):  # "Invalid job id specified": Slurm has forgotten it
            rows += run_command("squeue", "--noheader", "--array", f"--jobs={number}", f"--states={_FAILED}", form)
    fields = [row.split("|") for row in rows]
    # jobs that Slurm canceled for a failed dependency are not the cause
    return {
        (number, int(element) if element.isdigit() else -1): f"{state} ({reason})"
        for number, element, state, reason in fields
        if not reason.startswith("Dependency")
    }


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])), file=sys.stderr)
    sys.exit(1)  # the chain's last job becomes FAILED
