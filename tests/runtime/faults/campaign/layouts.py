"""The training runs of the campaign: tiny, on both engines, in several layouts, with several launchers."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.runtime.launch.group import free_port
from tests.conftest import ROOT, tiny_config

STEPS = 90
SAVE_EVERY = 4
KEEP = 3
EVALUATE_EVERY = 6
SILENT_S = 6.0
"""The heartbeat timeout."""
RENDEZVOUS_S = 30.0
"""Timeout of the rendezvous."""
TRAIN = ROOT / "pipeline/train.py"
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_XDIST_WORKER")


@dataclass(frozen=True)
class Layout:
    """A way to train the model."""

    name: str
    fields: dict[str, Any] = field(hash=False)
    processes: int = 2


LAYOUTS = (
    Layout("torch, one process", {"engine": "torch", "zero_optimization": {"stage": 0}}, processes=1),
    Layout("torch FSDP2, dp 2", {"engine": "torch", "zero_optimization": {"stage": 3}}),
    Layout("torch DDP, dp 2", {"engine": "torch", "zero_optimization": {"stage": 0}}),
    Layout("torch, pp 2", {"engine": "torch", "zero_optimization": {"stage": 0}, "parallel": {"pp": 2}}),
    Layout("torch, tp 2", {"engine": "torch", "zero_optimization": {"stage": 0}, "parallel": {"tp": 2}}),
    Layout("DeepSpeed ZeRO-1, dp 2", {"zero_optimization": {"stage": 1}}),
    Layout("DeepSpeed ZeRO-3, dp 2", {"zero_optimization": {"stage": 3}}),
    Layout("DeepSpeed, pp 2", {"zero_optimization": {"stage": 0}, "parallel": {"pp": 2}}),
)


def config_of(layout: Layout, tokens: Path, run_dir: Path) -> dict[str, Any]:
    """The config of a run with enough steps, checkpoints and evaluations for a random moment to hit each of them."""
    steps = {"steps": STEPS, "seed": 7, "checkpoint_every": SAVE_EVERY, "keep_checkpoints": KEEP}
    fields: dict[str, Any] = {
        "run": {"dir": str(run_dir), **steps},
        "evaluation": {"samples": 64, "every": EVALUATE_EVERY},
        "watchdog": {"heartbeat_timeout": SILENT_S, "hang_timeout": 60.0},
        "launch": {"timeout": RENDEZVOUS_S},
        "stragglers": {"every": 25},
        **layout.fields,
    }
    return tiny_config(tokens, run_dir, **fields)


def command_of(launcher: str, layout: Layout, config: Path) -> list[str]:
    arguments = [str(TRAIN), "--config", str(config)]
    processes = str(layout.processes)
    match launcher:
        case "torchrun":
            starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            return [*starter, *arguments]
        case "deepspeed":
            script = str(Path(sys.executable).parent / "deepspeed")
            return [script, "--num_accelerators", processes, "--master_port", str(free_port()), *arguments]
        case _:
            several = ["--nproc", processes] if layout.processes > 1 else []
            return [sys.executable, *arguments, *several]


def environment(work: Path) -> dict[str, str]:
    """The environment of every start: this process's own, without a launcher's variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(work / "tmp"), "PATH": bin_first}
    return {**inherited, **own}


def write(config: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(config))
    return path
