"""TensorBoard sink: metrics as event files, when the config enables them. `tensorboard --logdir DIR` shows them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.sections.deepspeed import TensorBoardSection
from pipeline.runtime.metrics.sinks import OneWarning
from pipeline.runtime.metrics.tags import OVERVIEW, tagged

_STARTS = ("started", "resumed", "rollback")
"""Events after which steps begin; later steps that were logged before belong to an abandoned part of the run."""


def check_tensorboard(section: TensorBoardSection) -> None:
    """Refuses a config that enables TensorBoard where the package is missing.

    Raises:
        ConfigError: the package is missing; the error names the pip command.
    """
    if section.enabled and find_spec("tensorboard") is None:
        remedy = "pip install tensorboard, or set tensorboard.enabled to false"
        raise ConfigError("tensorboard.enabled", True, why="the package tensorboard is not installed", remedy=remedy)


def log_dir(section: TensorBoardSection, *, run_dir: str) -> Path:
    """Returns the event files' directory: output_path/job_name, as in DeepSpeed; by default in the run's directory."""
    path = Path(run_dir)
    return Path(section.output_path or path / "tensorboard") / (section.job_name or path.name)


class TensorBoardSink:
    """Writes rows as scalars under grouped tags (`tags.py`), as `loss/train`; no events.

    A resumed run, or one after a rollback, continues in the same directory: TensorBoard then hides values logged
    earlier for later steps. A failure to write gives one warning: training continues, and metrics.jsonl has all rows.

    Args:
        section: the config's `tensorboard`.
        run_dir: the config's `run.dir`.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, section: TensorBoardSection, *, run_dir: str) -> None:
        check_tensorboard(section)
        self._log_dir = log_dir(section, run_dir=run_dir)
        self._writer: Any = None
        self._try = OneWarning(f"TensorBoard event files in {self._log_dir} cannot be written")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Logs the numbers of a row at its step, and hands them to the operating system at once."""
        if kind == "event":
            if values.get("event") in _STARTS:
                self._try(lambda: self._open(step))
            return
        self._try(lambda: self._log(tagged(kind, values), step))

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._try(self._writer.close)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  takes a second, only if enabled

        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(self._log_dir), purge_step=step + 1)
        self._writer.add_custom_scalars(OVERVIEW)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        if self._writer is None:
            self._open(step - 1)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
