"""A rank that dies or hangs is named, once, and all others are gone within seconds. With real processes over gloo."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.base.errors import EXIT_FOLLOWED, EXIT_LOST
from pipeline.faults import progress
from pipeline.faults.progress import progress_by_reading
from pipeline.faults.watchdog import Watchdog
from tests import warm
from tests.faults.ranks import RANKS

SCRIPT = Path(__file__).with_name("ranks.py")
HOST = socket.gethostname()


@dataclass(frozen=True)
class Outcome:
    """What four ranks said and left with."""

    said: list[str]
    codes: list[int]
    seconds: float
    faults: list[dict[str, object]]

    @property
    def reports(self) -> list[str]:
        """Lines that report a fault, of all ranks."""
        return [line for text in self.said for line in text.splitlines() if line.startswith("error:")]


def outcome(work: Path, how: str, bad: int = -1) -> Outcome:
    """Runs four ranks of which `bad` misbehaves."""
    started = time.monotonic()
    done = warm.run(SCRIPT, how, bad, cwd=work, merged=True, timeout_s=90)
    assert done.returncode == 0, done.stdout
    said = [(work / f"said-{rank}").read_text() for rank in range(RANKS)]
    codes = [int((work / f"code-{rank}").read_text()) for rank in range(RANKS)]
    rows = work / "faults.jsonl"
    faults = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return Outcome(said, codes, time.monotonic() - started, faults)


def lost(codes: list[int], *, but: int) -> bool:
    """Whether all ranks but one have left with the code of a lost run."""
    return all(code == EXIT_LOST for rank, code in enumerate(codes) if rank != but)


def test_a_run_without_faults_hears_nothing_of_it(tmp_path: Path) -> None:
    run = outcome(tmp_path, "fine")
    assert run.codes == [0] * RANKS
    assert run.said == [""] * RANKS
    assert run.faults == []


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_is_killed_is_named_once_and_the_others_go_at_once(tmp_path: Path, bad: int) -> None:
    run = outcome(tmp_path, "die", bad)
    assert lost(run.codes, but=bad), run
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST} (pid " in run.reports[0]
    assert "died" in run.reports[0]
    assert "at step 3, in training" in run.reports[0]
    # 2 s of them slept on purpose; the rest is for a busy machine
    assert run.seconds < 20
    assert [(row["fault"], row["ranks"][0]["rank"]) for row in run.faults] == [("died", bad)]  # type: ignore[index]


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_is_stopped_is_named_with_its_stack_and_ended(tmp_path: Path, bad: int) -> None:
    run = outcome(tmp_path, "stop", bad)
    assert lost(run.codes, but=bad), run
    assert run.codes[bad] == -9  # a stopped process cannot end itself
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST}" in run.reports[0]
    assert "silent" in run.reports[0]
    text = "".join(run.said)
    assert "the process is stopped" in text
    assert "ranks.py" in text.partition(f"where rank {bad} was last seen")[2]


def test_a_rank_that_sits_in_python_is_named_with_the_line_it_sits_in(tmp_path: Path) -> None:
    run = outcome(tmp_path, "stuck", 2)
    assert lost(run.codes, but=2), run
    assert run.codes[2] in (EXIT_LOST, -9)  # killed, where a busy machine kept its thread from running
    assert len(run.reports) == 1, run
    assert f"rank 2 of 4 on {HOST}" in run.reports[0]
    assert "hangs at step 3, in training" in run.reports[0]
    text = "".join(run.said)
    assert "ranks.py" in text.partition("where rank 2 is")[2].partition("where rank")[0]
    assert "all_reduce" in text  # the stack of one that waits stands beside it


def test_a_call_that_holds_the_interpreter_for_long_is_no_death(tmp_path: Path) -> None:
    # twice as long as silence is borne: the sign of life comes from a thread that needs no lock
    run = outcome(tmp_path, "slow", 1)
    assert run.codes == [0] * RANKS, run
    assert run.said == [""] * RANKS


def test_a_call_that_never_gives_the_interpreter_back_is_named_and_ended(tmp_path: Path) -> None:
    run = outcome(tmp_path, "starved", 1)
    assert lost(run.codes, but=1), run
    assert run.codes[1] == -9
    assert len(run.reports) == 1, run
    text = "".join(run.said)
    assert "holds Python's interpreter lock" in text
    assert "in sleep_with_the_lock" in text.partition("where rank 1 is")[2]


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_of_one_rank_keeps_its_exit_code_and_the_others_say_it_in_a_line(tmp_path: Path, bad: int) -> None:
    run = outcome(tmp_path, "raise", bad)
    assert all(code == EXIT_FOLLOWED for rank, code in enumerate(run.codes) if rank != bad), run
    assert run.codes[bad] == 1
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST}" in run.reports[0]
    assert "ValueError: the real cause" in run.reports[0]
    assert "closed by peer" not in "".join(run.said)
    assert "".join(run.said).count("Traceback") == 1


def test_an_error_of_all_ranks_is_left_to_themselves(tmp_path: Path) -> None:
    run = outcome(tmp_path, "refuse")
    assert run.codes == [2] * RANKS, run
    assert not any("of 4 on" in text for text in run.said), run


def test_a_link_that_breaks_is_nobodys_error_and_the_run_can_be_started_again(tmp_path: Path) -> None:
    run = outcome(tmp_path, "link", 1)
    assert run.codes == [EXIT_LOST] * RANKS, run
    assert len(run.reports) == 1, run
    assert "lost its link to another rank at step 3, in training" in run.reports[0]
    assert [row["fault"] for row in run.faults] == ["lost"]


def test_a_run_that_somebody_holds_is_left_alone(tmp_path: Path) -> None:
    # all ranks stopped, and then one of them in a debugger, both for longer than silence is borne
    run = outcome(tmp_path, "held")
    assert run.codes == [0] * RANKS, run
    assert run.said == [""] * RANKS
    assert run.faults == []


def test_a_sign_of_life_of_one_rank_is_no_place_that_the_others_have_not_come_to() -> None:
    quick, slow = Watchdog(), Watchdog()
    for watchdog in (quick, slow):
        watchdog.at("training", 1)
    before = slow.place
    slow.alive()
    assert slow.place.ticks > before.ticks
    for watchdog in (quick, slow):
        watchdog.at("training", 2)
    assert quick.place.places == slow.place.places


def test_only_reading_and_writing_is_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress, "_GLANCE_S", 0.05)
    signs: list[float] = []
    with progress_by_reading(lambda: signs.append(time.monotonic())):
        time.sleep(1.0)
    assert not signs  # to look at the counters is itself counted
    with progress_by_reading(lambda: signs.append(time.monotonic())):
        (tmp_path / "file").write_bytes(bytes(100_000))
        time.sleep(0.5)
    assert signs


def test_when_the_judge_is_killed_the_run_goes_on(tmp_path: Path) -> None:
    run = outcome(tmp_path, "hub", 0)
    assert run.codes == [0] * RANKS, run
    assert "warning: the watchdog's own process has ended" in run.said[0]
    assert run.said[1:] == [""] * (RANKS - 1)


@pytest.mark.parametrize("how", ["host", "hub, host"])
def test_when_rank_0_goes_with_the_judge_or_after_it_it_is_named_once(how: str, tmp_path: Path) -> None:
    run = outcome(tmp_path, how, 0)
    assert lost(run.codes, but=0), run
    assert len(run.reports) == 1, run
    assert f"rank 0 of 4 on {HOST} died" in run.reports[0]
    assert len(run.faults) == 1
