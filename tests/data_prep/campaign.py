"""Fault injection campaign for data prep: kills and suspends processes and fills the disk, at random moments.

    python -m tests.data_prep.campaign --faults 100 --report FILE

A corpus of source files of this machine goes through all phases (cleaning, line deduplication, exact and near
duplicates). One job runs without faults: its manifest is the expected one. Then faults are injected into jobs, which
are resumed, perhaps with further faults, until each is finished; every one must have the same files and counts, byte
for byte. After each fault all processes must exit in time, and an error message of the coordinator must have a remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.runtime.faults.campaign.injections import can_mount

EXIT_TIMEOUT_S = 30.0
"""Seconds in which all processes must exit after a fault."""
SOURCES, FILE_BYTES, DISK = 3, 12 << 20, "512m"
FULL, SUSPENDED = "the disk is full for a while", "SIGSTOP, a worker that outlives its coordinator"


@dataclass
class RunningJob:
    """A running job; its processes are those of its session."""

    process: subprocess.Popen[str]
    began: float

    def workers(self) -> list[psutil.Process]:
        """Its processes except the coordinator."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.pid != self.process.pid:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@dataclass
class FaultResults:
    """The results of all faults of one kind."""

    times: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)


class Campaign:
    """Injects faults into jobs over one corpus in `work`, a directory whose disk may be filled."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.random = work, random.Random(seed)
        self.results: dict[str, FaultResults] = defaultdict(FaultResults)
        self.output, self.root = work / "tokens", work / ".tokens.job"
        self.config = _write_inputs(work)
        self.expected, self.seconds = self._run_without_faults()

    def run(self, faults: int, log: Callable[[str], None] = print, *, kinds: Sequence[str] = ()) -> None:
        """Injects so many faults, of the given kinds or of all; the last job is run to its end."""
        kinds = kinds or [kind for kind in FAULTS if kind != FULL or can_mount()]
        remaining = [kinds[i % len(kinds)] for i in range(faults)]
        self.random.shuffle(remaining)
        while remaining:
            kind = remaining.pop()
            self._inject(kind)
            log(f"{faults - len(remaining)} of {faults}: {kind}: {self.results[kind].wrong[-1:] or 'as expected'}")
            if not remaining or self.random.random() < 0.4:
                self._finish(kind)

    def _run_without_faults(self) -> tuple[dict[str, Any], float]:
        """The expected output, and the duration of a job in seconds."""
        job = self.start()
        errors = job.process.communicate()[1]
        assert job.process.returncode == 0, errors
        seconds, expected = time.monotonic() - job.began, self._output_summary()
        shutil.rmtree(self.output)
        return expected, seconds

    def start(self) -> RunningJob:
        """Starts a job, or resumes the one that a fault has ended."""
        command = [sys.executable, "-m", "data_prep", "--config", str(self.config), "--workers", "2"]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        began = time.monotonic()
        return RunningJob(subprocess.Popen(command, cwd=self.work, start_new_session=True, **pipes), began)

    def _inject(self, kind: str) -> None:
        job, entry = self.start(), self.results[kind]
        time.sleep(self.random.uniform(0.0, self.seconds))
        entry.times += 1
        entry.phases[self._phase()] += 1
        injected = time.monotonic()
        FAULTS[kind](self, job)
        try:
            errors = job.process.communicate(timeout=EXIT_TIMEOUT_S)[1]
            psutil.wait_procs(job.workers(), timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = ""
        entry.seconds.append(time.monotonic() - injected)
        running = [job.process.pid] * (job.process.poll() is None) + [process.pid for process in job.workers()]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        code = job.process.wait()
        entry.codes[code] += 1
        if running:
            entry.wrong.append(f"{len(running)} processes were still running after {EXIT_TIMEOUT_S:.0f} s")
        if code == 2 and "try:" not in errors:
            entry.wrong.append(f"an error message without a remedy: {errors[-300:]!r}")
        if code not in (0, 2, 130, -signal.SIGTERM, -signal.SIGKILL):
            entry.wrong.append(f"exited with {code}: {errors[-300:]!r}")
        if code == 0 and kind != SUSPENDED:  # which has checked the output itself
            self.check_output(kind)

    def _finish(self, kind: str) -> None:
        job = self.start()
        errors = job.process.communicate()[1]
        if job.process.returncode != 0:
            self.results[kind].wrong.append(f"could not resume: {errors[-300:]!r}")
            shutil.rmtree(self.root, ignore_errors=True)
        else:
            self.check_output(kind)

    def check_output(self, kind: str) -> None:
        """Compares the output with the expected one and removes it, so that the next job starts over."""
        output = self._output_summary()
        if output != self.expected:
            different = sorted(key for key in output if output[key] != self.expected.get(key))
            self.results[kind].wrong.append(f"another output: {', '.join(different)}")
        verified = subprocess.run([sys.executable, "-m", "data_prep", "verify", str(self.output)], check=False)
        if verified.returncode != 0:
            self.results[kind].wrong.append("the output does not verify")
        if self.root.exists():
            self.results[kind].wrong.append("the job directory was not removed")
        shutil.rmtree(self.output)

    def _output_summary(self) -> dict[str, Any]:
        manifest = json.loads((self.output / "manifest.json").read_text())
        return {key: manifest[key] for key in ("files", "details", "parents", "fingerprint")}

    def _phase(self) -> str:
        if not (self.root / "job.json").exists():
            return "before the plan"
        if not (self.root / "tokenizer").exists():
            return "tokenizer"
        begun = [note.name.split("-")[0] for note in sorted((self.root / "progress").glob("*.json"), key=_age)]
        return begun[-1] if begun else "tokenizer"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _signal_all(_campaign: Campaign, job: RunningJob, number: signal.Signals) -> None:
    for process in [psutil.Process(job.process.pid), *job.workers()]:
        _send(process.pid, number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _signal_one_worker(campaign: Campaign, job: RunningJob, number: signal.Signals) -> None:
    workers = job.workers()
    if workers:
        _send(campaign.random.choice(workers).pid, number)


def _suspend_worker(campaign: Campaign, job: RunningJob) -> None:
    """Suspends a worker, kills its coordinator, and resumes the worker while another coordinator runs the job."""
    workers = job.workers()
    suspended = campaign.random.choice(workers).pid if workers else None
    if suspended is not None:
        _send(suspended, signal.SIGSTOP)
    _send(job.process.pid, signal.SIGKILL)
    job.process.wait()
    second = campaign.start()
    time.sleep(campaign.random.uniform(0.0, campaign.seconds))
    if suspended is not None:
        _send(suspended, signal.SIGCONT)
    errors = second.process.communicate()[1]
    if second.process.returncode == 0:
        campaign.check_output(SUSPENDED)
    else:
        campaign.results[SUSPENDED].wrong.append(errors[-300:])


def _fill_disk(campaign: Campaign, job: RunningJob) -> None:
    """Fills the disk for a while; a job that writes nothing meanwhile survives."""
    filler = campaign.work / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout=campaign.random.uniform(0.2, 5.0))
    filler.unlink()


FAULTS: dict[str, Callable[[Campaign, RunningJob], None]] = {
    "SIGKILL, the coordinator": lambda _, job: _send(job.process.pid, signal.SIGKILL),
    "SIGKILL, a worker or the server they are forked from": lambda c, job: _signal_one_worker(c, job, signal.SIGKILL),
    "SIGKILL, everything": lambda c, job: _signal_all(c, job, signal.SIGKILL),
    "SIGTERM, the coordinator": lambda _, job: _send(job.process.pid, signal.SIGTERM),
    "SIGINT, everything": lambda c, job: _signal_all(c, job, signal.SIGINT),
    SUSPENDED: _suspend_worker,
    FULL: _fill_disk,
}


def _write_inputs(work: Path) -> Path:
    """Three sources of Python source files, with duplicates and repeated lines, and a config with all phases."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    rng, sources = random.Random(1), []
    for number in range(SOURCES):
        path, size = work / f"source{number}.jsonl", 0
        with path.open("w", encoding="utf-8") as out:
            while size < FILE_BYTES:
                text = rng.choice(files).read_text(encoding="utf-8", errors="replace")[: rng.choice((2000, 20_000))]
                size += out.write(json.dumps({"text": text}) + "\n")
        sources.append({"name": f"s{number}", "path": str(path)})
    config = {
        "output": str(work / "tokens"),
        "sources": sources,
        "tokenizer": {"train": "bpe", "vocab_size": 2000, "sample_bytes": 500_000},
        "clean": [{"step": "unicode"}, {"step": "pii"}],
        "dedup": {"exact": True, "near": {}, "lines": {}},
        "list_dropped": "texts",
        "task_bytes": 1 << 20,
        "shard_tokens": 400_000,
    }
    path = work / "corpus.json"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def small_disk() -> Iterator[Path]:
    """A temporary directory on a small disk of its own, if this process may mount one."""
    with tempfile.TemporaryDirectory(prefix="headrace-campaign-") as folder:
        if can_mount():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            if can_mount():
                subprocess.run(["umount", "-l", folder], check=True)


def report(results: dict[str, FaultResults], seconds: float) -> str:
    """A table of all faults and a list of the wrong results, in Markdown."""
    head = ["fault", "times", "wrong", "median s until all exited", "longest s", "exit codes", "phases"]
    rows = [head, ["---", "---:", "---:", "---:", "---:", "---", "---"]]
    for kind, entry in sorted(results.items()):
        codes = ", ".join(f"{code} ({n})" for code, n in entry.codes.most_common())
        phases = ", ".join(f"{phase} {n}" for phase, n in entry.phases.most_common())
        took = [f"{statistics.median(entry.seconds):.1f}", f"{max(entry.seconds):.1f}"]
        rows.append([kind, str(entry.times), str(len(entry.wrong)), *took, codes, phases])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    wrong = "".join(f"\n- {kind}: {why}" for kind, entry in sorted(results.items()) for why in entry.wrong)
    return f"A job without faults takes {seconds:.1f} s.\n\n{table}\n{wrong}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="number of faults (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of kinds and times (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the report to this file")
    args = parser.parse_args()
    with small_disk() as work:
        campaign = Campaign(work, args.seed)
        try:
            campaign.run(args.faults, log=lambda line: print(line, flush=True))
        finally:
            text = report(campaign.results, campaign.seconds)
            print(text)
            if args.report is not None:
                args.report.parent.mkdir(parents=True, exist_ok=True)
                args.report.write_text(text)
    return int(any(entry.wrong for entry in campaign.results.values()))


if __name__ == "__main__":
    sys.exit(main())
