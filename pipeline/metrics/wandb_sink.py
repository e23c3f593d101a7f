"""Weights & Biases, when the config enables it. Without a login it records offline, under the run's directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config


class WandbSink:
    """Sends rows to W&B under the run's name; a resumed run goes on in the same W&B run.

    Args:
        config: its `wandb` section is enabled.
        run_dir: where offline records are kept; its name is the run's name.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb  # noqa: PLC0415  takes seconds and threads, only for those who asked for it

        section = config.wandb
        self._run: Any = wandb.init(
            project=section.project or "headrace",
            entity=section.team,
            group=section.group,
            name=run_dir.name,
            id=f"{run_dir.name}-{config.run.seed}",
            resume="allow",
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            mode="online" if _has_login() else "offline",
        )

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Logs a row under its step; evaluation values are prefixed."""
        prefix = "" if kind == "step" else f"{kind}/"
        numbers = {prefix + key: value for key, value in values.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Finishes the W&B run."""
        self._run.finish()


def _has_login() -> bool:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] == "online"
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text()
