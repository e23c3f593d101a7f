"""Cells of the sweep over islands: one is killed at a random moment, or another one comes late."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT, make_tokens, text_folders, tiny_config, write_config
from tests.warm_python import python

KILLS, LATE = 30, 10
INNER, ROUNDS = 5, 30
SEEDS = (7, 8, 9)
_LIMIT_S, _POLL_S = 300.0, 0.02
_MISSED = 3
"""Rounds in which a living island may be done without: it was silent for 5 s on busy cores."""
_HANGS = "not all processes had ended after 300 s"


class WrongError(Exception):
    """What a cell checks did not hold."""


@dataclass
class Islands:
    """Running islands of one lighthouse; `started` has the lighthouse, too, in the order of starts."""

    started: list[subprocess.Popen[bytes]]
    config: Path
    work: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str) -> None:
        sets = ("--set", f"islands.name={name}", "--set", f"run.dir={self.work / name}")
        log = self.work / f"{name}.log"
        self.processes[name] = _start(self.started, "train", "--config", str(self.config), *sets, log=log)

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()

    def rows(self, name: str, event: str = "exchange") -> list[dict[str, Any]]:
        """The exchanges in an island's journal, or other events."""
        folder = self.work / name
        rows = read_rows(folder, kind="event") if (folder / "metrics.jsonl").exists() else []
        return [row for row in rows if row["event"] == event]

    def failures(self, name: str) -> str:
        """The exchanges that have failed on an island, and why."""
        return "; ".join(f"step {row['step']}: {row['why']}" for row in self.rows(name, "exchange_failed")) or "none"

    def wait_for_rounds(self, name: str, count: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while len(self.rows(name)) < count:
            if time.monotonic() > deadline or self.processes[name].poll() is not None:
                raise WrongError(f"{name} has made {len(self.rows(name))} exchanges, not {count}")
            time.sleep(_POLL_S)

    def wait(self) -> None:
        deadline = time.monotonic() + _LIMIT_S
        left = dict(self.processes)
        while left:
            if time.monotonic() > deadline:
                raise WrongError(f"{_HANGS}: {', '.join(left)}")
            for name, process in list(left.items()):
                code = process.poll()
                if code is not None:
                    del left[name]
                if code:
                    last = (self.work / f"{name}.log").read_text().strip().splitlines()[-1:]
                    raise WrongError(f"{name} ended with code {code}: {last}")
            time.sleep(_POLL_S)

    def loss(self, name: str) -> float:
        return float(read_rows(self.work / name, kind="eval")[-1]["loss"])


def _start(started: list[subprocess.Popen[bytes]], *words: str, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen([python(), "-m", "headrace", *words], stdout=output, stderr=output, cwd=ROOT)
    started.append(process)
    return process


def _kill_all(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.kill()
        process.wait()


@contextmanager
def two_islands(*, seed: int) -> Iterator[Islands]:
    """A lighthouse and two islands that have been started."""
    with tempfile.TemporaryDirectory(prefix="headrace-islands-") as folder, ExitStack() as stack:
        work, started = Path(folder), list[subprocess.Popen[bytes]]()
        stack.callback(_kill_all, started)
        address = f"127.0.0.1:{free_port()}"
        section = {"count": 2, "steps": INNER, "lighthouse": address, "timeout_s": 10, "start_s": 60}
        config = tiny_config(make_tokens(work, text_folders()), work / "run", engine="torch", islands=section)
        config["zero_optimization"] = {"stage": 0}
        config["run"] |= {"steps": INNER * ROUNDS, "checkpoint_every": 10 * INNER, "seed": seed}
        config["evaluation"] = {"samples": 64}
        path = write_config(work / "c.json", config)
        _start(started, "islands", "--config", str(path), "--only-lighthouse", log=work / "lighthouse.log")
        islands = Islands(started, path, work, {})
        for name in ("island-0", "island-1"):
            islands.start(name)
        yield islands


def undisturbed(state: Path) -> list[float]:
    """The held-out losses of two islands with each of three seeds; they are run once."""
    if not state.exists():
        losses = []
        for seed in SEEDS:
            with two_islands(seed=seed) as islands:
                islands.wait()
                losses.append(islands.loss("island-0"))
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(losses))
    found: list[float] = json.loads(state.read_text())
    return found


def run_cell(cell: str, state: Path) -> tuple[bool, str]:
    """Runs a cell; whether what it checks held, and a line about it."""
    losses = undisturbed(state)
    numbers, began = random.Random(cell), time.monotonic()
    try:
        with two_islands(seed=SEEDS[0]) as islands:
            loss, note = _kill(islands, numbers) if cell.startswith("killed") else _come_late(islands, numbers)
    except WrongError as wrong:
        return False, str(wrong)
    width = max(losses) - min(losses)
    inside = min(losses) - width <= loss <= max(losses) + width
    spread = "" if inside else f", outside of {min(losses):.4f} to {max(losses):.4f} by more than their width"
    return True, f"{note}; held-out loss {loss:.4f}{spread}; {time.monotonic() - began:.0f} s"


def _kill(islands: Islands, numbers: random.Random) -> tuple[float, str]:
    victim, after = f"island-{numbers.randrange(2)}", numbers.randrange(1, ROUNDS - 4)
    survivor = "island-1" if victim == "island-0" else "island-0"
    again = numbers.random() < 0.5
    islands.wait_for_rounds(survivor, after)
    time.sleep(numbers.uniform(0.0, 0.5))
    islands.kill(victim)
    if again:
        time.sleep(numbers.uniform(0.0, 2.0))
        islands.start(victim)
    islands.wait()
    rows, others = islands.rows(survivor), islands.rows(victim)
    missed = [row["round"] for row in others if row["round"] not in {each["round"] for each in rows}]
    # a survivor that was silent for seconds on busy cores was done without, too: those rounds, and what was trained in
    # the one that it came back in, are in the other journal
    found = {row["round"]: row for row in others if victim not in row["healed"]}
    found |= {row["round"]: row for row in rows if survivor not in row["healed"]}
    rows = [found[number] for number in sorted(found)]
    failures = f"{islands.failures(survivor)}; on {victim}: {islands.failures(victim)}"
    if len(missed) > _MISSED:
        raise WrongError(f"{survivor} was done without in rounds {missed}; failed exchanges: {failures}")
    check_samples(rows, failures=failures)
    back = any(victim in row["healed"] for row in rows)
    if back and islands.loss(victim) != islands.loss(survivor):
        raise WrongError(f"held-out loss {islands.loss(survivor)}, of the one that came back {islands.loss(victim)}")
    lost = sum(last - first + 1 for row in rows for first, last in row["lost"].values())
    text = f"{victim} killed after round {after}, {lost} samples lost"
    text += f", rounds {missed} without {survivor}" if missed else ""
    return islands.loss(survivor), f"{text}, {'back' if back else 'not back'}"


def _come_late(islands: Islands, numbers: random.Random) -> tuple[float, str]:
    after = numbers.randrange(1, ROUNDS // 2)
    islands.wait_for_rounds("island-0", after)
    time.sleep(numbers.uniform(0.0, 0.5))
    islands.start("late")
    islands.wait()
    rows = islands.rows("island-0")
    check_samples(rows)
    joined = [row["round"] for row in rows if "late" in row["healed"]]
    trained = sum("late" in row["trained"] for row in rows)
    # more than once where it was silent for seconds on busy cores, and was done without; then it trains to the end
    if not joined or not all("late" in row["trained"] for row in rows if row["round"] > joined[-1]):
        failures = f"{islands.failures('island-0')}; of the late one: {islands.failures('late')}"
        raise WrongError(f"the late one joined in rounds {joined}, trained {trained}; failed exchanges: {failures}")
    if islands.loss("late") != islands.loss("island-0"):
        raise WrongError(f"held-out loss {islands.loss('island-0')}, of the late one {islands.loss('late')}")
    again = f", and again in {', '.join(map(str, joined[1:]))}" if joined[1:] else ""
    return islands.loss("island-0"), f"joined in round {joined[0]}{again}, trained {trained} rounds"


def check_samples(rows: list[dict[str, Any]], *, failures: str = "") -> None:
    """What the weights contain, and what was lost, is every sample once, and no round is missing; else WrongError."""
    if [row["round"] for row in rows] != list(range(1, ROUNDS + 1)):
        healed = [row["round"] for row in rows if row["healed"]]
        raise WrongError(f"rounds {[row['round'] for row in rows]}, healed in {healed}; failed exchanges: {failures}")
    ranges = sorted(tuple(each) for row in rows for each in (*row["trained"].values(), *row["lost"].values()))
    if ranges[0][0] != 0 or any(before[1] + 1 != after[0] for before, after in pairwise(ranges)):
        raise WrongError(f"samples trained or lost: {ranges}")


def cells() -> dict[str, list[str]]:
    """Group -> cells."""
    killed = [f"killed {number:02d}" for number in range(1, KILLS + 1)]
    return {"killed": killed, "late": [f"late {number:02d}" for number in range(1, LATE + 1)]}
