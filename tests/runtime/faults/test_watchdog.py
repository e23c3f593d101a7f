"""A rank that dies or hangs is reported once, and all others exit within seconds. With real processes over gloo."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from foundation.errors import EXIT_FOLLOWED, EXIT_LOST
from pipeline.runtime.faults.watchdog import Watchdog
from tests import warm
from tests.runtime.faults.ranks import RANKS
from tests.support import output_of

SCRIPT = Path(__file__).with_name("ranks.py")
HOST = socket.gethostname()

PROGRESS = """
import json, time
from pathlib import Path
from pipeline.runtime.faults import progress
progress._POLL_S = 0.05
quiet, busy = [], []
with progress.progress_from_io(lambda: quiet.append(1)):
    time.sleep(1.0)
with progress.progress_from_io(lambda: busy.append(1)):
    Path("file").write_bytes(bytes(100_000))
    time.sleep(0.5)
print(json.dumps([len(quiet), len(busy)]))
"""


@dataclass(frozen=True)
class Outcome:
    """Output and exit codes of four ranks."""

    outputs: list[str]
    codes: list[int]
    faults: list[dict[str, object]]

    @property
    def reports(self) -> list[str]:
        """Lines that report a fault, of all ranks."""
        return [line for text in self.outputs for line in text.splitlines() if line.startswith("error:")]


def run_ranks(work: Path, fault: str, bad: int = -1) -> Outcome:
    """Runs four ranks and injects a fault into `bad`, or into all of them."""
    # without the watchdog the others would wait for a lost rank for gloo's 600 s
    output_of(warm.run(SCRIPT, fault, bad, cwd=work, merged=True, timeout_s=180))
    outputs = [(work / f"output-{rank}").read_text() for rank in range(RANKS)]
    codes = [int((work / f"code-{rank}").read_text()) for rank in range(RANKS)]
    rows = work / "faults.jsonl"
    faults = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return Outcome(outputs, codes, faults)


def lost(codes: list[int], *, but: int) -> bool:
    """Whether all ranks but one have exited with the code of a lost rank."""
    return all(code == EXIT_LOST for rank, code in enumerate(codes) if rank != but)


@pytest.mark.parametrize(
    ("fault", "bad"),
    [
        ("fine", -1),
        # twice as long as the timeout: the heartbeat comes from a thread that needs no interpreter lock
        ("holds lock, shortly", 1),
        # all ranks stopped, and then one of them in a debugger, both for longer than the heartbeat timeout
        ("paused", -1),
    ],
)
def test_a_run_without_faults_or_in_a_long_call_or_paused_has_no_report(tmp_path: Path, fault: str, bad: int) -> None:
    run = run_ranks(tmp_path, fault, bad)
    assert run.codes == [0] * RANKS, run
    assert run.outputs == [""] * RANKS
    assert run.faults == []


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_is_killed_is_reported_once_and_the_others_exit_at_once(tmp_path: Path, bad: int) -> None:
    run = run_ranks(tmp_path, "die", bad)
    assert lost(run.codes, but=bad), run
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST} (pid " in run.reports[0]
    assert "died" in run.reports[0]
    assert "at step 3, in training" in run.reports[0]
    assert [(row["fault"], row["ranks"][0]["rank"]) for row in run.faults] == [("died", bad)]  # type: ignore[index]


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_is_stopped_is_reported_with_its_stack_and_killed(tmp_path: Path, bad: int) -> None:
    run = run_ranks(tmp_path, "stop", bad)
    assert lost(run.codes, but=bad), run
    assert run.codes[bad] == -9  # a stopped process cannot exit by itself
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST}" in run.reports[0]
    assert "has sent no heartbeat" in run.reports[0]
    text = "".join(run.outputs)
    assert "the process is stopped" in text
    assert "ranks.py" in text.partition(f"where rank {bad} was last seen")[2]


def test_a_rank_that_hangs_in_python_is_reported_with_the_line_it_hangs_in(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, "stuck", 2)
    assert lost(run.codes, but=2), run
    assert run.codes[2] in (EXIT_LOST, -9)  # killed, where a busy machine kept its thread from running
    assert len(run.reports) == 1, run
    assert f"rank 2 of 4 on {HOST}" in run.reports[0]
    assert "hangs at step 3, in training" in run.reports[0]
    text = "".join(run.outputs)
    assert "ranks.py" in text.partition("where rank 2 is")[2].partition("where rank")[0]
    assert "all_reduce" in text  # the stack of a waiting rank is shown beside it
    # torch's flight recorder: the bad rank has begun no third all-reduce, the others wait in it
    assert "rank 2 is in no collective that is known" in text
    assert re.search(r"waiting in gloo:all_reduce \d+ of default_pg, Float \[1\]: ranks 0-1, 3\n", text)
    dumped = [json.loads((tmp_path / f"flight-recorder-rank-{rank}").read_text())["entries"] for rank in (0, 1, 3)]
    assert all(entries[-1]["profiling_name"] == "gloo:all_reduce" for entries in dumped)


def test_a_rank_that_never_releases_the_interpreter_lock_is_reported_and_killed(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, "holds lock", 1)
    assert lost(run.codes, but=1), run
    assert run.codes[1] == -9
    assert len(run.reports) == 1, run
    text = "".join(run.outputs)
    assert "holds Python's interpreter lock" in text
    assert "in sleep_with_the_lock" in text.partition("where rank 1 is")[2]


@pytest.mark.parametrize("bad", [0, 2])
def test_the_rank_with_an_error_keeps_its_exit_code_and_the_error_is_reported_once(tmp_path: Path, bad: int) -> None:
    run = run_ranks(tmp_path, "raise", bad)
    assert all(code == EXIT_FOLLOWED for rank, code in enumerate(run.codes) if rank != bad), run
    assert run.codes[bad] == 1
    assert len(run.reports) == 1, run
    assert f"rank {bad} of 4 on {HOST}" in run.reports[0]
    assert "ValueError: the real cause" in run.reports[0]
    assert "closed by peer" not in "".join(run.outputs)
    assert "".join(run.outputs).count("Traceback") == 1


def test_an_error_that_all_ranks_raise_is_not_reported_by_the_watchdog(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, "refuse")
    assert run.codes == [2] * RANKS, run
    assert not any("of 4 on" in text for text in run.outputs), run


def test_a_broken_link_is_reported_as_lost_with_the_exit_code_for_a_restart(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, "link", 1)
    assert run.codes == [EXIT_LOST] * RANKS, run
    assert len(run.reports) == 1, run
    assert "lost its connection to another rank at step 3, in training" in run.reports[0]
    assert [row["fault"] for row in run.faults] == ["lost"]
    text = "".join(run.outputs)
    assert "Traceback" in text
    assert "/gloo/transport/" in text


def test_a_progress_report_of_one_rank_does_not_count_as_a_transition() -> None:
    quick, slow = Watchdog(), Watchdog()
    for watchdog in (quick, slow):
        watchdog.enter_phase("training", 1)
    before = slow.position
    slow.report_progress()
    assert slow.position.ticks > before.ticks
    for watchdog in (quick, slow):
        watchdog.enter_phase("training", 2)
    assert quick.position.transitions == slow.position.transitions


def test_only_input_and_output_counts_as_progress(tmp_path: Path) -> None:
    # in a process of its own: the servers of other tests are threads of this one, and answer each other
    quiet, busy = json.loads(output_of(warm.run("-c", PROGRESS, cwd=tmp_path)))
    assert quiet == 0  # reading the counters is itself counted
    assert busy > 0


def test_when_the_heartbeat_server_is_killed_the_run_goes_on(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, "server", 0)
    assert run.codes == [0] * RANKS, run
    assert "warning: the heartbeat server has exited" in run.outputs[0]
    assert run.outputs[1:] == [""] * (RANKS - 1)


@pytest.mark.parametrize("fault", ["host", "server, host"])
def test_rank_0_is_reported_once_when_it_dies_with_the_heartbeat_server_or_after_it(fault: str, tmp_path: Path) -> None:
    run = run_ranks(tmp_path, fault, 0)
    assert lost(run.codes, but=0), run
    assert len(run.reports) == 1, run
    # with the process's id where the server saw it die before it was killed itself
    assert re.search(rf"rank 0 of 4 on {HOST}( \(pid \d+\))? died", run.reports[0])
    assert len(run.faults) == 1
