"""Rotation of this rank's log file, if it has its own."""

from __future__ import annotations

from pipeline.run.hooks.hook import Hook, HookContext
from pipeline.runtime.launch.log_file import rotate_log


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    return LogRotation()


class LogRotation(Hook):
    """Rotates the log between steps: a run of months must not fill a disk."""

    def after_step(self, step: int) -> None:
        """Rotates the log if it has become too large."""
        rotate_log()
