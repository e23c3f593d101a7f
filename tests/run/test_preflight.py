"""A rank that does not come, or stops on the way to the first step, is named by the others, with its host."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from foundation.errors import EXIT_LOST
from foundation.processes import state_of
from tests import warm
from tests.conftest import ROOT, selected
from tests.run.start_ranks import RANKS, WRONG
from tests.support import output_of

SCRIPT = Path(__file__).with_name("start_ranks.py")
BAD = 3
AT_REST = "nowhere:-1"
"""Nobody is stopped."""
STOPPED = {
    "store:0": "after its store is open",
    "met:0": "after all have come",
    f"met:{BAD}": "the same",
    f"groups:{BAD}": "before it makes its process groups",
    "tp:0": "in the first check, and takes the notes with it",
    f"tp:{BAD}": "in the first check",
    f"dp:{BAD}": "between two checks",
    f"timed:{BAD}": "after the checks",
    "shared:0": "before it looks at the run's directory",
    f"shared:{BAD}": "the same",
    "watched:0": "before it starts the watchdog",
    f"watched:{BAD}": "before the watchdog has heard of it",
}
"""Where and which rank -> in words."""
CASES = (AT_REST, f"{WRONG}:{BAD}", "absent:0", f"absent:{BAD}", *STOPPED)
ALWAYS = ("store:0", f"tp:{BAD}", "shared:0", f"watched:{BAD}")
"""Those of `make test`; `make test-integration` runs the others."""
NAMES = [pytest.param(case, marks=[] if case in ALWAYS else pytest.mark.integration) for case in STOPPED]
# each of four times four takes the time itself, 5 s until a stopped store is given up, 3 s in which ranks agree
LIMIT_S = 240.0
NOT_MET = re.compile(
    r"rank 0 (at|of 4 did not join the rendezvous at) 127\.0\.0\.1"
    # another rank's timer came first, and ended the stopped one
    r"|could not connect to 127\.0\.0\.1:\d+ within 8 s: rank 0 did not join"
)


@dataclass(frozen=True)
class Start:
    """What became of the ranks that ended by themselves: what they said, and their exit codes."""

    said: dict[int, str]
    codes: dict[int, int]


@pytest.fixture(scope="module")
def starts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """The selected cases, several at a time: they mostly wait."""
    work = tmp_path_factory.mktemp("starts")
    test = test_a_rank_stopped_on_the_way_is_named_and_the_others_start_again
    wanted = {*CASES} - {*STOPPED} | {f"tp:{BAD}", *selected(request.session, test, "case")}
    cases = [case for case in CASES if case in wanted]
    output_of(warm.run(SCRIPT, *cases, cwd=work, merged=True, timeout_s=LIMIT_S))
    found = {}
    for case in cases:
        codes = {int(path.name.removeprefix("code-")): int(path.read_text()) for path in (work / case).glob("code-*")}
        found[case] = Start({rank: (work / case / f"said-{rank}").read_text() for rank in codes}, codes)
    return found


def test_ranks_that_all_answer_are_told_in_one_line(starts: dict[str, Start]) -> None:
    start = starts[AT_REST]
    assert list(start.codes.values()) == [0] * RANKS, start
    assert "preflight: dp 2, tp 2, all 4 ranks answer" in start.said[0]


@pytest.mark.parametrize("case", NAMES)
def test_a_rank_stopped_on_the_way_is_named_and_the_others_start_again(starts: dict[str, Start], case: str) -> None:
    start, bad = starts[case], int(case.split(":")[1])
    assert set(start.codes.values()) == {EXIT_LOST}, start
    assert len(start.codes) == RANKS - 1
    for text in start.said.values():
        # before all have met, nobody knows the name of a host
        assert f"rank {bad} on {socket.gethostname()} did not answer" in text or (bad == 0 and NOT_MET.search(text)), (
            start
        )
        assert bad == 0 or "rank 0 at" not in text, start
        assert not any(f"rank {rank} on {socket.gethostname()} did not" in text for rank in range(4) if rank != bad)
        assert "Traceback" not in text, start


def test_the_rank_that_shares_the_axis_says_which_it_is(starts: dict[str, Start]) -> None:
    assert "in the all-reduce over tp (ranks 2, 3)" in starts[f"tp:{BAD}"].said[2]


@pytest.mark.parametrize("bad", [0, BAD])
def test_a_rank_that_never_comes_is_named(starts: dict[str, Start], bad: int) -> None:
    start = starts[f"absent:{bad}"]
    assert set(start.codes.values()) == {EXIT_LOST}, start
    for text in start.said.values():
        # torch's own timeout may come a moment after ours, which does not know whether rank 0 was ever there
        assert ("rank 0" in text and "did not join" in text) if bad == 0 else f"rank {BAD} of 4 did not join" in text, (
            start
        )
    if bad:
        assert f"joined: rank 0 on {socket.gethostname()}, rank 1" in start.said[0]


def test_a_wrong_sum_names_its_axis(starts: dict[str, Start]) -> None:
    said = starts[f"{WRONG}:{BAD}"].said
    # ranks 2 and 3 add up 3 and 4; rank 3 believes to be rank 77
    assert "all-reduce over tp (ranks 2, 3) is wrong" in said[2]
    assert "such as 81 where 7 is right" in said[2]


@pytest.mark.parametrize(
    ("rank", "ranks"),
    [
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_only_a_stopped_rank_of_the_same_launcher_is_killed(
    monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str
) -> None:
    # torchrun and deepspeed would wait 30 s for it
    own = {ranks: "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    # as `process_group` does, for libraries that know torchrun's variables alone
    kill = "import os; os.environ.update(RANK='0', WORLD_SIZE='5'); "
    kill += "from pipeline.runtime.launch import missing_ranks; missing_ranks.kill_stopped([1, 3])"
    codes = {"1": stop, "2": stop, "3": "import time; time.sleep(600)"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    started = [subprocess.Popen([sys.executable, "-c", c], env={**os.environ, rank: r}) for r, c in codes.items()]
    started.append(subprocess.Popen([sys.executable, "-c", stop], env={**os.environ, rank: "1", "MASTER_PORT": "1235"}))
    try:
        for process in (started[0], started[1], started[3]):
            while state_of(process.pid)[0] != "T":
                assert process.poll() is None
        subprocess.run([sys.executable, "-c", kill], env={**os.environ, rank: "0"}, cwd=ROOT, check=True)
        assert started[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in started[1:]] == [None] * 3
    finally:
        for process in started:
            process.kill()
            process.wait()
