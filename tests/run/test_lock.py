"""The lock of a run's directory, where the directory cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from pipeline.runtime.launch.run_lock import exclusive_run


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    # /proc passes os.access(W_OK) for root, and only the attempt fails
    for run_dir in (Path("/proc/run"), tmp_path / "file" / "run"):
        (tmp_path / "file").touch()
        with (
            pytest.raises(ConfigError, match=r"run.dir = .*\n.*cannot be written.*\n.*choose another run.dir"),
            exclusive_run(run_dir),
        ):
            pass
