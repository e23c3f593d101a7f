"""Runs in an object store (a real S3 server), copied there or imported: they go on from there, and lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest, write_manifest
from foundation.lease import newest_lease
from foundation.remote_directory import CACHE, manifest_of
from foundation.remote_publish import publish
from foundation.remote_run import fetch_checkpoint, remote_checkpoints, working_directory
from foundation.storage import delete, objects_below
from headrace.commands.app import run as headrace
from pipeline.checkpoint.pins import pinned_steps_in_store
from pipeline.runtime.metrics.journal import read_rows
from tests import warm, warm_python
from tests.conftest import entry_point, launch, losses
from tests.conftest import start as start_to_end
from tests.object_store import Faulty
from tests.run.uploads.killed_runs import config_of, finish, rounds, start
from tests.support import refusal_of, wait_until

URL = "s3://store/runs/a"
STEPS = 25


@pytest.fixture(scope="module")
def local(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a directory of a file system."""
    work = tmp_path_factory.mktemp("local")
    launch("train.py", config_of(tokens, work, work / "run", steps=STEPS, keep_checkpoints=2), processes=2)
    return work / "run"


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    found, out = headrace([str(word) for word in words]), capsys.readouterr()
    assert found == code, out
    return out.out + out.err


@pytest.mark.integration
def test_a_run_that_is_killed_has_the_checkpoints_of_a_local_one_and_is_read_and_goes_on_from_its_url(
    local: Path, tokens: Path, tmp_path: Path, store: Any, faults: Faulty, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tokens, tmp_path, URL, steps=STEPS, keep_in_bucket="all")
    rounds(3, 2, faults=faults, cache=tmp_path / "cache", config=config, url=URL)
    assert finish(config, URL) == losses(local)
    assert not [name for name in store.find("store/runs/a") if "probe" in name]
    shutil.rmtree(tmp_path / "cache")  # from here on, what this host knows is the URL
    assert f"{STEPS} of {STEPS} (100 %)" in (status := printed(capsys, "status", URL, "--once"))
    assert f"newest checkpoint of step {STEPS}" in status
    assert json.loads(printed(capsys, "status", URL, "--json"))["training"] is False
    run_dir, there = working_directory(URL), remote_checkpoints(URL)
    listed = printed(capsys, "checkpoint", "ls", URL)
    assert listed.count("in the object store") == len({each.step for each in there})
    assert "a resume takes this one" in listed
    assert "intact" in printed(capsys, "checkpoint", "verify", URL)
    assert f"step {STEPS}" in printed(capsys, "export", f"{URL}/checkpoints/latest", str(tmp_path / "model"))
    printed(capsys, "report", str(tmp_path / "r.html"), "--run", f"a={URL}")
    kept = [each for each in there if each.step >= STEPS - 5]  # the store may have been slower than the first of them
    assert kept
    for each in kept:
        name = f"checkpoints/step-{each.step:08d}"
        fetch_checkpoint(each.url, run_dir / name)
        assert files_of(run_dir / name) == files_of(local / name)
    shutil.rmtree(tmp_path / "cache")
    changed = (f"run.steps={STEPS + 1}", 'run.allow_change=["run.steps", "scheduler"]', "run.keep_in_bucket=2")
    publish(tokens, "s3://store/tokens")
    said = launch("train.py", config, *changed, "data.sources.0.path=s3://store/tokens")  # on one rank
    assert f"fetching {there[0].url}" in said
    assert f"resuming after step {STEPS}" in said
    assert [each.step for each in remote_checkpoints(URL)] == [STEPS + 1, STEPS]
    printed(capsys, "export", URL, "s3://store/model")  # its tokenizer and its corpus are read where they are now
    recorded = [
        manifest_of(place, kind="model").details["lineage"] for place in (str(tmp_path / "model"), "s3://store/model")
    ]
    assert recorded[0]["corpora"] == recorded[1]["corpora"]
    assert recorded[0]["corpora"][0]["sources"]
    for place in (URL, "s3://store/model", "s3://store/tokens"):
        assert "README.md" in printed(capsys, "card", place, str(tmp_path / "papers"), "--replace")
    assert "to which nothing is added" in printed(capsys, "card", URL, code=2)


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_store_that_fails_stops_no_step_and_at_the_end_the_exit_code_says_so(
    tokens: Path, tmp_path: Path, faults: Faulty
) -> None:
    config = config_of(tokens, tmp_path, URL, steps=STEPS)
    path = json.loads(config.read_text())
    path["watchdog"]["heartbeat_timeout"] = 1.0
    config.write_text(json.dumps(path))
    faults.down_after = "PUT /store/runs/a/checkpoints/*/manifest.json"
    done = start_to_end("train.py", config)
    assert done.returncode == 2, done.stdout
    assert "training goes on, and it is tried again; the newest there is of step " in done.stdout
    assert f"{URL} does not have the last checkpoint" in done.stdout
    rows = read_rows(working_directory(URL), kind="event")
    assert any(row["event"] == "upload_failing" for row in rows)  # perhaps before a second checkpoint waits
    faults.down_after, faults.down = None, False
    said = launch("train.py", config)  # the host has all: it uploads what is left
    assert f"resuming after step {STEPS}" in said
    assert remote_checkpoints(URL)[0].step == STEPS


@pytest.mark.sweep
@pytest.mark.usefixtures("store")
def test_a_second_run_of_the_same_url_is_refused_and_a_stop_by_signal_uploads_first(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tokens, tmp_path, URL, steps=100_000)
    first = start(config)
    try:
        wait_until(lambda: "checkpoint uploaded to" in first.said())
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another-host"))
        refusal = refusal_of(start_to_end("train.py", config))
        assert "another process is writing there" in refusal
        for rank in first.ranks:
            os.kill(warm_python.real_pid(rank.pid), signal.SIGTERM)
        codes = [rank.wait(60) for rank in first.ranks]
        assert 75 in codes, first.said()
        newest = remote_checkpoints(URL)[0].step
        assert f"stopped by SIGTERM after step {newest}" in first.said()
    finally:
        first.kill()


@pytest.mark.usefixtures("store")
@pytest.mark.sweep
def test_nodes_whose_caches_are_not_shared_are_refused_and_leave_no_run(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tokens, tmp_path, URL, steps=STEPS)
    caches = [tmp_path / "node-0", tmp_path / "node-1"]
    run = start(config, caches=caches)
    try:
        assert {rank.wait(300) for rank in run.ranks} == {2}, run.said()
    finally:
        run.kill()
    assert "do not see the file that rank 0 has written there" in run.said()
    assert "set HEADRACE_CACHE to a directory that all hosts share" in run.said()
    assert remote_checkpoints(URL) == []
    launch("train.py", config, "run.steps=10", processes=2)  # the remedy: one cache; nobody has to be waited for
    assert remote_checkpoints(URL)[0].step == 10


@pytest.mark.usefixtures("store")
def test_what_cannot_work_is_refused_before_any_work(tokens: Path, tmp_path: Path, faults: Faulty) -> None:
    def refused(*sets: str) -> str:
        return refusal_of(start_to_end("train.py", config_of(tokens, tmp_path, URL), *sets))

    assert "no-such-bucket" in refused("run.dir=s3://no-such-bucket/run")
    assert "no conditional writes" in refused("run.dir=hf://org/run")
    assert "run.dir is a path" in refused(f"run.dir={tmp_path / 'r'}", "run.keep_in_bucket=3")
    faults.forbidden = "DELETE"
    assert "do not allow writing and deleting there" in refused()
    assert not (tmp_path / "r").exists()


@pytest.mark.integration
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


COPIED, COPIED_STEPS = "s3://store/runs/copied", 9


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3, 6 and 9, and its config, `run.json`."""
    work = tmp_path_factory.mktemp("whole")
    config = config_of(tokens, work, work / "run", steps=COPIED_STEPS, checkpoint_every=3, keep_checkpoints=3)
    launch("train.py", config)
    return work


def run_files(run_dir: Path) -> dict[str, bytes]:
    found = {path.relative_to(run_dir): path for path in run_dir.rglob("*") if path.is_file()}
    hidden = {name for name in found if any(part.startswith(".") for part in name.parts)}
    return {str(name): found[name].read_bytes() for name in found.keys() - hidden}


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_run_is_copied_with_its_checkpoints_there_and_back_and_goes_on_in_both_places(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole / "run", tmp_path / "run", symlinks=True))
    # as of a run that was killed before its last one
    shutil.rmtree(run_dir / "checkpoints" / f"step-{COPIED_STEPS:08d}")
    before = run_files(run_dir)
    counted = [len(data) for name, data in before.items() if not name.endswith("manifest.json")]
    what = f"run, {len(counted)} files, {sum(counted) / 1e9:,.3f} GB"
    assert f"{COPIED}: {what}" in printed(capsys, "copy", run_dir, COPIED)
    assert "exists already" in printed(capsys, "copy", run_dir, COPIED, code=2)
    assert what in printed(capsys, "copy", COPIED, tmp_path / "back")
    assert run_files(tmp_path / "back") == before
    for place in (COPIED, str(tmp_path / "back")):
        said = launch("train.py", whole / "run.json", f"run.dir={place}")
        assert "resuming after step 6" in said
        assert losses(working_directory(place)) == losses(whole / "run")


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_checkpoint_that_is_imported_to_a_url_is_there_and_goes_on_there(
    whole: Path, tmp_path: Path, faults: Faulty, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, "export", whole / "run/checkpoints/step-00000006", tmp_path / "dcp", "--format", "dcp")
    words = ("import", tmp_path / "dcp", COPIED, "--config", whole / "run.json")
    faults.down_after = "PUT /store/runs/copied/checkpoints/*"
    said = printed(capsys, *words, code=2)
    faults.down, faults.down_after = False, None
    assert "manifest.json" not in objects_below(COPIED)
    [remedy] = [line for line in said.splitlines() if "what was made is kept" in line]
    _, source, target = remedy.partition("; headrace ")[2].removesuffix(" uploads it").split()
    assert "which uploads what was made" in printed(capsys, *words, code=2)
    lease = newest_lease(COPIED)
    assert lease is not None
    delete(f"{COPIED}/.lease/{lease.number:08d}")  # it could not be given back: half a minute
    assert f"{COPIED}: run, " in printed(capsys, "copy", source, target)
    shutil.rmtree(os.environ[CACHE])  # from here on, what this host knows is the URL
    said = launch("train.py", whole / "run.json", f"run.dir={COPIED}")
    assert "resuming after step 6" in said
    assert losses(working_directory(COPIED)) == {
        step: losses(whole / "run")[step] for step in range(7, COPIED_STEPS + 1)
    }
    other = f"{COPIED}-2"
    said = printed(capsys, *words[:2], other, *words[3:])
    assert f"uploaded to {other}: " in said
    assert f"output: {other}; it goes on with: headrace train" in said
    assert "resuming after step 6" in launch("train.py", whole / "run.json", f"run.dir={other}")  # nothing is fetched


@pytest.mark.integration
def test_checkpoints_in_a_bucket_are_merged_in_place_and_the_result_is_there(
    whole: Path, tmp_path: Path, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole / "run", tmp_path / "run", symlinks=True))
    printed(capsys, "copy", run_dir, COPIED)
    printed(capsys, "merge", run_dir, "--last", "2", tmp_path / "here")
    out = "s3://store/runs/merged"
    assert f"uploaded to {out}" in printed(capsys, "merge", COPIED, "--last", "2", out)
    assert list(working_directory(COPIED).rglob("*.distcp")) == []  # nothing was copied here
    assert not [name for name in store.find("store/runs/copied") if ".pins" in name]
    [merged] = remote_checkpoints(out)
    (tmp_path / "there/checkpoints").mkdir(parents=True)
    fetch_checkpoint(merged.url, tmp_path / "there/checkpoints/step-00000009")
    assert files_of(tmp_path / "there/checkpoints/step-00000009") == files_of(
        tmp_path / "here/checkpoints/step-00000009"
    )
    assert "exists already" in printed(capsys, "merge", COPIED, "--last", "2", out, code=2)


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_branch_of_a_run_in_a_bucket_copies_its_start_once_and_pins_it_there(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole / "run", tmp_path / "run", symlinks=True))
    printed(capsys, "copy", run_dir, COPIED)
    branch = tmp_path / "branch"
    words = (whole / "run.json", f"run.dir={branch}", f"run.from={COPIED}@6")
    assert "fetching s3://store/runs/copied/checkpoints/step-00000006" in launch("train.py", *words)
    expected = {step: loss for step, loss in losses(whole / "run").items() if step > 6}
    assert losses(branch) == expected
    assert pinned_steps_in_store(COPIED) == {6}
    shutil.rmtree(branch / "checkpoints/step-00000009")  # a kill before the first checkpoint
    manifest = read_manifest(branch, kind="run")
    details = {**manifest.details, "step": 6}
    write_manifest(branch, kind="run", config=manifest.config, parents=manifest.parents, details=details)
    assert "fetching" not in launch("train.py", *words)
    assert losses(branch) == expected
