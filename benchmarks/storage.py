"""Benchmark of object stores with latency: tokens through the cache, and pauses of checkpoints, against local files.

    python -m benchmarks.storage [--latency 10 100] [--steps 40] [--step 1.5] [--rounds 2] [--work DIRECTORY]

An S3 server on this machine (moto) delays every answer by the given milliseconds. The loader (`StepLoader`) reads the
same steps from local files, from the store without a cache, and through a cold cache. A step lasts `--step` seconds, in
which the loop sleeps as a host does while a device computes. Then the same run (`train.py`) writes checkpoints to a
directory, and to the store. The variants alternate. The server shares the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import s3fs

from benchmarks.harness import alternate, make_parser, print_head, print_row, work_folder
from benchmarks.loader import write_tokens
from foundation.remote_directory import CACHE
from foundation.remote_publish import publish
from foundation.section import parse
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


class Reading(NamedTuple):
    """Seconds of a loader: until its first step, waits for steps after the tenth, CPU time of its process per step."""

    first: float
    wait: float
    longest: float
    cpu: float


def main() -> None:
    """Prints both tables in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--latency", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work")
    arguments = parser.parse_args()
    with work_folder(arguments.work) as work:
        tokens = write_tokens(work / "tokens", tokens=40_000_000)
        (work / "prep").mkdir()
        corpus = make_tokens(work / "prep", text_folders())
        print(f"{SAMPLES} samples of {LENGTH} tokens per step of {arguments.step:g} s\n")
        print("Waits for data are of the steps after the tenth.")
        for latency in arguments.latency:
            with store(latency, work / "cache"):
                publish(tokens, "s3://store/tokens")
                print_readings(latency, tokens, work / "spans", arguments)
                print_checkpoints(latency, corpus, work, arguments.rounds)


@contextmanager
def store(latency_ms: float, cache: Path) -> Iterator[None]:
    """Runs an S3 server with latency in a separate process."""
    command = [sys.executable, "-c", SERVER, str(latency_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    variables = {"AWS_ENDPOINT_URL": process.stdout.readline().strip(), CACHE: str(cache)}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with environment(variables | keys):
            s3fs.S3FileSystem.clear_instance_cache()  # they belong to another server
            yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(cache, ignore_errors=True)


def print_readings(latency: float, tokens: Path, spans: Path, arguments: argparse.Namespace) -> None:
    """Prints a row for each way of reading, with medians over the rounds."""
    ways = {
        "local files": partial(read, str(tokens), None, arguments),
        "the store, no cache": partial(read, "s3://store/tokens", None, arguments),
        "the store, through the cache": partial(read, "s3://store/tokens", spans, arguments),
    }
    print()
    print_head("latency, ms", "read", "first step, s", "data wait, ms", "longest, ms", "CPU per step, ms")
    for way, found in alternate(ways, arguments.rounds, warmup=0).items():
        first, *rest = map(median, zip(*found, strict=True))
        print_row(f"{latency:g}", way, f"{first:.2f}", *(f"{1e3 * seconds:.1f}" for seconds in rest))


def read(path: str, spans: Path | None, arguments: argparse.Namespace) -> Reading:
    """Reads the steps, sleeping in each; a cache of spans is cold at the start."""
    mixture = open_mixture(
        parse(DataSection, {"sources": [{"path": path}], "sequence_length": LENGTH}), seed=0, stat_files=False
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
        shutil.rmtree(spans, ignore_errors=True)
    return Reading(waits[0], mean(waits[10:]), max(waits[10:]), (time.process_time() - cpu) / len(waits))


def print_checkpoints(latency: float, tokens: Path, work: Path, rounds: int) -> None:
    """Prints a row for each kind of `run.dir`: a checkpoint's pause, as medians over the rounds."""
    print()
    print_head("latency, ms", "run.dir", "pause per checkpoint, ms", "step, ms", "ratio of the pause")
    ways = {way: partial(train, way == "a URL", tokens, work) for way in ("a directory", "a URL")}
    found = alternate(ways, rounds, warmup=0)
    medians = {way: [median(chain(*each)) for each in zip(*runs, strict=True)] for way, runs in found.items()}
    for way, (pause, step) in medians.items():
        ratio = pause / medians["a directory"][0]
        print_row(f"{latency:g}", way, f"{1e3 * pause:.1f}", f"{1e3 * step:.1f}", f"{ratio:.2f}")


def train(remote: bool, tokens: Path, work: Path) -> tuple[list[float], list[float]]:
    """Runs `train.py`; returns the seconds of each checkpoint's pause, and of each step."""
    name = f"run-{time.monotonic_ns()}"
    config = tiny_config(tokens, Path("unused"), engine="torch", scheduler=None)
    config["run"] |= {"dir": f"s3://store/runs/{name}" if remote else str(work / name)}
    config["run"] |= {"steps": CHECKPOINTS * CHECKPOINT_EVERY, "checkpoint_every": CHECKPOINT_EVERY}
    config["evaluation"] = {"samples": 0}
    config["model"]["config"] |= {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
    path = write_config(work / "c.json", config)
    subprocess.run([sys.executable, *entry_point("train.py", path)], check=True, capture_output=True, cwd=work)
    local = next(Path(os.environ[CACHE], "runs").glob(f"{name}-*")) if remote else work / name
    rows = [json.loads(line) for line in (local / "metrics.jsonl").read_text().splitlines()]
    pauses = [row["blocked_seconds"] for row in rows if row.get("event") == "checkpoint"]
    steps = [row["seconds"] for row in read_rows(local, kind="step")]
    shutil.rmtree(local)
    return pauses[1:], steps[5:]  # the first ones allocate their buffers


if __name__ == "__main__":
    main()
