"""Runs that are copied to an object store (a real S3 server) and back, or imported there, and go on from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from foundation.lease import newest_lease
from foundation.remote_directory import CACHE
from foundation.remote_run import working_directory
from foundation.storage import delete, objects_below
from headrace.commands.app import run as headrace
from tests.conftest import launch, losses
from tests.object_store import Faulty
from tests.run.uploads.killed_runs import config_of

URL, STEPS = "s3://store/runs/copied", 9


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3, 6 and 9, and its config, `run.json`."""
    work = tmp_path_factory.mktemp("whole")
    config = config_of(tokens, work, work / "run", steps=STEPS, checkpoint_every=3, keep_checkpoints=3)
    launch("train.py", config)
    return work


def command(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    found, printed = headrace([str(word) for word in words]), capsys.readouterr()
    assert found == code, printed
    return printed.out + printed.err


def files_of(run_dir: Path) -> dict[str, bytes]:
    found = {path.relative_to(run_dir): path for path in run_dir.rglob("*") if path.is_file()}
    hidden = {name for name in found if any(part.startswith(".") for part in name.parts)}
    return {str(name): found[name].read_bytes() for name in found.keys() - hidden}


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_run_is_copied_with_its_checkpoints_there_and_back_and_goes_on_in_both_places(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole / "run", tmp_path / "run", symlinks=True))
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")  # as of a run that was killed before its last one
    before = files_of(run_dir)
    counted = [len(data) for name, data in before.items() if not name.endswith("manifest.json")]
    what = f"run, {len(counted)} files, {sum(counted) / 1e9:,.3f} GB"
    assert f"{URL}: {what}" in command(capsys, "copy", run_dir, URL)
    assert "exists already" in command(capsys, "copy", run_dir, URL, code=2)
    assert what in command(capsys, "copy", URL, tmp_path / "back")
    assert files_of(tmp_path / "back") == before
    for place in (URL, str(tmp_path / "back")):
        said = launch("train.py", whole / "run.json", f"run.dir={place}")
        assert "resuming after step 6" in said
        assert losses(working_directory(place)) == losses(whole / "run")


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_checkpoint_that_is_imported_to_a_url_is_there_and_goes_on_there(
    whole: Path, tmp_path: Path, faults: Faulty, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "export", whole / "run/checkpoints/step-00000006", tmp_path / "dcp", "--format", "dcp")
    words = ("import", tmp_path / "dcp", URL, "--config", whole / "run.json")
    faults.down_after = "PUT /store/runs/copied/checkpoints/*"
    said = command(capsys, *words, code=2)
    faults.down, faults.down_after = False, None
    assert "manifest.json" not in objects_below(URL)
    [remedy] = [line for line in said.splitlines() if "what was made is kept" in line]
    _, source, target = remedy.partition("; headrace ")[2].removesuffix(" uploads it").split()
    assert "which uploads what was imported" in command(capsys, *words, code=2)
    lease = newest_lease(URL)
    assert lease is not None
    delete(f"{URL}/.lease/{lease.number:08d}")  # it could not be given back: half a minute
    assert f"{URL}: run, " in command(capsys, "copy", source, target)
    shutil.rmtree(os.environ[CACHE])  # from here on, what this host knows is the URL
    said = launch("train.py", whole / "run.json", f"run.dir={URL}")
    assert "resuming after step 6" in said
    assert losses(working_directory(URL)) == {step: losses(whole / "run")[step] for step in range(7, STEPS + 1)}
    other = f"{URL}-2"
    said = command(capsys, *words[:2], other, *words[3:])
    assert f"uploaded to {other}: " in said
    assert f"output: {other}; it goes on with: headrace train" in said
    assert "resuming after step 6" in launch("train.py", whole / "run.json", f"run.dir={other}")  # nothing is fetched
