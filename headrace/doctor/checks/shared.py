"""What the checks on ranks and of trainings share: the config, this rank's surroundings, small trainings, findings.

A small training has the layout of the config, shrunk as by `headrace prove`, and synthetic tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.configfile import ConfigTree
from foundation.errors import TrainingError
from foundation.section import parse
from headrace.doctor.check import Context, Finding
from pipeline.config.load import load_config
from pipeline.config.sections.run import Config
from pipeline.plan.proof.command import on_fewest_processes
from pipeline.plan.proof.shrunk_run import SEQUENCE, VOCABULARY, ShrunkRun, shrink_run
from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.rank_process import start_process
from pipeline.runtime.launch.rendezvous import Rendezvous
from pipeline.runtime.machines.known import machine_of_device
from pipeline.runtime.machines.machine import Machine

LAYOUTS: ConfigTree = json.loads(Path(__file__).with_name("layouts.json").read_text())
"""`own`: the config of a check without `--config`, a small Llama with fully sharded data parallelism; `layouts`: name
-> keys in which another layout differs from it."""
TRAIN = ("-m", "pipeline.train")


def config_of(context: Context) -> Config:
    """Reads the config that is checked.

    Raises:
        ConfigError: the config is invalid.
    """
    return load_config(context.config, context.overrides) if context.config else parse(Config, LAYOUTS["own"])


def judged(
    passed: bool, text: str, meaning: str, remedy: str, figures: Mapping[str, Any] | None = None, where: str = ""
) -> Finding:
    """The finding of a comparison; meaning, remedy and place are those of a failure."""
    found = Finding(True, text, figures=figures or {})
    return found if passed else replace(found, passed=False, meaning=meaning, remedy=remedy, where=where)


def device_here() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def machine_here() -> Machine | None:
    """The known machine of this rank's GPU; None for a CPU and for an unknown GPU."""
    return machine_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def rendezvous_here(context: Context) -> Rendezvous:
    """The rendezvous of the ranks of this check, over the store of the default process group."""
    rank, default = dist.get_rank(), dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"doctor/{context.work}", default.clone())  # type: ignore[attr-defined]  # torch has no type
    store.set(f"host/{rank}", os.uname().nodename)
    return Rendezvous(rank, dist.get_world_size(), store, context.limit_s / 3, store.get("host/0").decode())


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in their order. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


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
    def ranks(self) -> int:
        """Number of ranks."""
        return self.shrunk.topology.world_size

    @property
    def precision(self) -> str:
        """The config's precision on GPUs, fp32 on CPUs."""
        return self.shrunk.precision if self.gpus else "fp32"

    def __str__(self) -> str:
        return f"{self.shrunk.topology} on {'GPUs' if self.gpus else 'CPU processes'}"

    def config(self, folder: Path, **run: object) -> ConfigTree:
        """The config of a training in a folder; keyword arguments are keys of its section `run`."""
        config = self.shrunk.layout("training", precision=self.precision, tokens=self.tokens).config
        launch = {"timeout": 60.0, "device": "auto" if self.gpus else "cpu"}
        run = {**config["run"], "dir": str(folder / "run"), **run}
        return {**config, "launch": launch, "evaluation": {"samples": 16}, "run": run}


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


def start(config: ConfigTree, folder: Path, *, ranks: int, script: tuple[str, ...] = TRAIN) -> subprocess.Popen[bytes]:
    """Starts `python -m pipeline.train --config F --nproc N`, or another script, with its output in `output.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # the variables of the launcher that started this process would make it a rank
    environ = {name: value for name, value in os.environ.items() if name not in detect().variables}
    words = [sys.executable, *script, "--config", str(folder / "config.json"), "--nproc", str(ranks)]
    return start_process(words, environ=environ, output=folder / "output.log")


def finish(training: subprocess.Popen[bytes], folder: Path, *, within_s: float) -> None:
    """Waits for the end of a training.

    Raises:
        TrainingError: it failed, or does not end in time.
    """
    try:
        end = training.wait(within_s) and f"ended with code {training.returncode}"
    except subprocess.TimeoutExpired:
        training.kill()
        end = f"did not end within {within_s:.0f} s"
    if end:
        raise TrainingError(f"a training {end}: {last_line(folder)}")


def last_line(folder: Path) -> str:
    """The line of a training's output that names its error, or its last line."""
    lines = (folder / "output.log").read_text(errors="replace").strip().splitlines() or ["no output"]
    return next((line for line in lines if line.startswith("error")), lines[-1])
