"""Small trainings in the layout of a config: shrunk as by `headrace prove`, synthetic tokens, started as by a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from foundation.configfile import ConfigTree
from foundation.errors import TrainingError
from headrace.doctor.check import Context
from headrace.doctor.checks.rank_context import config_of
from pipeline.config.sections.run import Config
from pipeline.plan.proof.command import on_fewest_processes
from pipeline.plan.proof.shrunk_run import SEQUENCE, VOCABULARY, ShrunkRun, shrink_run
from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.rank_process import start_process

TRAIN = ("-m", "pipeline.train")


@dataclass(frozen=True)
class SmallRun:
    """A shrunk run and its data.

    Attributes:
        shrunk: the shrunk run.
        tokens: its tokens directory.
        gpus: whether this machine has a GPU for each of its ranks.
    """

    shrunk: ShrunkRun
    tokens: Path
    gpus: bool

    @property
    def place(self) -> str:
        """Where its ranks compute, in words."""
        return f"{self.shrunk.topology.world_size} {'GPUs' if self.gpus else 'CPU processes'}"

    def config(self, folder: Path, **run: object) -> ConfigTree:
        """The config of a training in a folder; keyword arguments are keys of its section `run`."""
        precision = self.shrunk.precision if self.gpus else "fp32"
        config = self.shrunk.layout("training", precision=precision, tokens=self.tokens).config
        launch = {"timeout": 60.0, "device": "auto" if self.gpus else "cpu"}
        fixed = {**config, "launch": launch, "evaluation": {"samples": 16}}
        return {**fixed, "run": {**config["run"], "dir": str(folder / "run"), **run}}


def small_run(context: Context, *, steps: int, config: Config | None = None) -> SmallRun:
    """Shrinks the config of a check, or another one, and writes its tokens.

    Raises:
        ConfigError: the config is invalid, or its model cannot be shrunk.
    """
    shrunk = shrink_run(on_fewest_processes(config or config_of(context)), steps=steps, work=context.work)
    tokens = context.work / "tokens"
    if not tokens.exists():
        write_tokens(tokens, vocab_size=VOCABULARY, tokens=16_000, longest=2 * SEQUENCE)
    return SmallRun(shrunk, tokens, torch.cuda.device_count() >= shrunk.topology.world_size)


def start(config: ConfigTree, folder: Path, *, processes: int, script: tuple[str, ...] = TRAIN) -> TrainingProcess:
    """Starts `python -m pipeline.train --config F --nproc N`.

    Args:
        config: the run's config.
        folder: folder for the config's file and the output.
        processes: number of ranks.
        script: what follows `python` in the place of the entry point.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # the variables of the launcher that started this process would make it a rank
    environ = {name: value for name, value in os.environ.items() if name not in detect().variables}
    words = [sys.executable, *script, "--config", str(folder / "config.json"), "--nproc", str(processes)]
    return TrainingProcess(start_process(words, environ=environ, output=folder / "output.log"), folder)


@dataclass(frozen=True)
class TrainingProcess:
    """A training's launcher and the folder with its output."""

    process: subprocess.Popen[bytes]
    folder: Path

    def finish(self, within_s: float) -> None:
        """Waits for its end.

        Raises:
            TrainingError: it failed, or does not end in time.
        """
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise TrainingError(f"a training did not end within {within_s:.0f} s: {self.last_line()}") from None
        if code:
            raise TrainingError(f"a training ended with code {code}: {self.last_line()}")

    def last_line(self) -> str:
        """The line of its output that names its error, or its last line."""
        lines = (self.folder / "output.log").read_text(errors="replace").strip().splitlines() or ["no output"]
        return next((line for line in lines if line.startswith("error")), lines[-1])
