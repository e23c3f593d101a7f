"""Mutation testing: does a test fail when a mutant takes the place of the product code?

Mutants run in a clone of HEAD in a temporary folder, which is first in PYTHONPATH: tests, the commands that they start
and the fork server of `tests.warm_python` import that. Sessions of pytest run one after the other until a test fails:
the files that import the mutated module, the rest of the folder that mirrors it, and for what survives these the parity
matrix, or the tests of its package where no rank imports it. The test that fails runs once more without the mutant, and
has to pass; otherwise the sessions go on without it.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import psutil

from tests.sweeps.mutants import EQUIVALENT, Mutant, drawn
from tests.sweeps.sweep import ROOT, CellResult, wrapped

TIER = "not sweep"
"""The tests that CI runs."""
SILENCE_S = 300.0
"""Seconds without the end of a test, after which a mutant counts as one that hangs."""
_MATRIX = "tests/parity/test_matrix.py"
_NOT_OF_A_RANK = {"data_prep/": "tests/data_prep", "pipeline/compress/": "tests/compress"}
"""Product code that no rank imports, and its tests."""
_OUTCOME = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\n]+?)?)(?: - .*)?$", re.MULTILINE)
_KILLED = ("importing tests", "its folder", "the matrix", "its package", "time limit")


@cache
def mutants() -> dict[str, Mutant]:
    """Name -> mutant."""
    return {each.name: each for found in drawn().values() for each in found}


def run_mutant(name: str) -> tuple[bool, str]:
    """Whether a test fails of a mutant; where it is, what kills it, the test, and seconds."""
    began, mutant = time.monotonic(), mutants()[name]
    by, test = _clone().judge(mutant)
    return by in _KILLED, " | ".join([mutant.file, by, test, f"{time.monotonic() - began:.0f} s"])


def body(results: Mapping[str, CellResult]) -> list[str]:
    """What killed the mutants of each subject, those that hang, and those that are known to be no faults."""
    lines = [
        f"| subject | {' | '.join(f'by {each}' for each in _KILLED)} | survived |",
        "|---|" + "---:|" * (len(_KILLED) + 1),
    ]
    by = {name: result.note.split(" | ")[1] for name, result in results.items()}
    for subject, found in drawn().items():
        counts = Counter(by[each.name] for each in found if each.name in by)
        lines.append(f"| {subject} | {' | '.join(str(counts[each]) for each in (*_KILLED, 'nothing'))} |")
    hung = [f"- `{name}`: {result.note}" for name, result in results.items() if by[name] == "time limit"]
    lines += ["", f"## No test ended for {SILENCE_S:.0f} s", "", *map(wrapped, hung)] if hung else []
    known = [f"- `{name}`: {why}" for name, why in EQUIVALENT.items()]
    return [*lines, *(["", "## Not drawn: equivalent to the code", "", *map(wrapped, known)] if known else [])]


def folder_of(mutant: Mutant) -> str:
    """The folder of tests that mirrors the one of a mutant's module."""
    parts = Path("tests", *Path(mutant.file.removeprefix("pipeline/")).parts[:-1])
    return str(next(each for each in (parts, *parts.parents) if (ROOT / each).is_dir()))


def _near(mutant: Mutant) -> list[str]:
    """The files of tests that have the name of a mutant's module, or import it."""
    path = Path(mutant.file)
    module = re.compile(rf"\b{re.escape('.'.join(path.with_suffix('').parts))}\b")
    files = sorted(each.relative_to(ROOT) for each in (ROOT / "tests").rglob("test_*.py"))
    own = Path(folder_of(mutant), f"test_{path.stem}.py")
    return [str(each) for each in files if each == own or module.search((ROOT / each).read_text())]


class _Clone:
    """A clone of HEAD in which mutants run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._broken: list[str] = []  # tests that fail there without a mutant
        quiet = ("-c", "advice.detachedHead=false")
        subprocess.run(["git", *quiet, "clone", "--quiet", "--shared", ROOT, root], check=True)
        for library in (ROOT / "data_prep" / "sources").glob("_jsonl*.so"):
            shutil.copy(library, root / library.relative_to(ROOT))

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """What kills a mutant ("nothing"), and the test."""
        path = self._root / mutant.file
        text = path.read_text()
        assert text == (ROOT / mutant.file).read_text(), f"commit {mutant.file} first"
        for by, arguments in _sessions(mutant):
            while True:
                path.write_text(mutant.applied(text))
                try:
                    failed = self._first_failure(*arguments, *(f"--deselect={each}" for each in self._broken))
                except TimeoutError as error:
                    return "time limit", str(error)
                finally:
                    path.write_text(text)
                if failed is None:
                    break
                # an error of a whole file is one of its imports
                if self._first_failure(failed, *(() if "::" in failed else ("--collect-only",))) is None:
                    return by, failed
                self._broken.append(failed)
        return "nothing", ""

    def _first_failure(self, *arguments: str) -> str | None:
        """The first test that fails; None where all pass.

        Raises:
            TimeoutError: no test has ended for a while; the message names the one that runs.
        """
        command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-m", TIER, *arguments]
        env = {**os.environ, "PYTHONPATH": str(self._root)}
        with tempfile.TemporaryFile("w+") as output:
            session = psutil.Popen(command, cwd=self._root, env=env, stdout=output, stderr=subprocess.STDOUT)
            size = -1
            while session.poll() is None:
                try:
                    session.wait(SILENCE_S)
                except psutil.TimeoutExpired:
                    size, before = os.fstat(output.fileno()).st_size, size
                    if size == before:
                        _kill(session)
                        output.seek(0)
                        raise TimeoutError(output.read().splitlines()[-1].partition(" ")[0]) from None
            output.seek(0)
            found = _OUTCOME.search(output.read())
        if session.returncode in (0, 5):  # 5: no test was selected
            return None
        return found[1] if found else arguments[0]  # the tests' common imports fail


def _kill(session: psutil.Popen) -> None:
    """Kills a session and all that it has started."""
    for process in [*session.children(recursive=True), session]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    session.wait()


def _sessions(mutant: Mutant) -> Iterator[tuple[str, list[str]]]:
    """What a session of pytest is, for the table, and its arguments."""
    folder, near = folder_of(mutant), _near(mutant)
    inside = [each for each in near if each.startswith(f"{folder}/")]
    for files in (inside, [each for each in near if each not in inside]):
        if files:
            yield "importing tests", files
    yield "its folder", [folder, *(f"--ignore={each}" for each in inside)]
    package = next((each for each in _NOT_OF_A_RANK if mutant.file.startswith(each)), None)
    if package is None:
        yield "the matrix", [_MATRIX]
    elif folder != _NOT_OF_A_RANK[package]:
        yield "its package", [_NOT_OF_A_RANK[package], *(f"--ignore={each}" for each in [folder, *inside])]


@cache
def _clone() -> _Clone:
    folder = tempfile.mkdtemp(prefix="headrace-mutations-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _Clone(Path(folder, "headrace"))
