"""Mutation testing: does a test fail when a small fault is put into the product code?

A mutation runs in a clone of HEAD in a temporary folder, which is first in PYTHONPATH: tests, the commands that they
start and the fork server of `tests.warm_python` import that. First come the tests that `mutations.toml` names, then all
in the folder that mirrors the mutated file; of both those of `make test` before those that `.ci/run` has besides. The
test that fails is run once more without the fault, and has to pass.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.sweeps.sweep import ROOT

LIMIT_S = 900.0
"""Seconds of a session of pytest, after which a fault counts as caught: it would keep CI from ending, too."""
_OUTCOME = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\n]+?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong then.
        file: of the product code.
        old: text in it, which occurs once.
        new: what takes its place.
        tests: files, or tests of them, that ought to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Puts it into a copy of the code."""
        path = root / self.file
        path.write_text(self.applied(path.read_text()))

    def applied(self, text: str) -> str:
        """The text of its file with the fault."""
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} x {self.old!r}"
        return text.replace(self.old, self.new)

    @property
    def folder(self) -> str:
        """The folder of tests that mirrors the one of its file."""
        parts = Path("tests", *Path(self.file.removeprefix("pipeline/")).parts[:-1])
        return next(str(each) for each in (parts, *parts.parents) if (ROOT / each).is_dir())


@cache
def mutations() -> dict[str, list[Mutation]]:
    """Law or room -> its mutations."""
    table = tomllib.loads((ROOT / "tests" / "sweeps" / "mutations.toml").read_text())
    return {
        group: [Mutation(**{**each, "tests": tuple(each["tests"])}) for each in found] for group, found in table.items()
    }


def run_mutation(name: str) -> tuple[bool, str]:
    """Whether a test fails of a mutation; its file, what runs that test, the test, and seconds until it has failed."""
    mutation = next(each for found in mutations().values() for each in found if each.name == name)
    of_make_test = re.search(r"^TESTS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert of_make_test is not None
    tiers = {"make test": of_make_test[1], ".ci/run": "integration and not sweep"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-mutations-") as folder:
        clone = Path(folder, "headrace")
        quiet = ("-c", "advice.detachedHead=false")
        subprocess.run(["git", *quiet, "clone", "--quiet", "--shared", ROOT, clone], check=True)
        for library in (ROOT / "data_prep" / "sources").glob("_jsonl*.so"):
            shutil.copy(library, clone / library.relative_to(ROOT))
        mutation.apply(clone)
        for tests in (mutation.tests, (mutation.folder,)):
            for tier, expression in tiers.items():
                failed = _first_failure(clone, tests, "-m", expression)
                if failed is None:
                    continue
                row = " | ".join([f"`{mutation.file}`", tier, f"`{failed}`", f"{time.monotonic() - began:.0f}"])
                subprocess.run(["git", "-C", clone, "checkout", "--quiet", "."], check=True)
                if _first_failure(clone, (failed,), "-m", expression) is None:
                    return True, row
                return False, f"{row}: fails without the fault, too"
    return False, f"`{mutation.file}` | nothing | | {time.monotonic() - began:.0f}"


def _first_failure(root: Path, tests: tuple[str, ...], *options: str) -> str | None:
    """The first test that fails; the first of `tests` where they do not end in time, None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as session:
        try:
            output, _ = session.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return tests[0]
        finally:
            if session.poll() is None:
                os.killpg(session.pid, signal.SIGKILL)
    if session.returncode in (0, 5):  # 5: no test was selected
        return None
    found = _OUTCOME.search(output)
    assert found is not None, output[-4000:]
    return found[1]
