"""The campaign's own look at a run's checkpoints, and what it does to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.directory import read_manifest, verify
from headrace.base.errors import HeadraceError


def named(run_dir: Path) -> dict[int, Path]:
    """Step -> directory of all that have a checkpoint's name."""
    return {int(path.name.removeprefix("step-")): path for path in (run_dir / "checkpoints").glob("step-*")}


def is_whole(path: Path) -> bool:
    """Whether every byte is what the manifest says."""
    try:
        return all(whole for _, whole in verify(path, read_manifest(path, kind="checkpoint")))
    except HeadraceError:
        return False


def being_written(run_dir: Path) -> bool:
    """Whether a checkpoint is on its way."""
    return any((run_dir / "checkpoints").glob(".step-*.partial"))


def leftovers(run_dir: Path) -> list[str]:
    """What is half-written or half-deleted."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob(".step-*"))


@dataclass
class Damage:
    """What the campaign has damaged itself.

    Attributes:
        steps: checkpoints that are not whole, and ought not to be.
    """

    steps: set[int] = field(default_factory=set)

    def look(self, run_dir: Path) -> tuple[list[int], list[int]]:
        """The whole ones, and those that are broken though nobody broke them; oldest first."""
        found = named(run_dir)
        whole = sorted(step for step, path in found.items() if is_whole(path))
        broken = sorted(set(found) - set(whole) - self.steps)
        self.steps -= set(whole)  # written anew
        self.steps &= set(found)
        return whole, broken

    def inflict(self, how: str, run_dir: Path, rng: random.Random) -> str:
        """Damages a whole checkpoint, mostly the newest, and leaves at least one; says what was done."""
        whole, _ = self.look(run_dir)
        assert len(whole) > 1
        step = whole[-1] if rng.random() < 0.75 else rng.choice(whole)
        files = [path for path in named(run_dir)[step].rglob("*") if path.is_file()]
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
    """One bit, wherever it lies."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
