"""Islands as real processes with torchft's lighthouse: deaths, late comers, checkpoints, parity, secrets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import EXIT_REQUEUE
from pipeline.runtime.metrics.journal import read_rows
from tests import groups
from tests.conftest import launch, losses
from tests.engines.comparison import EXPERTS
from tests.groups import events
from tests.run.groups.islands.struck import two_islands
from tests.support import refusal_of, wait_until
from tests.warm_python import python

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")


command = partial(groups.command, "islands")
run_islands = partial(groups.run_groups, "islands")


def make_config(tokens: Path, work: Path, *, steps: int, **islands: Any) -> Path:
    """Exchanges every five steps, unless it is told otherwise."""
    section = {"steps": 5, **islands}
    return groups.make_config("islands", tokens, work, run_steps=steps, **section)


def wait_for_exchanges(run_dir: Path, count: int) -> None:
    wait_until(lambda: len(events(run_dir, "exchange")) >= count)


def assert_each_sample_once(rows: list[dict[str, Any]]) -> None:
    """Over the exchanges of one island's journal: what was trained or lost is every sample once."""
    keys = ("trained", "lost", "tail_trained", "tail_lost")
    ranges = sorted(tuple(each) for row in rows for key in keys for each in row.get(key, {}).values())
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges)), ranges


@pytest.mark.sweep  # in CI: one that comes late
def test_an_island_is_killed_and_comes_back_and_both_end_with_the_same_weights(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=1500)
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    sets = ("run.checkpoint_every=500", "evaluation.samples=4")
    with subprocess.Popen(command(config, *sets), stdout=subprocess.PIPE, text=True) as process:
        found: dict[str, int] = {}
        while len(found) < 2:
            match = re.match(r"(island-\d): process (\d+)", process.stdout.readline())
            found |= {match[1]: int(match[2])} if match else {}
        wait_for_exchanges(second, 3)
        os.killpg(found["island-1"], signal.SIGKILL)
        process.stdout.read()
    assert process.returncode == 0
    rows = events(first, "exchange")
    assert_each_sample_once(rows)
    assert [row["round"] for row in rows] == list(range(1, 301))
    assert [list(row["lost"]) for row in rows if row["lost"]] == [["island-1"]]
    [joined] = [row for row in rows if row["healed"]]
    assert joined["healed"] == ["island-1"]
    after = rows[joined["round"]]
    assert list(after["trained"]) == ["island-0", "island-1"]
    groups.assert_equal_weights(first, second)
    # alone, with a newcomer, and once its state has come through; after an exchange that failed on busy cores, too
    new = {row["round"] for row in rows if row["group"] == "new"}
    [killed] = [row["round"] for row in rows if row["lost"]]
    assert new >= {1, killed, joined["round"], joined["round"] + 1}
    assert len(new) < 10


@pytest.mark.integration
def test_an_island_that_comes_late_takes_the_state_of_the_others_and_trains_with_them() -> None:
    with two_islands(seed=7) as islands:
        islands.wait_for_rounds("island-0", 2)
        islands.start("late")
        islands.wait()
        rows = islands.rows("island-0")
        assert_each_sample_once(rows)
        [joined] = [row for row in rows if row["healed"]]
        assert joined["healed"] == ["late"]
        assert list(rows[joined["round"]]["trained"]) == ["island-0", "island-1", "late"]
        groups.assert_equal_weights(islands.work / "island-0", islands.work / "late")


def test_one_island_that_exchanges_every_step_is_an_ordinary_run(tokens: Path, tmp_path: Path) -> None:
    """H = 1, outer SGD with learning rate 1 and no momentum: outer - (outer - inner) rounds once per step."""
    config = make_config(tokens, tmp_path, steps=20, count=1, outer={"lr": 1.0, "momentum": 0.0})
    island = tmp_path / "run/island-0"
    launch("train.py", config, "islands=null", "run.checkpoint_every=10", f"run.dir={tmp_path / 'plain'}")
    # it begins with the checkpoint of an ordinary run, behind its samples
    shutil.copytree(tmp_path / "plain", island)
    for checkpoint in island.glob("checkpoints/step-*"):
        if checkpoint.name != "step-00000010":
            shutil.rmtree(checkpoint)
    run_islands(config, "islands.steps=1", 'run.allow_change=["islands"]')
    ours, plain = losses(island), losses(tmp_path / "plain")
    assert len(events(island, "exchange")) == 10
    assert ours == pytest.approx(plain, rel=2e-5)  # fp32's tolerance in docs/reference/parity.md


@pytest.mark.integration
def test_any_number_of_islands_resumes_a_checkpoint(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=30, start_s=100, compress="int8")
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    run_islands(config, "run.steps=10", "scheduler=null")
    groups.assert_equal_weights(first, second)
    assert any(value.any() for value in groups.weights(first, "outer_momentum").values())
    assert any(value.any() for value in groups.weights(first, "outer_error").values())
    run_islands(config, "run.steps=20", "scheduler=null", "islands.count=1")
    rows = events(first, "exchange")
    assert [list(row["trained"]) for row in rows] == [["island-0", "island-1"]] * 2 + [["island-0"]] * 2
    run_islands(config, "run.steps=30", "scheduler=null")
    rows = events(first, "exchange")
    assert list(rows[-1]["trained"]) == ["island-0", "island-1"]
    assert_each_sample_once(rows)
    assert not any(row["lost"] for row in rows)
    groups.assert_equal_weights(first, second)


@pytest.mark.integration
def test_islands_that_are_stopped_in_the_middle_of_a_round_go_on_with_it(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=200, start_s=100)
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    sets = ("islands.steps=25", "run.checkpoint_every=200", "evaluation.samples=4")
    with subprocess.Popen(command(config, *sets), stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: len(events(second, "exchange")) >= 2, process=process)
        process.terminate()
    assert process.returncode == EXIT_REQUEUE
    run_islands(config, *sets)
    rows = events(first, "exchange")
    assert [list(row["trained"]) for row in rows] == [["island-0", "island-1"]] * 8
    assert_each_sample_once(rows)
    groups.assert_equal_weights(first, second)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("engine", "stage", "shares"),
    [
        ("deepspeed", 3, "null"),
        pytest.param("torch", 2, '"auto"', marks=pytest.mark.sweep),
    ],
)
def test_islands_of_two_processes_exchange_between_equal_ranks(
    engine: str, stage: int, shares: str, tokens: Path, tmp_path: Path
) -> None:
    config = make_config(tokens, tmp_path, steps=10, compress="int8")
    sets = (f"engine={engine}", f"zero_optimization.stage={stage}", f"parallel.shares={shares}")
    run_islands(config, *sets, options=("--nproc", "2"))
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    assert_each_sample_once(events(first, "exchange"))
    groups.assert_equal_weights(first, second)
    assert bool(events(first, "shares")) == (shares != "null")
    verify = [python(), "-m", "headrace", "checkpoint", "verify", str(first)]
    assert subprocess.run(verify, check=False, capture_output=True).returncode == 0
    # of 90,864 fp32 weights, a quarter and the scales: half to the other island and half of the mean back
    assert events(first, "exchange")[0]["bytes_sent"] == pytest.approx(90_864 * (1 + 4 / 256), rel=0.02)


@pytest.mark.integration
def test_islands_with_expert_parallelism_exchange_between_ranks_of_equal_experts(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=10)
    raw = json.loads(config.read_text())
    raw["model"]["config"] |= EXPERTS
    config.write_text(json.dumps(raw))
    run_islands(config, "parallel.ep=2", "zero_optimization.stage=3", options=("--nproc", "2"))
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    assert_each_sample_once(events(first, "exchange"))
    groups.assert_equal_weights(first, second)


@pytest.mark.integration
def test_islands_of_two_processes_exchange_beside_their_steps_and_end_alike(tokens: Path, tmp_path: Path) -> None:
    """A checkpoint after step 8 is beside the second exchange, which begins after step 7."""
    config = make_config(tokens, tmp_path, steps=15, overlap=3, start_s=100)
    run_islands(config, "zero_optimization.stage=2", "run.checkpoint_every=8", options=("--nproc", "2"))
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    rows = events(first, "exchange")
    assert [row["step"] for row in rows] == [5, 8, 15]
    assert ["overlapped_seconds" in row for row in rows] == [True, True, False]
    assert_each_sample_once(rows)
    assert sum(last + 1 - begin for row in rows for begin, last in row["trained"].values()) == 2 * 8 * (2 + 2 + 5)
    groups.assert_equal_weights(first, second)


@pytest.mark.integration
def test_asynchronous_islands_of_two_processes_train_each_sample_once_and_resume(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=30, mode="asynchronous", start_s=100)
    first, second = (tmp_path / "run" / f"island-{number}" for number in range(2))
    for steps in ("20", "30"):
        sets = (f"run.steps={steps}", "scheduler=null", "zero_optimization.stage=2", "run.checkpoint_every=10")
        run_islands(config, *sets, options=("--nproc", "2"))
        groups.assert_equal_weights(first, second)
    rows = [row for each in (first, second) for row in events(each, "exchange")]
    assert_each_sample_once(rows)
    assert sum(last + 1 - begin for row in rows for begin, last in row["trained"].values()) == 30 * 8
    assert not any(row["lost"] for row in rows)
    # a checkpoint is due where a round ends, too: the steps that were done are those that were dealt
    assert sorted(row["step"] for each in (first, second) for row in read_rows(each, kind="step")) == [*range(1, 31)]


@pytest.mark.integration
def test_an_island_with_another_secret_is_refused_and_the_others_go_on(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=1500, count=1)
    secrets = [tmp_path / "right", tmp_path / "wrong"]
    for number, path in enumerate(secrets):
        path.write_text(str(number) * 32)
        path.chmod(0o600)
    sets = (f"islands.secret_file={secrets[0]}", "run.checkpoint_every=1500")
    with subprocess.Popen(command(config, *sets), stdout=subprocess.DEVNULL) as process:
        words = (f"islands.secret_file={secrets[1]}", "islands.name=other", f"run.dir={tmp_path / 'run/other'}")
        other = [word for text in words for word in ("--set", text)]
        other = [python(), "-m", "headrace", "train", "--config", str(config), *other]
        wait_for_exchanges(tmp_path / "run/island-0", 1)  # the first to come is the one whose secret counts
        said = refusal_of(subprocess.run(other, capture_output=True, text=True, timeout=300, check=False))
        assert "island-0 reported at the lighthouse does not verify with the secret of other" in said
        wait_for_exchanges(tmp_path / "run/island-0", len(events(tmp_path / "run/island-0", "exchange")) + 3)
        process.terminate()
    assert process.returncode == EXIT_REQUEUE
    rows = events(tmp_path / "run/island-0", "exchange")
    assert any(row["refused"] for row in rows)
    assert not rows[-1]["refused"]


def test_islands_listen_on_the_loopback_interface_and_need_a_secret_for_another(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=5)
    said = refusal_of(
        subprocess.run(command(config, "islands.bind=0.0.0.0"), capture_output=True, text=True, check=False)
    )
    assert "give islands.secret_file" in said
