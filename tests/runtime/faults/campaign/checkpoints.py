"""Finds, verifies and damages the checkpoints of a run, for the campaign."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from foundation.directory import read_manifest, verify
from foundation.errors import HeadraceError


def finished(run_dir: Path) -> dict[int, Path]:
    """Step -> directory of all finished checkpoints."""
    return {int(path.name.removeprefix("step-")): path for path in (run_dir / "checkpoints").glob("step-*")}


def is_intact(path: Path) -> bool:
    """Whether all checksums of the manifest match."""
    try:
        return all(good for _, good in verify(path, read_manifest(path, kind="checkpoint")))
    except HeadraceError:
        return False


def being_written(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step-*.partial"))


def leftovers(run_dir: Path) -> list[str]:
    """Directories that are half-written or half-deleted."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob(".step-*"))


@dataclass
class Damage:
    """The checkpoints that the campaign has damaged itself, by step."""

    steps: set[int] = field(default_factory=set)

    def inspect(self, run_dir: Path) -> tuple[list[int], list[int]]:
        """Steps of intact checkpoints, and of those that are damaged but not by the campaign; oldest first."""
        found = finished(run_dir)
        intact = sorted(step for step, path in found.items() if is_intact(path))
        damaged = sorted(set(found) - set(intact) - self.steps)
        self.steps -= set(intact)  # written anew
        self.steps &= set(found)
        return intact, damaged

    def inflict(self, how: str, run_dir: Path, rng: random.Random) -> str:
        """Damages an intact checkpoint, mostly the newest, and leaves at least one intact; returns a description."""
        intact, _ = self.inspect(run_dir)
        assert len(intact) > 1
        step = intact[-1] if rng.random() < 0.75 else rng.choice(intact)
        files = [path for path in finished(run_dir)[step].rglob("*") if path.is_file()]
        victim = rng.choice(sorted(files))
        self.steps.add(step)
        if how == "delete":
            victim.unlink()
        elif how == "truncate":
            size = victim.stat().st_size
            with victim.open("r+b") as file:
                file.truncate(rng.randrange(size))
        else:
            flip(victim, rng)
        return f"{how} {victim.parent.name}/{victim.name}"


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
