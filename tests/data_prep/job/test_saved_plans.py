"""Plans of phases that shares have in common: made once, dropped when the job has changed, and never half written."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.config.corpus import load
from data_prep.job import phases, saved_plans
from data_prep.job.phases import Phase
from foundation.errors import DataError
from tests.data_prep.conftest import config_file, tree
from tests.data_prep.in_process import InProcess, run_job

EVERY_PHASE = {"dedup": {"exact": True, "near": {}, "lines": {}}}
SMALL = {"task_bytes": 1, "shard_tokens": 2000, "heldout_fraction": 0.2}
_counting: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _counting is not None and event in ("open", "os.listdir", "os.scandir") and "tokens.job" in str(arguments[0]):
        _counting.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _audit_hook() -> None:
    sys.addaudithook(_audit)  # cannot be removed: it is idle outside `accesses`


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts calls of `os.stat`, too, which are no audit events."""
    original = os.stat

    def counted(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        if _counting is not None and "tokens.job" in str(path):
            _counting.append(f"stat {path}")
        return original(path, *args, **keywords)

    monkeypatch.setattr(os, "stat", counted)
    yield
    monkeypatch.undo()


def mapped_job(work: Path, documents: int, **fields: Any) -> str:
    """A job of as many map tasks as there are documents, of which all phases but the last have finished."""
    (work / "texts").mkdir(exist_ok=True)
    for i in range(documents):
        words = random.Random(i)
        (work / "texts" / f"{i}.md").write_text(" ".join("".join(words.choices("amill", k=6)) for _ in range(60)))
    config = config_file(work, **(SMALL | fields))
    run_job(config, until="merge")
    return config


def accesses(config: str, phase: str, *, share: tuple[int, int]) -> list[str]:
    """The files of the job that a share opens or lists, and those that it looks up."""
    global _counting  # noqa: PLW0603
    loaded = load(config)
    _counting = found = []
    try:
        phases.run_share(loaded, phase, InProcess(), share=share)  # type: ignore[arg-type]
    finally:
        _counting = None
    return found


@pytest.mark.usefixtures("stats")
@pytest.mark.parametrize("fields", [{}, EVERY_PHASE])
def test_the_files_that_a_share_reads_to_plan_do_not_grow_with_the_tasks_before(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first share of a phase reads them all; shares after it, that have no tasks here, as many for any job."""
    counts: dict[int, dict[str, tuple[int, int]]] = {}
    for documents in (12, 36):
        (work := tmp_path / str(documents)).mkdir()
        monkeypatch.chdir(work)
        config = mapped_job(work, documents, **fields)
        names = [phase.name for phase in phases.phases_of(load(config)) if phase.name != "lines"]
        counts[documents] = {
            name: (len(accesses(config, name, share=(998, 999))), len(accesses(config, name, share=(997, 999))))
            for name in names
        }
    for name, (first, second) in counts[36].items():
        assert second == counts[12][name][1] <= 30, (name, counts)
        if name != "map" or fields:
            assert first >= counts[12][name][0] + 24, "the first share reads what each task has left"


@pytest.fixture
def job(work: Path) -> str:
    """The config of a job that has only to be reduced, in the working directory."""
    return mapped_job(work, 12, dedup={"exact": True})


def share(config: str, phase: str, number: int = 0, of: int = 1) -> int:
    return phases.run_share(load(config), phase, InProcess(), share=(number, of))[0]  # type: ignore[arg-type]


def plans(work: Path) -> set[str]:
    return {path.name.split("-")[0] for path in (work / ".tokens.job/phases").glob("[!.]*.json")}


def test_a_plan_of_a_later_phase_is_dropped_when_an_earlier_phase_has_work(job: str, work: Path) -> None:
    share(job, "pairs")
    share(job, "reduce", 998, 999)
    assert plans(work) == {"pairs", "reduce"}
    share(job, "map", 998, 999)
    assert plans(work) == {"map", "pairs", "reduce"}, "nothing was to be done"
    shutil.rmtree(work / ".tokens.job/map/00003")
    share(job, "map", 2, 12)
    assert plans(work) == {"map", "pairs", "reduce"}, "another share had work"
    share(job, "map", 3, 12)
    assert plans(work) == {"map"}


def test_a_task_that_was_removed_is_noticed_by_a_share_with_a_saved_plan(job: str, work: Path) -> None:
    share(job, "reduce", 998, 999)
    shutil.rmtree(work / ".tokens.job/map/00003")
    with pytest.raises(DataError, match="map tasks have not finished: 3"):
        share(job, "reduce", 998, 999)


@pytest.mark.parametrize("change", ["limit", "version"])
def test_a_plan_of_another_job_is_not_taken(change: str, job: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on unreadable records, which may be changed on the way, is checked when a phase is planned."""
    share(job, "reduce", 998, 999)
    if change == "version":
        monkeypatch.setattr(saved_plans, "__version__", "9")
    else:
        config_file(work, **SMALL, dedup={"exact": True}, max_bad_records=7)
    share(job, "reduce", 998, 999)
    assert len(list((work / ".tokens.job/phases").glob("reduce-*.json"))) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"facts": 1, "inputs": 2}', None])
def test_a_damaged_plan_is_made_again(damage: bytes | None, job: str, work: Path) -> None:
    share(job, "reduce", 998, 999)
    (path,) = (work / ".tokens.job/phases").glob("reduce-*.json")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"0", b"1", 1) if damage is None else damage)
    share(job, "reduce", 998, 999)
    assert path.read_bytes() == whole


def test_a_share_that_is_killed_while_it_writes_the_plan_leaves_nothing_broken(job: str, work: Path) -> None:
    kill = "import os, sys; from pathlib import Path; from data_prep.__main__ import main; replace = Path.replace; "
    kill += "Path.replace = lambda path, to: os.kill(os.getpid(), 9) if 'reduce-' in str(to) else replace(path, to); "
    words = ["phase", "reduce", "--config", job, "--task", "998", "--of", "999"]
    killed = subprocess.run([sys.executable, "-c", kill + "sys.exit(main(sys.argv[1:]))", *words], check=False)
    assert killed.returncode == -9
    assert list((work / ".tokens.job/phases").glob(".reduce-*.partial"))
    assert plans(work) == set()
    began = time.monotonic()
    share(job, "reduce")
    assert time.monotonic() - began < 120, "its lock ended with it"
    assert plans(work) == {"reduce"}
    phases.commit_prepared_job(load(job))
    made = tree(work / "tokens")
    config_file(work, **SMALL, dedup={"exact": True}, output="alone")
    run_job(job)
    assert tree(work / "alone") == made


def test_a_share_does_not_wait_for_ever_for_a_frozen_one(job: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_plans, "_WAIT_S", 0.3)
    (work / ".tokens.job/phases").mkdir(exist_ok=True)
    with (work / ".tokens.job/phases/lock").open("w") as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        assert share(job, "reduce") > 0
    assert plans(work) == {"reduce"}


def test_a_process_that_holds_the_job_alone_makes_its_own_plans(job: str, work: Path) -> None:
    share(job, "reduce", 998, 999)
    run_job(job, until="map")
    assert plans(work) == set()


def test_the_tasks_of_a_saved_plan_are_those_of_a_new_one(work: Path) -> None:
    job = mapped_job(work, 24, **EVERY_PHASE)
    config = load(job)
    prepared = phases.load_prepared_job(config)
    for phase in phases.phases_of(config):
        share(job, phase.name, 998, 999)

        def fail(*_: Any) -> Any:
            raise AssertionError("planned again")

        saved = Phase(phase.name, "", fail, phase.make, phase.writes)
        known = phases.phases_of(config)
        inputs = {earlier.writes for earlier in known[: known.index(phase)]} - {phase.writes}
        facts = saved_plans.saved_facts(
            prepared, saved.name, saved.facts, inputs=[prepared.root / name for name in sorted(inputs)]
        )
        assert list(saved.make(prepared, facts)) == list(phase.tasks(prepared)), phase.name
