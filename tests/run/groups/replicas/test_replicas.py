"""Replicas as real processes with torchft's lighthouse: one curve, a death in the middle of a step, a late comer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.metrics.journal import read_rows
from tests import groups
from tests.conftest import launch, losses
from tests.engines.comparison import EXPERTS
from tests.groups import events
from tests.support import last_step, wait_until
from tests.warm_python import python

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")

FP32 = 2e-5
"""fp32's tolerance in docs/reference/parity.md."""


command = partial(groups.command, "replicas")
run_replicas = partial(groups.run_groups, "replicas")


def make_config(tokens: Path, work: Path, *, steps: int, **replicas: Any) -> Path:
    return groups.make_config("replicas", tokens, work, run_steps=steps, **replicas)


@pytest.mark.integration
def test_two_replicas_and_then_one_follow_the_loss_of_one_plain_process(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=10, start_s=100)
    run_replicas(config, "run.steps=5", "scheduler=null")
    first, second = (tmp_path / "run" / f"replica-{number}" for number in range(2))
    assert losses(first) == losses(second)
    groups.assert_equal_weights(first, second)
    run_replicas(config, "replicas.count=1", "scheduler=null")
    launch("train.py", config, "replicas=null", "scheduler=null", f"run.dir={tmp_path / 'plain'}")
    assert losses(first) == pytest.approx(losses(tmp_path / "plain"), rel=FP32)
    divisions = [(row["step"], row["parts"]) for row in events(first, "quorum")]
    assert divisions == [(1, {"replica-0": [[0, 4]], "replica-1": [[4, 8]]}), (6, {"replica-0": [[0, 8]]})]


def replica(
    config: Path, number: int, *disturbance: str, sets: Sequence[str] = (), processes: int = 1
) -> subprocess.Popen[bytes]:
    run_dir = config.parent / "run" / f"replica-{number}"
    run_dir.parent.mkdir(exist_ok=True)
    every = [*sets, f"run.dir={run_dir}", f"replicas.name=replica-{number}"]
    overrides = [word for text in every for word in ("--set", text)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    words = [*torchrun, "-m", "tests.run.groups.replicas.disturbed", *disturbance, "--config", str(config), *overrides]
    with run_dir.with_suffix(".log").open("ab") as output:
        return subprocess.Popen([python(), *words], stdout=output, stderr=subprocess.STDOUT)


def wait_for_opening_lines(log: Path, *, starts: int) -> None:
    """They come right before a replica asks for its first quorum."""
    wait_until(lambda: log.read_text().count("bytes per parameter") >= starts, said=log.read_text)


def samples_by_step(run_dir: Path) -> dict[int, list[int]]:
    """Step -> indices of the samples whose gradients are in the update, from the journal of one replica."""
    division: dict[str, list[list[int]]] = {}
    found: dict[int, list[int]] = {}
    rows = read_rows(run_dir)
    for step in sorted(losses(run_dir)):
        here = [row for row in rows if row["step"] == step and row["kind"] == "event"]
        division = next((row["parts"] for row in here if row["event"] == "quorum"), division)
        ranges = division
        for row in here:
            if row["event"] == "redealt":
                names = row["replicas"]
                ranges = {name: [*ranges.get(name, []), *row["parts"].get(name, [])] for name in names}
        found[step] = sorted(n for part in ranges.values() for first, end in part for n in range(first, end))
    return found


@pytest.mark.integration
def test_a_replica_killed_within_a_step_comes_back_and_the_curve_is_the_same(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=50, start_s=100)
    first, second = (tmp_path / "run" / f"replica-{number}" for number in range(2))
    address = json.loads(config.read_text())["replicas"]["lighthouse"]
    joins = tmp_path / "replica-1 joins"
    with lighthouse(address), replica(config, 0, "--hold", "8", str(joins)) as survivor:
        with replica(config, 1, "--die", "6") as killed:
            assert killed.wait(200) == -signal.SIGKILL
        assert list(losses(second)) == [1, 2, 3, 4, 5]
        launch("train.py", config, "replicas=null", f"run.dir={tmp_path / 'plain'}")
        with replica(config, 1) as again:
            wait_for_opening_lines(second.with_suffix(".log"), starts=2)
            joins.touch()
            assert again.wait(200) == 0, second.with_suffix(".log").read_text()[-3000:]
        assert survivor.wait(200) == 0, first.with_suffix(".log").read_text()[-3000:]
    assert losses(first) == pytest.approx(losses(tmp_path / "plain"), rel=FP32)
    [redealt] = events(first, "redealt")
    assert (redealt["step"], redealt["parts"]) == (6, {"replica-0": [[4, 8]]})
    assert set(map(tuple, samples_by_step(first).values())) == {tuple(range(8))}
    # one that is back before the survivor forms a group without it has not left
    [joined] = [row for row in events(first, "quorum") if row["healed"]]
    assert (joined["healed"], joined["parts"]) == (["replica-1"], {"replica-0": [[0, 4]], "replica-1": [[4, 8]]})
    later = {step: loss for step, loss in losses(second).items() if step >= joined["step"]}
    assert later == {step: loss for step, loss in losses(first).items() if step >= joined["step"]}
    groups.assert_equal_weights(first, second)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "layout",
    [
        ("zero_optimization.stage=0",),
        ("zero_optimization.stage=2",),
        ("zero_optimization.stage=3",),
        ("parallel.tp=2",),
        ("parallel.cp=2", "zero_optimization.stage=2"),
        ("parallel.pp=2", "zero_optimization.stage=2"),
        ("parallel.pp=2", "zero_optimization.stage=3"),
        ("parallel.ep=2", *(f"model.config.{key}={value}" for key, value in EXPERTS.items())),
    ],
)
def test_in_every_layout_others_run_what_the_dead_left(layout: tuple[str, ...], tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=10, start_s=200, timeout_s=60)
    address = json.loads(config.read_text())["replicas"]["lighthouse"]
    first = tmp_path / "run/replica-0"
    with (
        lighthouse(address),
        replica(config, 0, sets=layout, processes=2) as survivor,
        replica(config, 1, "--die", "4", sets=layout, processes=2),
    ):
        assert survivor.wait(300) == 0, first.with_suffix(".log").read_text()[-3000:]
    assert [row["step"] for row in events(first, "redealt")] == [4]
    model = [each for each in layout if each.startswith("model.")]
    launch("train.py", config, "replicas=null", *model, f"run.dir={tmp_path / 'plain'}")
    assert losses(first) == pytest.approx(losses(tmp_path / "plain"), rel=FP32)


@pytest.mark.sweep
def test_a_replica_that_is_paused_for_many_steps_is_left_behind_and_started_again(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=1500, start_s=100, timeout_s=5)
    first, second = (tmp_path / "run" / f"replica-{number}" for number in range(2))
    # SIGSTOP has to reach the replica itself
    words = [sys.executable, *command(config, "run.checkpoint_every=500", "scheduler=null")[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        found: dict[str, int] = {}
        while len(found) < 2:
            match = re.match(r"(replica-\d): process (\d+)", process.stdout.readline())
            found |= {match[1]: int(match[2])} if match else {}
        wait_until(lambda: last_step(second) >= 50)
        paused = last_step(second)
        os.killpg(found["replica-1"], signal.SIGSTOP)
        wait_until(lambda: last_step(first) >= paused + 50)
        os.killpg(found["replica-1"], signal.SIGCONT)
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "replica-1 ended with exit code 76: restart 1 of 3" in said
    assert set(map(tuple, samples_by_step(first).values())) == {tuple(range(8))}
    groups.assert_equal_weights(first, second)


@contextmanager
def lighthouse(address: str) -> Iterator[None]:
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    server = LighthouseServer(bind=address, min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3000)
    yield
    server.shutdown()
