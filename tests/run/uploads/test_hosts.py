"""A run of several hosts whose directories are not one: it is refused, and told what to share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from foundation.lease import newest_lease
from foundation.remote_directory import CACHE
from tests import warm, warm_python
from tests.conftest import entry_point
from tests.run.uploads.killed_runs import config_of

URL = "s3://store/runs/a"

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("store")
def test_hosts_that_share_no_directory_are_refused_and_told_what_to_share(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tokens, tmp_path, URL)
    words = [warm_python.python(), *entry_point("train.py", config)]
    ranks = [
        subprocess.Popen(
            words, env={**env, CACHE: str(tmp_path / f"host-{number}")}, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        for number, env in enumerate(warm._environments(2))
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert any(f"set {CACHE} to a directory that all hosts share" in text for text in said), said
    assert {rank.returncode for rank in ranks} <= {2, 77}
    lease = newest_lease(URL)
    assert lease is not None
    assert lease.released
