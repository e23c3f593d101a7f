"""Weights & Biases, when the config enables it. Without a login it records offline, under the run's directory."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config

STEP = "train_step"
"""What W&B draws everything over. Its own step only grows: rows under an earlier one, after going back or of a
checkpoint that has been written meanwhile, would be dropped."""


class WandbSink:
    """Sends rows to W&B under the run's name; a resumed run goes on in the same W&B run.

    Whatever fails later is a warning, once: training goes on without W&B.

    Args:
        config: its `wandb` section is enabled.
        run_dir: where offline records are kept; its name is the run's name.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb  # noqa: PLC0415  takes seconds and threads, only for those who asked for it

        section = config.wandb
        settings: dict[str, Any] = {
            "project": section.project or "headrace",
            "entity": section.team,
            "group": section.group,
            "name": run_dir.name,
            "id": _own_id(run_dir),
            "resume": "allow",
            "dir": str(run_dir),
            "config": config.model_dump(mode="json"),
        }
        # WANDB_MODE is wandb's own word, and wins
        mode: Any = None if "WANDB_MODE" in os.environ else "online" if wandb.login(prompt=False) else "offline"
        self._run: Any
        try:
            self._run = wandb.init(**settings, mode=mode)
        except wandb.errors.Error as error:
            print(f"warning: W&B does not answer ({error}); recording offline, under {run_dir}", file=sys.stderr)
            self._run = wandb.init(**settings, mode="offline")
        self._warned = False
        self._try(lambda: self._run.define_metric(STEP))
        self._try(lambda: self._run.define_metric("*", step_metric=STEP))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Logs a row with its step; evaluation values are prefixed."""
        prefix = "" if kind == "step" else f"{kind}/"
        numbers = {prefix + key: value for key, value in values.items() if isinstance(value, int | float)}
        self._try(lambda: self._run.log({STEP: step, **numbers}))

    def close(self) -> None:
        """Finishes the W&B run."""
        self._try(self._run.finish)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # its own errors, and those of the connection to its process
            if not self._warned:
                told = f"W&B does not answer ({error!r}): rows are in metrics.jsonl only"
                print(f"warning: {told}", file=sys.stderr, flush=True)
            self._warned = True


def _own_id(run_dir: Path) -> str:
    """A random id, kept in the run's directory: two runs of one name are two runs, and a resumed one is the same."""
    path = run_dir / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
