"""What a status is made of, without a run: growing and damaged journals, goodput, causes, agents, Slurm's words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from foundation.cli import guarded
from foundation.errors import ConfigError, DataError
from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import NodeState, RanksPlan, StateFiles
from pipeline.cluster.elastic.local_ranks import Command, LocalRanks, cause_of
from pipeline.cluster.elastic.questions import Questions
from pipeline.cluster.status.command import show_log
from pipeline.cluster.status.log import log_lines, merged_log
from pipeline.cluster.status.reason import job_reason, reason_of
from pipeline.cluster.status.run import RunReader, RunStatus, read_status
from pipeline.cluster.status.slurm import in_words
from pipeline.cluster.status.text import lines_of
from pipeline.config.sections.node_checks import NodeChecksSection
from pipeline.run.attempts import locked_attempt
from pipeline.runtime.faults import watchdog
from pipeline.runtime.faults.monitor import RankPosition
from pipeline.runtime.faults.report import append_fault_once, read_faults
from pipeline.runtime.goodput.metrics import MetricsReader, seconds_left
from pipeline.runtime.launch import Rendezvous
from pipeline.runtime.launch.environment import SINGLE_PROCESS
from pipeline.runtime.metrics.attempts_journal import NAME, append_event, read_events
from pipeline.runtime.metrics.journal import Journal
from tests.support import wait_until

T0 = 1_700_000_000.0


def at(seconds: float) -> str:
    """A time so many seconds after T0, as the journals have it."""
    return datetime.fromtimestamp(T0 + seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps(first: int, last: int, *, begin: float, each: float = 1.0) -> list[dict[str, Any]]:
    """Rows of steps, each so many seconds after the one before."""
    return [
        {"kind": "step", "step": step, "time": at(begin + each * (step - first + 1)), "loss": 5.0, "seconds": each}
        for step in range(first, last + 1)
    ]


@pytest.fixture
def twice_started(tmp_path: Path) -> Path:
    """30 s to start, steps 1-20 of 1 s, killed; 40 s later started again, 10 s to step 11; steps 11-30; stopped."""
    attempts: list[dict[str, Any]] = [
        {"event": "start", "attempt": "a", "time": at(0), "world_size": 2},
        {"event": "nodes", "attempt": "a", "time": at(1), "nodes": {"n1": "0", "n2": "1"}},
        {"event": "training", "attempt": "a", "time": at(30), "step": 0},
        {"event": "start", "attempt": "b", "time": at(90), "world_size": 1, "before": {"step": 20, "time": at(50)}},
        {"event": "training", "attempt": "b", "time": at(100), "step": 10},
        {"event": "end", "attempt": "b", "time": at(125), "code": 75, "reason": "stopped by SIGTERM, saved"},
    ]
    write_lines(tmp_path / NAME, attempts)
    resumed = {"kind": "event", "event": "resumed", "step": 10, "time": at(99)}
    rows = [*steps(1, 10, begin=30), resumed, *steps(11, 30, begin=100)]
    rows.append({"kind": "eval", "step": 30, "time": at(124), "loss": 4.0, "seconds": 3.0})
    write_lines(tmp_path / "metrics.jsonl", rows)
    return tmp_path


def test_goodput_counts_each_step_once_and_splits_the_rest(twice_started: Path) -> None:
    goodput = read_status(twice_started).goodput
    spent = goodput.spent
    assert (goodput.wall, spent.productive, spent.evaluation) == (125, 30, 3)
    assert spent.startup == 30 + 10
    assert spent.down == 40  # from the last sign of life of attempt 1, at 50 s
    assert spent.lost == 10  # from the last row that is kept to the last one that there was
    assert spent.other == 125 - 30 - 3 - 40 - 40 - 10
    assert goodput.share == 30 / 125


def test_attempts_have_their_cause_their_steps_and_their_nodes(twice_started: Path) -> None:
    first, second = read_status(twice_started).attempts
    assert (first.step, first.reached, first.code, first.ended) == (0, 20, None, T0 + 50)
    assert "killed without a word" in first.reason
    assert first.nodes == {"n1": "0", "n2": "1"}
    assert (second.step, second.reached, second.reason) == (10, 30, "stopped by SIGTERM, saved")
    row = {"event": "fault", "fault": "stuck", "time": T0 + 49, "ranks": [{"rank": 1, "host": "n2", "step": 20}]}
    append_fault_once(twice_started, {**row, "step": 20}, token="a")
    first = read_status(twice_started).attempts[0]
    assert first.reason.startswith("rank 1 on n2 hangs at step 20")
    assert first.code == 76


def test_a_node_that_died_is_named_and_not_that_of_rank_0_which_the_agents_end_then(
    twice_started: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: T0 + 50)
    monkeypatch.setattr(watchdog, "exit_now", lambda _code: None)
    asks = Questions([], 2, print, Commands(), NodeChecksSection())
    asks.note_silent(RanksPlan(), ["n2"])  # where the run's directory is not known yet
    asks._run_dir = twice_started
    asks.note_silent(RanksPlan(members=("n1", "n2", "n3"), address="10.0.0.1", port=12345, step=10), ["n2"])
    rendezvous = Rendezvous(4, 6, dist.HashStore(), 10.0, rank_zero_host="n1")

    def lose_rank_zero(master: str) -> None:
        watchdog._report_rank_zero_lost(
            rendezvous, RankPosition("training", 20), 0.0, run_dir=twice_started, token=f"by {master}", master=master
        )

    lose_rank_zero("10.0.0.1:12345")
    assert capsys.readouterr().err == ""
    status = read_status(twice_started)
    assert status.attempts[0].reason == "rank 2 on n2 (and 1 more) stopped answering"
    assert [line.split()[1:5] for line in lines_of(status) if "fault" in line] == [["rank", "2", "on", "n2"]]
    lose_rank_zero("10.0.0.1:12346")  # in the next start
    assert "rank 0 of 6 on n1 died" in capsys.readouterr().err
    assert [row["ranks"][0]["host"] for row in read_faults(twice_started)] == ["n2", "n1"]


def test_the_reason_is_the_newest_attempts_with_what_was_kept(twice_started: Path) -> None:
    expected = "stopped by SIGTERM, saved (exit code 75); no checkpoint was written"
    assert reason_of(read_status(twice_started)) == expected
    assert job_reason(twice_started, code=75, environ={}) == expected
    assert job_reason(twice_started, code=0, environ={}) == "finished"
    killed = job_reason(twice_started, code=253, environ={})
    assert killed.startswith("the kernel's out-of-memory killer, host memory is short try: run.async_checkpoints false")
    assert "\n" not in killed


def test_an_earlier_jobs_attempt_is_never_given_as_this_jobs_reason(twice_started: Path) -> None:
    told = job_reason(twice_started, code=2, environ={"SLURM_JOB_ID": "7"})
    assert told.startswith("refused or ended before training began (exit code 2): the error is above")
    append_event(twice_started, "start", attempt="c", job="7", requeue="1")
    append_event(twice_started, "end", attempt="c", code=2, reason="a field is wrong")
    assert job_reason(twice_started, code=2, environ={"SLURM_JOB_ID": "7"}).startswith("refused or ended before")
    again = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert job_reason(twice_started, code=2, environ=again).startswith("a field is wrong (exit code 2)")
    assert job_reason(twice_started / "nowhere", code=2, environ={}).startswith("refused or ended before")


def test_a_run_whose_jobs_wrote_nothing_is_told_by_its_submission(tmp_path: Path) -> None:
    (tmp_path / "submissions/10").mkdir(parents=True)
    (tmp_path / "submissions/9").mkdir()
    (tmp_path / "submissions/9/submission.json").write_text('{"jobs": {"train": ["1"]}}')
    newest = tmp_path / "submissions/10/submission.json"
    newest.write_text('{"jobs": {"data": ["12", "14"], "train": ["15"]}}')
    told = job_reason(tmp_path, code=None, environ={})
    assert "no run has begun there" in told
    assert "data (job 12, 14), train (job 15)" in told
    assert told.endswith(f"try: headrace prep status --config {tmp_path}/submissions/10/configs/data.json")
    assert "above" not in told
    newest.write_text('{"jobs": {"train": ["15"]}}')
    assert job_reason(tmp_path, code=None, environ={}).endswith("try: scontrol show job 15")
    newest.write_text("[" * 100_000)
    assert job_reason(tmp_path, code=None, environ={}).endswith("the directory that run.dir names in its config")


def test_a_damaged_line_of_the_journals_is_skipped_and_told_of(twice_started: Path) -> None:
    journal = twice_started / NAME
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([lines[0], '{"event": "nod', "\n", *lines[2:], '{"event": "sta']))
    with (twice_started / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n[]\n")
    status = read_status(twice_started)
    assert len(status.attempts) == 2
    assert status.damaged_lines == 4
    assert append_event(twice_started, "start", attempt="c")  # on a line of its own, after the half one
    assert len(read_status(twice_started).attempts) == 3


def test_an_attempt_ends_with_its_error_and_only_rank_zero_writes(tmp_path: Path) -> None:
    refusal = ConfigError("run.steps", 3, why="w", remedy="r")
    with pytest.raises(ConfigError), locked_attempt(tmp_path, SINGLE_PROCESS):
        raise refusal
    with locked_attempt(tmp_path, SINGLE_PROCESS) as attempt:
        assert attempt.will_end(0, "finished") == 0
    events, damaged = read_events(tmp_path)
    assert [event["event"] for event in events] == ["start", "end", "start", "end"]
    assert (events[1]["code"], events[1]["reason"], damaged) == (2, "run.steps = 3: w", 0)
    assert events[3]["reason"] == "finished"


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_read_only_directory_has_a_status_and_no_attempt_is_lost_for_it(twice_started: Path) -> None:
    mount = ["mount", "--bind", "-o", "ro", str(twice_started), str(twice_started)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no mounts here")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(twice_started)], check=True)
    try:
        assert read_status(twice_started).step == 30
        assert not append_event(twice_started, "start", attempt="c")
        with pytest.raises(ConfigError, match="cannot be written"), locked_attempt(twice_started, SINGLE_PROCESS):
            pass
    finally:
        subprocess.run(["umount", str(twice_started)], check=True)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run has begun there"):
        read_status(tmp_path)


def test_only_what_was_appended_is_read_and_a_resume_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path, from_step=0)
    reader = MetricsReader(tmp_path)
    for step in (1, 2, 3):
        journal.write("step", step, loss=float(step), seconds=0.5)
        assert (reader.read().step["step"], reader.read().sums.parts[0].step_s) == (step, step * 0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", ')
    assert reader.read().damaged == 0
    journal.close()
    Journal(tmp_path, from_step=1).close()
    assert (reader.read().step["step"], reader.read().sums.parts[0].step_s) == (1, 0.5)


def test_time_left_leaves_the_gap_of_a_restart_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [*steps(1, 10, begin=0, each=2.0), *steps(11, 20, begin=3600, each=2.0)])
    assert seconds_left(MetricsReader(tmp_path).read(), steps=100) == 80 * 2.0


def test_the_merged_log_is_in_the_order_of_time_with_every_source(twice_started: Path) -> None:
    agents = twice_started / ".agents"
    agents.mkdir()
    (agents / "rank-1.log").write_text(f"{at(40)} in the first attempt\nits second line\n{at(110)} in the second\n")
    lines = list(log_lines(merged_log(twice_started)))
    texts = [line.split("  ", 2)[2].strip() for line in lines]
    order = ["start", "in the first attempt", "its second line", "start: world_size 1", "in the second", "held-out"]
    places = [next(i for i, text in enumerate(texts) if wanted in text) for wanted in order]
    assert places == sorted(places)
    assert {line.split("  ")[1].strip() for line in lines} == {"attempt 1", "attempt 2", "rank 0", "rank-1.log"}


def test_the_agents_newest_plan_is_shown_with_who_is_silent_and_left_out(twice_started: Path) -> None:
    folder = twice_started / ".agents"
    folder.mkdir()
    old, new = (
        RanksPlan(1, 1, ("n1", "n2")),
        RanksPlan(2, 2, ("n2",), reason="n1 does not answer", excluded={"n1": "3 faults"}),
    )
    for node, plan in (("n1", old), ("n2", new)):
        StateFiles(folder, node=node, nodes=[node]).write(NodeState(node, plan=plan))
    (folder / "other.json").write_text("{")
    agents = read_status(twice_started).agents
    assert (agents.start, agents.members, agents.reason, agents.silent) == (2, ("n2",), "n1 does not answer", ())
    os.utime(folder / "n2.json", (T0, T0))
    later = read_status(twice_started).agents
    assert later.silent == ("n2",)


def test_under_slurm_the_agents_of_the_newest_start_of_a_job_are_shown(tmp_path: Path) -> None:
    """slurm/ranks.sh gives each start a directory `.agents/JOB.N`."""
    refused = RanksPlan(1, 0, (), reason="start; error: tokens: no such directory\n  try: ...", outcome=2)
    for name, plan, written in (("7.0", RanksPlan(9, 9, ("n1",)), T0), ("14.0", refused, T0 + 100)):
        folder = tmp_path / ".agents" / name
        (folder / "logs").mkdir(parents=True)
        StateFiles(folder, node="n1", nodes=["n1"]).write(NodeState("n1", plan=plan))
        os.utime(folder / "n1.json", (written, written))
        (folder / "n1.log").write_text(f"agent of {name}\n")
        (folder / "logs" / "rank-0.log").write_text(f"rank of {name}\n")
    status = read_status(tmp_path)
    assert (status.agents.outcome, status.agents.members) == (2, ())
    cause = "the agents ended the run with code 2: start; error: tokens: no such directory"
    assert f"        reason  {cause}" in list(lines_of(status))
    assert job_reason(tmp_path, code=None, environ={}) == cause
    texts = {entry.text for entry in merged_log(tmp_path)}
    assert texts == {f"{what} of {name}" for what in ("agent", "rank") for name in ("7.0", "14.0")}


def test_the_reason_of_agents_names_the_error_of_the_first_rank(tmp_path: Path) -> None:
    failed = """
import sys
from foundation.cli import guarded
from foundation.errors import DataError
def fail():
    raise DataError("tokens directory /x does not exist\\n  try: make it")
sys.exit(guarded(fail))
"""
    plan = RanksPlan(1, 1, ("n1",))
    ranks = LocalRanks(Command([sys.executable, "-c", failed], 1, tmp_path / ".agents/logs"), plan, "n1")
    ranks.start()
    wait_until(lambda: not ranks.running)
    ended = replace(plan, version=2, reason=ranks.error(), outcome=2)
    StateFiles(tmp_path / ".agents", node="n1", nodes=["n1"]).write(NodeState("n1", plan=ended))
    said = job_reason(tmp_path, code=None, environ={})
    assert said.endswith("rank 0 on n1 ended with code 2: error: tokens directory /x does not exist; try: make it")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("error: run.dir = '/x'\n  why: it is full\n  try: another", "error: run.dir = '/x'; why: it is full"),
        ('Traceback:\n  File "a.py"\nValueError: bad\nwarning: resources', "ValueError: bad"),
        ("[rank1]: torch.OutOfMemoryError: 3 GB\nframe #1", "[rank1]: torch.OutOfMemoryError: 3 GB"),
        ("usage: x\ntrain.py: error: no such option", "train.py: error: no such option"),
        ("python: can't open file", "python: can't open file"),
        ("", ""),
    ],
)
def test_the_cause_of_an_output_is_one_line(text: str, cause: str) -> None:
    assert cause_of(text) == cause


def test_the_agents_of_an_earlier_start_do_not_explain_the_end_of_a_later_one(twice_started: Path) -> None:
    folder = twice_started / ".agents/7.0"
    folder.mkdir(parents=True)
    before = reason_of(read_status(twice_started))
    ended = NodeState("n1", plan=RanksPlan(1, 1, ("n1",), reason="too few nodes", outcome=2))
    StateFiles(folder, node="n1", nodes=["n1"]).write(ended)
    os.utime(folder / "n1.json", (T0 - 1000, T0 - 1000))
    assert reason_of(read_status(twice_started)) == before


def test_the_output_of_a_job_that_never_trained_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "submissions/2/logs"
    logs.mkdir(parents=True)
    (logs / "train-5.out").write_text("error: no such directory\n")
    with pytest.raises(DataError, match=r"its last job wrote \S+/submissions/2/logs/train-5.out\n  try: .* --log"):
        read_status(tmp_path)
    show_log(tmp_path)
    assert "train-5.out  error: no such directory" in capsys.readouterr().out


def test_json_of_a_status_is_json(twice_started: Path) -> None:
    found = json.loads(json.dumps(read_status(twice_started).plain()))
    assert found["goodput"]["share"] == 30 / 125
    assert found["attempts"][0]["nodes"] == {"n1": "0", "n2": "1"}
    assert isinstance(RunReader(twice_started, slurm=False).read(), RunStatus)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "higher priority"),
        ("(ReqNodeNotAvail, UnavailableNodes:n1)", "down, drained or reserved"),
        ("QOSMaxJobsPerUserLimit", "limit of its QOS"),
        ("AssocGrpCPUMinutesLimit", "limit of its account"),
        ("None", ""),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reasons_of_slurm_are_put_in_words(reason: str, words: str) -> None:
    assert words in in_words(reason)
    assert in_words("None") == ""


def test_a_refusal_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        raise ConfigError("run.steps", 3, why="w", remedy="r")

    assert guarded(refused) == 2
    assert "reason:" not in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert guarded(refused) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "reason: run.steps = 3: w"


def test_a_status_imports_neither_torch_nor_numpy(twice_started: Path) -> None:
    code = (
        "import sys; from headrace.commands.app import main; sys.argv[1:] = ['status', sys.argv[1]]\n"
        "import os; os._exit = lambda code: print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(twice_started)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert "goodput  24.0 % of 0:02:05 in 2 attempts: start-up 32.0 %" in done.stdout


def test_without_slurm_there_are_no_jobs(twice_started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("squeue") is None
    append_event(twice_started, "start", attempt="c", job="7")
    assert RunReader(twice_started).read().jobs == ()


def test_the_last_exchange_of_islands_is_shown_and_samples_that_were_lost(tmp_path: Path) -> None:
    row = {"kind": "event", "event": "exchange", "time": at(1), "islands": ["a"], "bytes_sent": 2_500_000}
    costs = {"seconds": 0.5, "wait_seconds": 4.0}
    rows = [
        {**row, **costs, "step": 5, "round": 1, "lost": {"b": [40, 79]}},
        {**row, **costs, "step": 10, "round": 2, "lost": {}},
    ]
    write_lines(tmp_path / "metrics.jsonl", [*steps(1, 10, begin=0), *rows])
    text = "\n".join(lines_of(read_status(tmp_path)))
    assert "exchange 2 after step 10 with a: 2.5 MB sent, 0.50 s, waited 4.00 s for others" in text
    assert "samples lost at step 5: 40 to 79 of b" in text
