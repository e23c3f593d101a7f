"""A text file with the newest numbers of a run, in Prometheus' text format, when the config names one.

The node exporter's textfile collector reads it (`--collector.textfile.directory`). Rank 0 writes the file when a row
comes, at most every five seconds. A process that is killed leaves `headrace_running` at 1 and its last times: by these
an alert finds a run that stands still (examples/prometheus/alerts.yml).

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.directory import write_text
from pipeline.runtime.goodput.account import read_goodput
from pipeline.runtime.metrics.sinks import HELD_OUT, OneWarning

_EVERY_S, _GOODPUT_S = 5.0, 60.0
"""Shortest times between two writes of the file, and between two computations of the goodput, in seconds."""
_OF_STEP = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "data_wait_seconds", "tokens")
METRICS = {
    "running": "1 while a process trains the run; 0 once it has ended by itself",
    "heartbeat_timestamp_seconds": "when the run last reported anything: a step, an evaluation, a checkpoint",
    "step": "the last finished optimizer step",
    "steps": "length of the run in optimizer steps",
    "loss": "training loss of the last step, in nats per token",
    "held_out_loss": "held-out loss of the last evaluation, in nats per token",
    "lr": "learning rate of the last step",
    "grad_norm": "gradient norm of the last step, before clipping",
    "tokens_per_second": "tokens per second over all ranks, in the last step",
    "mfu": "model FLOPs utilization of the last step, from 0 to 1",
    "data_wait_seconds": "seconds of the last step that rank 0 waited for its batch",
    "tokens": "tokens trained so far",
    "goodput": "time of productive steps by wall clock of all attempts, from 0 to 1",
}
"""Name of each gauge, without the prefix `headrace_` -> its help text."""


class PrometheusFile:
    """Writes the file. A failure gives one warning, and training continues.

    Args:
        path: the file.
        run_dir: the run's directory, which becomes the label `run`.
        steps: length of the run in steps.
    """

    def __init__(self, path: Path, run_dir: Path, *, steps: int) -> None:
        self._path, self._run_dir = path, run_dir
        self._values: dict[str, float] = {"running": 1, "steps": steps}
        self._written = self._computed = float("-inf")
        self._try = OneWarning(f"{path} cannot be written")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Takes the numbers of a row."""
        self._values["heartbeat_timestamp_seconds"] = time.time()
        if kind == "step":
            self._values |= {"step": step} | {name: values[name] for name in _OF_STEP if name in values}
        elif kind == HELD_OUT:
            self._values["held_out_loss"] = values["loss"]
        if kind == "event" or time.monotonic() >= self._written + _EVERY_S:
            self._write()

    def close(self) -> None:
        """Writes that the run has ended."""
        self._values["running"] = 0
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._written >= self._computed + _GOODPUT_S or not self._values["running"]:
            with suppress(OSError, ValueError, TypeError, KeyError):  # as at the end of an attempt
                if (goodput := read_goodput(self._run_dir, training=True)) is not None:
                    self._values["goodput"] = goodput.share
            self._computed = self._written
        self._try(lambda: write_text(self._path, self._text()))

    def _text(self) -> str:
        run = str(self._run_dir).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines: list[str] = []
        for name, text in METRICS.items():
            if name in self._values:
                full = f"headrace_{name}"
                value = f'{full}{{run="{run}"}} {float(self._values[name])!r}'.replace(" nan", " NaN")
                lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge", value]
        return "\n".join(lines) + "\n"
