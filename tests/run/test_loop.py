"""The training loop: its hooks and their order, collections of cycles at chosen steps, the batches of a rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.skips import Skip, Skips
from pipeline.engines.base import StepResult
from pipeline.run.batches import RankBatches
from pipeline.run.hooks.garbage import GarbageCollector
from pipeline.run.hooks.hook import Hook, StepNumbers
from pipeline.run.hooks.hooks import HOOKS, Hooks
from pipeline.run.prepare import prepare
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config

RECORDED = """
import sys, types
from contextlib import contextmanager
from pipeline.run.hooks.hook import Hook
from pipeline.run.hooks.hooks import HOOKS

class Recorder(Hook):
    def start(self, step): print("CALL start", step)
    def flag(self): return True
    @contextmanager
    def step(self, batch):
        print("CALL before", batch.step)
        yield batch
        print("CALL begun", batch.step)
    def numbers(self, numbers, *, raised): print("CALL numbers", numbers.step, raised, numbers.cost.seconds > 0)
    def after_step(self, step): print("CALL after", step)
    @contextmanager
    def outside_step(self):
        print("CALL outside")
        yield
    def end(self, step):
        print("CALL end", step)
        print("HOOKS", *sorted(name for name in sys.modules if name.startswith("pipeline.run.hooks.")))

sys.modules["pipeline.run.hooks.recorder"] = types.ModuleType("recorder")
sys.modules["pipeline.run.hooks.recorder"].make = lambda context: Recorder()
HOOKS["recorder"] = lambda run: True
import runpy
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_the_loop_calls_hooks_at_its_points_in_this_order(tokens: Path, tmp_path: Path) -> None:
    """Three steps, with a checkpoint and an evaluation after the second."""
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0})
    config["run"] |= {"steps": 3, "checkpoint_every": 2}
    config["evaluation"]["every"] = 2
    config["scheduler"] = {"type": "WSD", "params": {"warmup_num_steps": 1, "decay_num_steps": 1}}
    file = write_config(tmp_path / "c.json", config)
    done = warm.run("-c", RECORDED, ROOT / "pipeline/train.py", "--config", file, merged=True)
    assert done.returncode == 0, done.stdout
    calls = [line.removeprefix("CALL ") for line in done.stdout.splitlines() if line.startswith("CALL ")]
    step = "before {0}, begun {0}, numbers {0} True True, after {0}"
    saved_and_evaluated = "outside, outside"
    expected = [
        "start 0",
        *step.format(1).split(", "),
        *f"{step.format(2)}, {saved_and_evaluated}".split(", "),
        *f"{step.format(3)}, outside, end 3".split(", "),  # the last save is no part of a step's time
    ]
    assert calls == expected
    [imported] = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HOOKS ")]
    off = {"profile", "stragglers", "shares", "student_samples"}  # what is off is not imported
    assert {f"pipeline.run.hooks.{name}" for name in HOOKS.keys() - off} <= {*imported}
    assert not {f"pipeline.run.hooks.{name}" for name in off} & {*imported}


def test_the_list_of_hooks_is_in_this_order() -> None:
    assert [*HOOKS] == [
        *("memory", "step_time", "profile", "stragglers", "shares", "student_samples"),
        *("metrics", "compilations", "measured", "garbage", "log_rotation"),
    ]


class Named(Hook):
    """Records its calls in a list of all hooks, and hands its name on with the batch."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def batches(self, steps: Any) -> Any:
        for each in steps:
            self.calls.append(f"{self.name} has batch")
            yield each

    @contextmanager
    def step(self, batch: Any) -> Iterator[Any]:
        self.calls.append(f"{self.name} before {batch.step}")
        yield SimpleNamespace(step=f"{batch.step}{self.name}")
        self.calls.append(f"{self.name} begun")

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        self.calls.append(f"{self.name} {'raised' if raised else 'numbers'} {numbers.step} of {numbers.begun}")


class Flagged(Named):
    """A hook with a flag."""

    def flag(self) -> bool:
        return self.name == "b"


def test_the_first_hook_is_the_outermost_and_a_flag_reaches_the_hook_that_has_it() -> None:
    calls: list[str] = []
    hooks = Hooks([Named("a", calls), Flagged("b", calls), Flagged("c", calls)])
    batch: Any = SimpleNamespace(step="1")
    [read] = hooks.batches([batch])
    with hooks.step(read) as whole:
        completed: Any = whole
        assert completed.step == "1abc"
    assert hooks.flags() == [True, False]
    hooks.numbers(1, StepResult(1.0, {}, 1.0), [True, False], begun=2)
    assert calls == [
        *("c has batch", "b has batch", "a has batch"),
        *("a before 1", "b before 1a", "c before 1ab", "c begun", "b begun", "a begun"),
        *("a numbers 1 of 2", "b raised 1 of 2", "c numbers 1 of 2"),
    ]


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def left_behind() -> weakref.ref[Cycle]:
    """A reference to a cycle that nothing else refers to."""
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    """A failed test must not leave the collector disabled for those after it."""
    yield
    gc.unfreeze()
    gc.enable()


def test_a_cycle_lives_until_a_step_at_which_it_is_time() -> None:
    with GarbageCollector(every=3) as garbage:
        assert not gc.isenabled()
        cycle = left_behind()
        for step in (1, 2, 4, 5):
            garbage.after_step(step)
            assert cycle() is not None, step
        garbage.after_step(6)
        assert cycle() is None
    assert gc.isenabled()


def test_what_is_there_at_the_start_is_not_looked_at_again_until_the_end() -> None:
    with GarbageCollector(every=1) as garbage:
        frozen = gc.get_freeze_count()
        assert frozen > 0
        garbage.after_step(1)
        assert frozen - 100 < gc.get_freeze_count() <= frozen  # some may have died meanwhile, of their own
    assert gc.get_freeze_count() == 0


def test_0_leaves_collections_to_python() -> None:
    with GarbageCollector(every=0) as garbage:
        assert gc.isenabled()
        cycle = left_behind()
        garbage.after_step(1)
        assert cycle() is not None
    gc.collect()
    assert cycle() is None


def test_a_collector_that_was_disabled_before_stays_so_and_an_error_ends_it_as_well() -> None:
    gc.disable()
    with pytest.raises(ValueError, match="a step failed"), GarbageCollector(every=2):
        raise ValueError("a step failed")
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_slot_is_the_same_data_on_islands_that_have_skipped_some_and_others(tokens: Path, tmp_path: Path) -> None:
    run = resolve(parse(Config, tiny_config(tokens, tmp_path / "run")), world_size=1)
    batches, skips = RankBatches(prepare(run), 0), Skips((Skip(1, 2),))
    behind = next(iter(batches.training(first_step=1, skips=skips)))
    slot = next(iter(batches.slots(3, 3)))
    assert torch.equal(behind.micro_batches[0].input_ids, slot.micro_batches[0].input_ids)
