"""The control of a distillation: the same run on cross-entropy alone. Without torch.

Data order, seed, steps, model and optimizer are the distillation's; there is no teacher in memory. Only a held-out loss
below the control's shows that the teacher helped, since further training alone also improves the student.
"""

from __future__ import annotations

from pathlib import Path

from foundation.errors import ConfigError
from foundation.remote_run import working_directory
from pipeline.config.sections.run import Config
from pipeline.runtime.metrics.journal import read_rows

SUFFIX = "-control"
"""Suffix of the control's directory, after the name of the distillation's."""


def control_of(config: Config) -> Config:
    """Makes the config of a distillation's control run.

    Raises:
        ConfigError: the config is not a distillation.
    """
    if config.distill is None:
        why = "a control is the run of a distillation without its teacher"
        raise ConfigError("--control", why=why, remedy='add "distill" to the config, or use headrace train')
    run = config.run.model_copy(update={"dir": control_dir(config.run.dir)})
    return config.model_copy(update={"distill": None, "run": run})


def control_dir(run_dir: str) -> str:
    """Returns the directory of the control of the distillation in `run_dir`."""
    return run_dir.rstrip("/") + SUFFIX


def comparison(run_dir: str) -> str | None:
    """Formats the last held-out losses of a distillation and its control in a line; None until both have one.

    Args:
        run_dir: the distillation's directory.
    """
    ends = [_last_evaluation(working_directory(path)) for path in (run_dir, control_dir(run_dir))]
    if None in ends:
        return None
    (step, distilled), (control_step, control) = (end for end in ends if end is not None)
    where = f"after step {step:,}" if step == control_step else f"after steps {step:,} and {control_step:,}"
    difference = distilled - control
    text = f"held-out loss {where}: distilled {distilled:.4f}, control {control:.4f} (difference {difference:+.4f}"
    return text + "; one seed is no evidence: repeat both with other values of run.seed)"


def _last_evaluation(run_dir: Path) -> tuple[int, float] | None:
    rows = read_rows(run_dir, kind="eval")
    return (rows[-1]["step"], rows[-1]["loss"]) if rows else None
