"""Islands behind shaped links, measured beside data parallelism over the same links and beside their simulation.

    python -m benchmarks.islands_netem --config demo/teacher.json --set data.sequence_length=64 train_batch_size=1

Every island is a process in a network namespace of its own (`shaped_network`; root, Linux). Exchanges are timed by
the island that came last, which waits for nobody; the first round is left out. Bytes are the interface's counter of the
whole run, with headers, the lighthouse and the start, beside the journal's sum. The simulation is given the step time
and the arithmetic of an exchange as measured here, and the link as it is set: nothing else.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.island_simulator.island_exchange import Exchange, Island, data_parallel_step_s, exchange_s
from benchmarks.island_simulator.island_simulation import simulate_islands
from benchmarks.shaped_network import INTERFACE, ShapedNetwork
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.plan.predict.links import Link
from pipeline.run.groups.islands.mean import mean_over_islands
from pipeline.runtime.metrics.journal import read_rows

_PORT, _DATA_PARALLEL_STEPS, _ROUNDS, _LIMIT_S = 29510, 16, {20: 4, 100: 3}, 400.0
_ALL_REDUCES = 7
"""Of a step of data parallelism, the native engine's at ZeRO stage 0: torch's profiler counts 137 in 20 steps."""
_BYTES = {"none": 4.0, "int8": 1 + 4 / 256}
_HEAD = (
    "link|islands|H|sent as|exchange s|simulated|error|training share|simulated|error"
    "|MB on the wire|journal|tokens/s|over data parallelism"
)


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        count: of islands.
        link: of each.
        inner: steps between exchanges.
        compress: `islands.compress`.
    """

    count: int
    link: Link
    inner: int
    compress: str


class Measured(NamedTuple):
    """Of a run of islands.

    Attributes:
        step_s: of each island.
        exchange_s: of an exchange, without waiting for slower islands.
        share: of the time that trains.
        wire_bytes, journal_bytes: of all islands.
        tokens_per_s: of all islands.
    """

    step_s: list[float]
    exchange_s: float
    share: float
    wire_bytes: int
    journal_bytes: int
    tokens_per_s: float


class Alone:
    """Collectives that copy, for the arithmetic of an exchange without its network."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_to_all(self, values: Tensor) -> Tensor:
        """The values."""
        return values.clone()

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """The values of all: this one's."""
        return [values.clone() for _ in range(self.size)]


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config of a run")
    parser.add_argument("--out", type=Path, default=Path("out/islands-netem"))
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--links", nargs="+", default=["100:50", "1000:10"], metavar="MBIT/S:MS", help="one direction")
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--inner", nargs="+", type=int, default=[20, 100])
    asked = parser.parse_args()
    print(f"| {_HEAD.replace('|', ' | ')} |\n|{'---|' * (_HEAD.count('|') + 1)}", flush=True)
    for text, count in product(asked.links, asked.islands):
        megabits, latency_ms = (float(part) for part in text.split(":"))
        link, parallel = Link(megabits * 1e6 / 8, latency_ms / 1000), None
        for inner, compress in product(asked.inner, _BYTES):
            found = run_islands(Case(count, link, inner, compress), asked)
            parallel = parallel or run_data_parallel(count, link, found, asked, name=text)
            print_row(Case(count, link, inner, compress), found, parallel, asked, name=text)


def print_row(case: Case, found: Measured, parallel: float, asked: argparse.Namespace, *, name: str) -> None:
    """A row of the table: measured, simulated, and the signed errors of the simulation."""
    parameters = parameters_of(asked.out / "run" / "island-0")
    arithmetic = arithmetic_s(parameters, case)
    exchange = Exchange(case.inner, _BYTES[case.compress] * parameters, compute_s=arithmetic)
    islands = [Island(step_s, case.link) for step_s in found.step_s]
    takes = exchange_s(islands, exchange, kept=True)  # but for the first, which is left out
    share = simulate_islands(islands, exchange, seconds=1000 * takes).efficiency
    cells: list[Any] = [name.replace(":", " Mbit/s, ") + " ms", case.count, case.inner]
    cells += [{"none": "fp32"}.get(case.compress, case.compress), f"{found.exchange_s:.2f}", f"{takes:.2f}"]
    cells += [f"{takes / found.exchange_s - 1:+.0%}", f"{found.share:.1%}", f"{share:.1%}"]
    cells += [f"{100 * (share - found.share):+.1f} points", f"{found.wire_bytes / 1e6:.1f}"]
    cells += [f"{found.journal_bytes / 1e6:.1f}", f"{found.tokens_per_s:.0f}", f"{found.tokens_per_s / parallel:.1f}x"]
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def run_islands(case: Case, asked: argparse.Namespace) -> Measured:
    """Runs the islands of a case to their end."""
    out = asked.out / "run"
    subprocess.run(["rm", "-rf", str(out)], check=True)
    out.mkdir(parents=True)
    secret = asked.out / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    with ShapedNetwork(case.count, link=case.link) as network:
        section = [f"islands.count={case.count}", f"islands.steps={case.inner}", f"islands.compress={case.compress}"]
        section += [f"islands.lighthouse={network.address(0)}:{_PORT}", f"islands.secret_file={secret}"]
        sets = [*common(asked, case.inner * _ROUNDS.get(case.inner, 3)), *section, "islands.start_s=600"]
        lighthouse = headrace("islands", asked.config, sets, "--only-lighthouse")
        with open_log(out / "lighthouse.log") as log:
            hub = subprocess.Popen(network.command(0, *lighthouse), stdout=log, stderr=log)
        processes = []
        for host in range(case.count):
            own = [f"islands.name=island-{host}", f"run.dir={out / f'island-{host}'}"]
            own += [f"islands.bind={network.address(host)}"]
            with open_log(out / f"island-{host}.log") as log:
                words = network.command(host, *headrace("train", asked.config, [*sets, *own]))
                processes.append(subprocess.Popen(words, stdout=log, stderr=log))
        wait_for(processes, out)
        wire = sum(network.bytes_sent(host) for host in range(case.count))
        hub.terminate()
        hub.wait()
    return measured([out / f"island-{host}" for host in range(case.count)], case, wire)


def measured(folders: Sequence[Path], case: Case, wire: int) -> Measured:
    """What the journals of a run's islands tell; the first round is left out of the times."""
    rows = [[row for row in read_rows(each, kind="event") if row["event"] == "exchange"] for each in folders]
    if any(len(row["trained"]) != case.count for own in rows for row in own):
        raise RuntimeError(f"an island did not take part in every exchange: see {folders[0].parent}")
    exchanges, step_s, training, elapsed = [], [], 0.0, 0.0
    for each in zip(*(own[1:] for own in rows), strict=True):
        last = min(each, key=lambda row: row["wait_seconds"])
        exchanges.append(last["wait_seconds"] + last["seconds"])
    for own in rows:
        rounds = [(seconds_between(a, b), b["wait_seconds"] + b["seconds"]) for a, b in pairwise(own)]
        step_s.append(mean(whole - spent for whole, spent in rounds) / case.inner)
        training += sum(whole - spent for whole, spent in rounds)
        elapsed += sum(whole for whole, _ in rounds)
    tokens = case.count * case.inner * (len(rows[0]) - 1) * tokens_per_step(folders[0])
    journal = sum(row["bytes_sent"] for own in rows for row in own)
    seconds = elapsed / case.count
    return Measured(step_s, median(exchanges), training / elapsed, wire, journal, tokens / seconds)


def run_data_parallel(count: int, link: Link, islands: Measured, asked: argparse.Namespace, *, name: str) -> float:
    """Runs data parallelism over the same links and prints what it took; returns its tokens per second."""
    logs = asked.out / "data-parallel"
    subprocess.run(["rm", "-rf", str(logs)], check=True)
    logs.mkdir(parents=True)
    out = logs / "run"
    sets = [*common(asked, _DATA_PARALLEL_STEPS), f"run.dir={out}", f"train_batch_size={count}"]
    with ShapedNetwork(count, link=link) as network:
        processes = []
        for rank in range(count):
            place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
            words = [f"{key}={value}" for key, value in place.items()]
            with open_log(logs / f"rank-{rank}.log") as log:
                command = network.command(rank, "env", *words, *headrace("train", asked.config, sets))
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_for(processes, logs)
        wire = sum(network.bytes_sent(host) for host in range(count))
    rows = read_rows(out, kind="step")
    step_s = median(seconds_between(a, b) for a, b in pairwise(rows[3:]))
    sites, gradients = [Island(each, link) for each in islands.step_s], 4.0 * parameters_of(out)
    takes = data_parallel_step_s(sites, gradients, all_reduces=_ALL_REDUCES)
    text = (
        f"{name} data parallelism of {count}: {step_s:.2f} s a step, simulated {takes:.2f} ({takes / step_s - 1:+.0%})"
    )
    print(f"<!-- {text}, {wire / 1e6:.1f} MB on the wire in {len(rows)} steps -->", flush=True)
    return count * tokens_per_step(out) / count / step_s


def arithmetic_s(parameters: int, case: Case) -> float:
    """Seconds of an exchange's arithmetic, when all islands do it at the same time on the cores of this machine."""
    gradient = torch.randn(parameters)
    error = torch.zeros(parameters) if case.compress == "int8" else None
    times = []
    for _ in range(5):
        began = time.process_time()
        mean_over_islands(gradient, Alone(case.count), contributors=range(case.count), error=error)
        times.append(time.process_time() - began)
    return median(times) * max(1.0, case.count / (os.cpu_count() or 1))


def common(asked: argparse.Namespace, steps: int) -> list[str]:
    """What all runs have."""
    fixed = ["engine=torch", "zero_optimization.stage=0", "evaluation.every=null", "evaluation.samples=2"]
    return [*fixed, f"run.steps={steps}", f"run.checkpoint_every={steps}", "scheduler=null", *asked.overrides]


def headrace(verb: str, config: Path, sets: Sequence[str], *options: str) -> list[str]:
    """A command line."""
    words = [word for text in sets for word in ("--set", text)]
    return [sys.executable, "-m", "headrace", verb, "--config", str(config), *words, *options]


def open_log(path: Path) -> Any:
    """A file for a process's output."""
    return path.open("wb")


def wait_for(processes: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    """Waits until all have ended well, and ends all where one has not."""
    deadline = time.monotonic() + _LIMIT_S
    try:
        for process in processes:
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise RuntimeError(f"a process failed: see {out}/*.log")
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()


def seconds_between(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Of two rows of a journal."""
    return (datetime.fromisoformat(after["time"]) - datetime.fromisoformat(before["time"])).total_seconds()


def tokens_per_step(folder: Path) -> int:
    """Of one run's own batch."""
    first, second = read_rows(folder, kind="step")[:2]
    return int(second["tokens"] - first["tokens"])


def parameters_of(folder: Path) -> int:
    """Of the model in a run's newest checkpoint."""
    directory = (folder / "checkpoints/latest").resolve()
    return sum(each.numel for each in read_metadata(directory).tensors if each.key.startswith("weight/"))


if __name__ == "__main__":
    main()
