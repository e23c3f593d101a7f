"""Benchmark of object stores behind latency: tokens through the cache, and pauses of checkpoints, against local ones.

    python -m benchmarks.storage [--latency 10 100] [--steps 40] [--step 1.5] [--rounds 2] [--work DIRECTORY]

An S3 server on this machine (moto) answers every request late by the given milliseconds. The loader (`StepLoader`)
reads the same steps from local files, from the store without a cache, and through a cold cache; a step lasts `--step`
seconds, in which the loop sleeps as a host does while a device computes. Then the same run (`train.py`) writes
checkpoints to a directory, and to the store. The ways alternate. The server shares the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median

import s3fs

from benchmarks.loader import write_tokens
from headrace.base.remote_directory import CACHE
from headrace.base.remote_publish import publish
from headrace.base.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import open_mixture
from pipeline.data.read_ahead import ReadAhead
from pipeline.data.span_cache import SpanCache
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import entry_point, make_tokens, text_folders, tiny_config, write_config
from tests.object_store import environment

LENGTH, SAMPLES = 1024, 8
CHECKPOINTS, CHECKPOINT_EVERY = 5, 10
SERVER = """
import os, sys, time
from tests.object_store import s3_server
def between(app):
    def answer(environ, start_response):
        time.sleep(float(sys.argv[1]) / 1e3)
        return app(environ, start_response)
    return answer
with s3_server("store", between=between):
    print(os.environ["AWS_ENDPOINT_URL"], flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Reading:
    """Seconds of one loader: until its first step, waits for those after the tenth, of CPU in its process per step."""

    first: float
    wait: float
    longest: float
    cpu: float


def main() -> None:
    """Prints both tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        work = Path(name)
        tokens = write_tokens(work / "tokens", tokens=40_000_000)
        (work / "prep").mkdir()
        corpus = make_tokens(work / "prep", text_folders())
        print(f"{SAMPLES} samples of {LENGTH} tokens per step of {arguments.step:g} s\n")
        print("Waits for data are of the steps after the tenth.")
        for latency in arguments.latency:
            with store(latency, work / "cache"):
                print("\n| latency, ms | read | first step, s | data wait, ms | longest, ms | CPU per step, ms |")
                print("|---:|---|---:|---:|---:|---:|")
                publish(tokens, "s3://store/tokens")
                for way, found in readings(tokens, work / "spans", arguments).items():
                    first, *rest = (median(getattr(each, field.name) for each in found) for field in fields(Reading))
                    wait, longest, cpu = (f"{1e3 * seconds:.1f}" for seconds in rest)
                    print(f"| {latency:g} | {way} | {first:.2f} | {wait} | {longest} | {cpu} |", flush=True)
                print("\n| latency, ms | run.dir | pause per checkpoint, ms | step, ms | ratio of the pause |")
                print("|---:|---|---:|---:|---:|")
                for line in checkpoints(corpus, work, arguments.rounds):
                    print(f"| {latency:g} | {line} |", flush=True)


@contextmanager
def store(latency_ms: float, cache: Path) -> Iterator[None]:
    """An S3 server with latency, in a process of its own."""
    command = [sys.executable, "-c", SERVER, str(latency_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    variables = {"AWS_ENDPOINT_URL": process.stdout.readline().strip(), CACHE: str(cache)}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with environment(variables | keys):
            s3fs.S3FileSystem.clear_instance_cache()  # of another server
            yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(cache, ignore_errors=True)


def readings(tokens: Path, spans: Path, arguments: argparse.Namespace) -> dict[str, list[Reading]]:
    """What each way of reading took, by round."""
    found: dict[str, list[Reading]] = {}
    for number in range(arguments.rounds):
        for way in ("local files", "the store, no cache", "the store, through the cache"):
            path = str(tokens) if way == "local files" else "s3://store/tokens"
            folder = spans / str(number) if way.endswith("cache") and "through" in way else None
            found.setdefault(way, []).append(read(path, number, folder, arguments))
            shutil.rmtree(spans, ignore_errors=True)
    return found


def read(path: str, seed: int, spans: Path | None, arguments: argparse.Namespace) -> Reading:
    """Reads the steps, and sleeps in each."""
    mixture = open_mixture(
        parse(DataSection, {"sources": [{"path": path}], "sequence_length": LENGTH}), seed=seed, stat_files=False
    )
    if spans is not None:
        mixture.remote.ahead = ReadAhead(SpanCache(spans, limit=10**9), "benchmark")
    batch = BatchSizes(SAMPLES, SAMPLES, 1, 1, LENGTH)
    waits, cpu, begun = [], time.process_time(), time.perf_counter()
    for _ in StepLoader(mixture, batch, dp_rank=0, steps=(1, arguments.steps)):
        waits.append(time.perf_counter() - begun)
        time.sleep(arguments.step)
        begun = time.perf_counter()
    if mixture.remote.ahead is not None:
        mixture.remote.ahead.close()
    return Reading(waits[0], mean(waits[10:]), max(waits[10:]), (time.process_time() - cpu) / len(waits))


def checkpoints(tokens: Path, work: Path, rounds: int) -> list[str]:
    """Pause of checkpoints with a directory and with a URL: rows of the table."""
    pauses: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    for number in range(rounds):
        for way in ("a directory", "a URL"):
            place = f"s3://store/runs/{number}" if way == "a URL" else str(work / f"run-{number}")
            config = tiny_config(tokens, Path("unused"), engine="torch", scheduler=None)
            config["run"] |= {
                "dir": place,
                "steps": CHECKPOINTS * CHECKPOINT_EVERY,
                "checkpoint_every": CHECKPOINT_EVERY,
            }
            config["evaluation"] = {"samples": 0}
            config["model"]["config"] |= {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
            path = write_config(work / "c.json", config)
            subprocess.run([sys.executable, *entry_point("train.py", path)], check=True, capture_output=True, cwd=work)
            local = Path(place) if way == "a directory" else next(Path(os.environ[CACHE], "runs").glob(f"{number}-*"))
            rows = [json.loads(line) for line in (local / "metrics.jsonl").read_text().splitlines()]
            saved = [row["blocked_seconds"] for row in rows if row.get("event") == "checkpoint"]
            pauses.setdefault(way, []).extend(saved[1:])  # the first allocates its buffers
            steps.setdefault(way, []).extend(row["seconds"] for row in read_rows(local, kind="step")[5:])
            shutil.rmtree(local)
    base = median(pauses["a directory"])
    return [
        f"{way} | {1e3 * median(found):.1f} | {1e3 * median(steps[way]):.1f} | {median(found) / base:.2f}"
        for way, found in pauses.items()
    ]


if __name__ == "__main__":
    main()
