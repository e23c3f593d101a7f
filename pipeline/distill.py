"""Knowledge distillation from a teacher to a student: `deepspeed pipeline/distill.py --config CONFIG`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headrace.base.cli import guarded, leave
from headrace.base.errors import ConfigError
from pipeline.arguments import add_arguments, parse_arguments, resolve_run
from pipeline.faults.stop import StopSignals
from pipeline.launch import detect

if TYPE_CHECKING:
    import torch

__all__ = ["add_arguments", "main", "run"]


def main() -> int:
    """Entry point."""
    return run(
        parse_arguments(
            "Train a student model by distillation from a frozen teacher. Same loop, engines and config as train.py."
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Distils; returns the exit code."""
    resolved = resolve_run(arguments)
    section = resolved.config.distill
    if section is None:
        remedy = 'add "distill": {"teacher": "out/models/teacher"}, or use pipeline/train.py'
        raise ConfigError("distill", why="the config has no teacher", remedy=remedy)
    config = resolved.config
    bf16, attention, z_loss = config.bf16.enabled, config.model.attn_implementation, config.loss.z_loss
    # torch takes seconds to import, and a refusal should not wait for it
    with StopSignals(announce=detect().rank == 0) as signals:
        from pipeline.compress.distillation import Distillation  # noqa: PLC0415
        from pipeline.run.session import train  # noqa: PLC0415

        def objective(device: torch.device) -> Distillation:
            return Distillation(section, bf16=bf16, attn_implementation=attention, device=device, z_loss=z_loss)

        return train(resolved, objective, signals=signals)


if __name__ == "__main__":
    leave(guarded(main))
