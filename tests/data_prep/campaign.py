"""A campaign of strikes against data prep: processes are really killed, frozen and starved of disk, at random moments.

    python -m tests.data_prep.campaign --strikes 100 --report FILE

A corpus of the machine's own text goes through every phase there is (cleaning, lines, exact and near copies). One job
is left alone: its manifest is the truth. Then jobs are struck and started again, struck again perhaps, until each is
finished, and every one of them must have the files and the counts of the first, byte for byte. After each strike all
processes must be gone in time, and where the coordinator lived to say something, it must have said what to do.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.campaign.strikes import can_mount

PATIENCE_S = 30.0
"""How long after a strike a process may still be there."""
SOURCES, FILE_BYTES, DISK = 3, 12 << 20, "512m"
FULL, FROZEN = "the disk is full for a while", "SIGSTOP, a worker that outlives its coordinator"


@dataclass
class Started:
    """A job that runs; its processes are those of its session."""

    process: subprocess.Popen[str]
    began: float

    def others(self) -> list[psutil.Process]:
        """Its processes, without the coordinator."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.pid != self.process.pid:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@dataclass
class Strikes:
    """What became of the strikes of one kind."""

    times: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)


class Campaign:
    """Jobs over one corpus in `work`, a directory with room that can be taken away."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.draw = work, random.Random(seed)
        self.found: dict[str, Strikes] = defaultdict(Strikes)
        self.output, self.root = work / "tokens", work / ".tokens.job"
        self.config = _write_inputs(work)
        self.truth, self.seconds = self._undisturbed()

    def run(self, strikes: int, told: Callable[[str], None] = print) -> None:
        """Strikes so many times; whatever was struck last is finished."""
        kinds = [kind for kind in _STRIKES if kind != FULL or can_mount()]
        left = [kinds[i % len(kinds)] for i in range(strikes)]
        self.draw.shuffle(left)
        while left:
            kind = left.pop()
            self._strike(kind)
            told(f"{strikes - len(left)} of {strikes}: {kind}: {self.found[kind].wrong[-1:] or 'as promised'}")
            if not left or self.draw.random() < 0.4:
                self._finish(kind)

    def _undisturbed(self) -> tuple[dict[str, Any], float]:
        job = self._start()
        said = job.process.communicate()[1]
        assert job.process.returncode == 0, said
        seconds, truth = time.monotonic() - job.began, self._made()
        shutil.rmtree(self.output)
        return truth, seconds

    def _start(self) -> Started:
        command = [sys.executable, "-m", "data_prep", "--config", str(self.config), "--workers", "2"]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        began = time.monotonic()
        return Started(subprocess.Popen(command, cwd=self.work, start_new_session=True, **pipes), began)

    def _strike(self, kind: str) -> None:
        job, entry = self._start(), self.found[kind]
        time.sleep(self.draw.uniform(0.0, self.seconds))
        entry.times += 1
        entry.phases[self._phase()] += 1
        struck = time.monotonic()
        _STRIKES[kind](self, job)
        try:
            said = job.process.communicate(timeout=PATIENCE_S)[1]
            psutil.wait_procs(job.others(), timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            said = ""
        entry.seconds.append(time.monotonic() - struck)
        rest = [job.process.pid] * (job.process.poll() is None) + [process.pid for process in job.others()]
        for pid in rest:
            os.kill(pid, signal.SIGKILL)
        code = job.process.wait()
        entry.codes[code] += 1
        if rest:
            entry.wrong.append(f"{len(rest)} processes were still there after {PATIENCE_S:.0f} s")
        if code == 2 and "try:" not in said:
            entry.wrong.append(f"said nothing of use: {said[-300:]!r}")
        if code not in (0, 2, 130, -signal.SIGTERM, -signal.SIGKILL):
            entry.wrong.append(f"left with {code}: {said[-300:]!r}")
        if code == 0 and kind != FROZEN:  # which has looked already
            self._check(kind)

    def _finish(self, kind: str) -> None:
        """Runs what was struck to its end."""
        job = self._start()
        said = job.process.communicate()[1]
        if job.process.returncode != 0:
            self.found[kind].wrong.append(f"could not go on: {said[-300:]!r}")
            shutil.rmtree(self.root, ignore_errors=True)
        else:
            self._check(kind)

    def _check(self, kind: str) -> None:
        """The output is the undisturbed one; then it goes, and the next job begins anew."""
        made = self._made()
        if made != self.truth:
            different = sorted(key for key in made if made[key] != self.truth.get(key))
            self.found[kind].wrong.append(f"another output: {', '.join(different)}")
        verified = subprocess.run([sys.executable, "-m", "data_prep", "verify", str(self.output)], check=False)
        if verified.returncode != 0:
            self.found[kind].wrong.append("an output that does not verify")
        if self.root.exists():
            self.found[kind].wrong.append("a job directory that stayed")
        shutil.rmtree(self.output)

    def _made(self) -> dict[str, Any]:
        manifest = json.loads((self.output / "manifest.json").read_text())
        return {key: manifest[key] for key in ("files", "details", "parents", "fingerprint")}

    def _phase(self) -> str:
        """How far the job is when it is struck."""
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


def _all(_campaign: Campaign, job: Started, how: signal.Signals) -> None:
    for process in [psutil.Process(job.process.pid), *job.others()]:
        _send(process.pid, how)


def _send(pid: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it had ended
        os.kill(pid, how)


def _one_of_the_others(campaign: Campaign, job: Started, how: signal.Signals) -> None:
    others = job.others()
    if others:
        _send(campaign.draw.choice(others).pid, how)


def _frozen(campaign: Campaign, job: Started) -> None:
    """A worker stands still while its coordinator is killed, and wakes up when another has taken the job over."""
    others = job.others()
    frozen = campaign.draw.choice(others).pid if others else None
    if frozen is not None:
        _send(frozen, signal.SIGSTOP)
    _send(job.process.pid, signal.SIGKILL)
    job.process.wait()
    second = campaign._start()
    time.sleep(campaign.draw.uniform(0.0, campaign.seconds))
    if frozen is not None:
        _send(frozen, signal.SIGCONT)
    said = second.process.communicate()[1]
    if second.process.returncode == 0:
        campaign._check(FROZEN)
    else:
        campaign.found[FROZEN].wrong.append(said[-300:])


def _full_disk(campaign: Campaign, job: Started) -> None:
    """No byte is left for a while, which a job may outlive if it writes nothing meanwhile."""
    filler = campaign.work / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout=campaign.draw.uniform(0.2, 5.0))
    filler.unlink()


_STRIKES: dict[str, Callable[[Campaign, Started], None]] = {
    "SIGKILL, the coordinator": lambda _, job: _send(job.process.pid, signal.SIGKILL),
    "SIGKILL, a worker or the server they are forked from": lambda c, job: _one_of_the_others(c, job, signal.SIGKILL),
    "SIGKILL, everything": lambda c, job: _all(c, job, signal.SIGKILL),
    "SIGTERM, the coordinator": lambda _, job: _send(job.process.pid, signal.SIGTERM),
    "SIGINT, everything": lambda c, job: _all(c, job, signal.SIGINT),
    FROZEN: _frozen,
    FULL: _full_disk,
}


def _write_inputs(work: Path) -> Path:
    """Three sources of the machine's own text, with copies and repeated lines, and a config that uses every phase."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    draw, sources = random.Random(1), []
    for number in range(SOURCES):
        path, size = work / f"source{number}.jsonl", 0
        with path.open("w", encoding="utf-8") as out:
            while size < FILE_BYTES:
                text = draw.choice(files).read_text(encoding="utf-8", errors="replace")[: draw.choice((2000, 20_000))]
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
    """A directory that is a disk of its own where this process may mount one: it will be filled."""
    with tempfile.TemporaryDirectory(prefix="headrace-campaign-") as folder:
        if can_mount():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            if can_mount():
                subprocess.run(["umount", "-l", folder], check=True)


def report(found: dict[str, Strikes], seconds: float) -> str:
    """A table, and what went wrong, in Markdown."""
    head = ["strike", "times", "wrong", "median s to the end of all", "longest s", "exit codes", "phases"]
    rows = [head, ["---", "---:", "---:", "---:", "---:", "---", "---"]]
    for kind, entry in sorted(found.items()):
        codes = ", ".join(f"{code} ({n})" for code, n in entry.codes.most_common())
        phases = ", ".join(f"{phase} {n}" for phase, n in entry.phases.most_common())
        took = [f"{statistics.median(entry.seconds):.1f}", f"{max(entry.seconds):.1f}"]
        rows.append([kind, str(entry.times), str(len(entry.wrong)), *took, codes, phases])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    wrong = "".join(f"\n- {kind}: {why}" for kind, entry in sorted(found.items()) for why in entry.wrong)
    return f"A job that is left alone takes {seconds:.1f} s.\n\n{table}\n{wrong}\n"


def main() -> int:
    """Runs a campaign and writes its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of what is struck when (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    with small_disk() as work:
        campaign = Campaign(work, args.seed)
        try:
            campaign.run(args.strikes, told=lambda line: print(line, flush=True))
        finally:
            text = report(campaign.found, campaign.seconds)
            print(text)
            if args.report is not None:
                args.report.parent.mkdir(parents=True, exist_ok=True)
                args.report.write_text(text)
    return int(any(entry.wrong for entry in campaign.found.values()))


if __name__ == "__main__":
    sys.exit(main())
