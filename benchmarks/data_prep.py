"""Throughput from jsonl to finished shards, compared with other tools: same corpus, same tokenizer, start-up included.

    python -m benchmarks.data_prep corpus.jsonl tokenizer/ [--megatron CLONE] [--peers-python PYTHON] [--only NAME ...]

Every tool runs in a new process; its child processes are included. Measured are wall and CPU seconds, the peak of its
processes' total resident memory, and MB (10^6 bytes of text) per second and per CPU second. "engine" is fastokens
alone, on texts in memory, in one thread.

The other tools run with `--peers-python`, an interpreter with datatrove, datasets, gigatoken and Megatron-LM's imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson
import psutil

from benchmarks.harness import alternate, make_parser, print_head, print_row, work_folder

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.05


class Result(NamedTuple):
    """The measurements of one tool; tokens: number of tokens written, or None if they are not counted."""

    wall_s: float
    cpu_s: float
    memory_mb: float
    tokens: int | None


def main() -> None:
    """Runs the tools and prints a table."""
    args = _arguments()
    text_mb = sum(len(orjson.loads(line)["text"].encode()) for line in args.corpus.open("rb")) / 1e6
    print(f"{args.corpus}: {text_mb:,.1f} MB of text", flush=True)
    with work_folder() as work:
        args.halves = work / "halves"
        _cut_in_two(args.corpus, args.halves)
        tools = {name: partial(_run, name, command, count, work / "run") for name, command, count in _tools(args)}
        chosen = {name: tool for name, tool in tools.items() if not args.only or name in args.only}
        found = alternate(chosen, args.repeats, warmup=0)
    print_head("tool", "wall s", "CPU s", "MB/s", "MB/CPU s", "memory MB", "tokens")
    for name, results in found.items():
        best = min((each for each in results if each is not None), default=None)
        if best is None:
            print_row(name, "did not run", *[""] * 5)
            continue
        speeds = (text_mb / best.wall_s, text_mb / best.cpu_s)
        tokens = "" if best.tokens is None else f"{best.tokens:,}"
        figures = (f"{each:.1f}" for each in speeds)
        print_row(name, f"{best.wall_s:.2f}", f"{best.cpu_s:.2f}", *figures, f"{best.memory_mb:,.0f}", tokens)


def _cut_in_two(corpus: Path, folder: Path) -> None:
    """Cuts the corpus in two files for datatrove, which works file by file."""
    folder.mkdir()
    lines = corpus.open("rb").readlines()
    for i, part in enumerate((lines[: len(lines) // 2], lines[len(lines) // 2 :])):
        (folder / f"{i}.jsonl").write_bytes(b"".join(part))


Tool = tuple[str, list[str], Callable[[Path], int | None]]
"""Name, command, and a function that counts the tokens in its working directory."""


def _tools(args: argparse.Namespace) -> list[Tool]:
    peers, corpus, tokenizer = args.peers_python, str(args.corpus), str(args.tokenizer)
    own = [sys.executable, "-m", "benchmarks.data_prep_peers"]
    other = [peers, str(Path(__file__).with_name("data_prep_peers.py"))]
    found: list[Tool] = [("engine, one thread", [*own, "engine", corpus, tokenizer], _none)]
    for workers in (1, 2):
        config = {"output": "out", "sources": [{"path": corpus}], "tokenizer": {"path": tokenizer}}
        job = ["-m", "data_prep", "--config", "CONFIG", "--workers", str(workers)]
        found.append((f"headrace, {workers} workers", [sys.executable, *job, json.dumps(config)], _our_tokens))
    if args.megatron is not None:
        given = ["--input", corpus, "--output-prefix", "out", "--tokenizer-type", "HuggingFaceTokenizer"]
        given += ["--tokenizer-model", tokenizer, "--tokenizer-hf-no-include-special-tokens", "--append-eod"]
        fast, classic = (f"{args.megatron}/tools/{name}.py" for name in ("preprocess_data_fast", "preprocess_data"))
        found.append(("Megatron, fast", [*other, "run", fast, *given, "--use-gigatoken"], _megatron_tokens))
        found.append(("Megatron, 2 workers", [*other, "run", classic, *given, "--workers", "2"], _megatron_tokens))
    found.append(("datatrove, 2 workers", [*other, "datatrove", str(args.halves), tokenizer], _none))
    found.append(("datasets.map, 2 workers", [*other, "datasets", corpus, tokenizer], _none))
    return found


def _run(name: str, command: Sequence[str], count: Callable[[Path], int | None], work: Path) -> Result | None:
    work.mkdir()
    words = list(command)
    if "CONFIG" in words:
        (work / "corpus.json").write_text(words.pop())
        words[words.index("CONFIG")] = "corpus.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process compiles uncompiled modules again
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT)
        monitor = _ResourceMonitor(process.pid)
        monitor.start()
        code = process.wait()
    wall = time.perf_counter() - began
    monitor.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if code != 0:
        print(f"{name}: {(work / 'log').read_text(errors='replace')[-600:]}", file=sys.stderr)
    result = None if code else Result(wall, max(cpu_s, monitor.cpu_s), monitor.memory_mb, count(work))
    shutil.rmtree(work)
    return result


class _ResourceMonitor(threading.Thread):
    """Measures the memory and CPU time of a process and its descendants until it has ended."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._seconds = pid, dict[int, float]()
        self.memory_mb = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes at the last measurement, including children that are never waited for."""
        return sum(self._seconds.values())

    def run(self) -> None:
        try:
            root = psutil.Process(self._pid)
            while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
                self._measure([root, *root.children(recursive=True)])
                time.sleep(_POLL_S)
        except psutil.NoSuchProcess:
            pass

    def _measure(self, processes: Sequence[psutil.Process]) -> None:
        memory = 0
        for process in processes:
            try:
                times = process.cpu_times()
                self._seconds[process.pid] = times.user + times.system
                memory += process.memory_info().rss
            except psutil.Error:
                continue
        self.memory_mb = max(self.memory_mb, memory / 1e6)


def _our_tokens(work: Path) -> int | None:
    manifest = json.loads((work / "out" / "manifest.json").read_text())
    return sum(split["tokens"] for split in manifest["details"]["splits"].values())


def _megatron_tokens(work: Path) -> int | None:
    return (work / "out_text_document.bin").stat().st_size // 2


def _none(_work: Path) -> int | None:
    return None


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("corpus", type=Path, help='a plain jsonl file with a "text" in each line')
    parser.add_argument("tokenizer", type=Path, help="a Hugging Face folder with fewer than 65,500 entries")
    parser.add_argument("--megatron", type=Path, help="a clone of Megatron-LM")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter for the other tools")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many runs is shown")
    parser.add_argument("--only", nargs="+", help="names of tools")
    args = parser.parse_args()
    args.corpus, args.tokenizer = args.corpus.resolve(), args.tokenizer.resolve()
    return args


if __name__ == "__main__":
    main()
