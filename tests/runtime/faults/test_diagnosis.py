"""The diagnosis of dead, hung and failed ranks, and its report; a lost rank is told by types, never by words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from foundation.cli import guarded
from foundation.errors import EXIT_LOST, ConfigError, LostError
from foundation.link_errors import is_link_error
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.diagnosis import (
    SETTLE_S,
    Diagnosis,
    RankStatus,
    diagnose,
    in_debugger,
    is_waiting,
    parse_faulthandler_dump,
)
from pipeline.runtime.faults.flight_recorder import describe_pending
from pipeline.runtime.faults.heartbeat_connection import heartbeat_interval, heartbeat_timeout
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder, encode
from pipeline.runtime.faults.monitor import PendingCollective, RankPosition
from pipeline.runtime.faults.report import append_fault_once, describe_fault, fault_row, read_faults
from pipeline.runtime.goodput.attempts import fault_line
from pipeline.runtime.launch.group import free_port
from tests.conftest import ROOT

NOW = 1000.0
WAITING = ("torch/distributed/distributed_c10d.py:3252 in all_reduce", "pipeline/run/trainer.py:88 in go")
WORKING = ("pipeline/data/loader.py:40 in read", "pipeline/run/trainer.py:80 in go")
TRAINING = RankStatus(
    0,
    "node01",
    100,
    last_heartbeat=NOW,
    last_progress=NOW,
    transitions=9,
    step=17,
    phase="training",
    stack=WAITING,
)


def ranks(*changes: dict[str, object]) -> list[RankStatus]:
    """Statuses of ranks 0, 1, ...: each a rank in training with some fields changed."""
    return [
        replace(TRAINING, rank=rank, pid=100 + rank, **change)  # type: ignore[arg-type]
        for rank, change in enumerate(changes)
    ]


def diagnosis_of(statuses: list[RankStatus], now: float = NOW) -> Diagnosis | None:
    return diagnose(statuses, now, silent_s=60.0, stuck_s=1500.0)


def test_a_run_is_healthy_while_all_ranks_send_heartbeats_and_one_makes_progress() -> None:
    assert diagnosis_of(ranks({}, {"last_heartbeat": NOW - 59, "last_progress": NOW - 9999})) is None


def test_a_rank_that_waits_in_a_collective_inside_our_own_code_is_told_from_one_that_is_stuck_there() -> None:
    stack = ("pipeline/engines/base.py:9 in read_loss", "pipeline/run/trainer.py:88 in train")
    hung: dict[str, object] = {"last_progress": NOW - 1600, "stack": stack}
    waiting = hung | {"collective": "nccl:all_reduce 7 of mesh_tp, BFloat16 [64]"}
    statuses = ranks(waiting, hung, waiting, waiting)
    found = diagnosis_of(statuses)
    assert found == Diagnosis("stuck", (1,), 1600.0)
    text = describe_fault(found, {status.rank: status for status in statuses}, world_size=4)
    assert "rank 1 is in no collective that is known" in text
    assert "waiting in nccl:all_reduce 7 of mesh_tp, BFloat16 [64]: ranks 0, 2-3" in text


def test_a_rank_asks_which_collective_it_is_in_only_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], []
    monkeypatch.setattr("pipeline.runtime.faults.monitor.time.monotonic", lambda: now[0])

    def ask() -> str:
        asked.append(now[0])
        if len(asked) == 3:
            raise RuntimeError("a recorder of another form")
        return "nccl:all_reduce 7"

    pending = PendingCollective(ask, idle_s=10.0)
    at_work = RankPosition("training", 5, 9)
    assert pending.changed(at_work) is None
    told = []
    for _ in range(35):  # one heartbeat per second
        now[0] += 1.0
        told.append(pending.changed(at_work))
    assert asked == [110.0, 120.0, 130.0]
    assert [text for text in told if text is not None] == ["nccl:all_reduce 7"]
    assert pending.changed(at_work.moved_to("training", 6)) == ""


def test_the_oldest_collective_that_has_not_ended_is_described() -> None:
    done = {"profiling_name": "nccl:all_gather", "collective_seq_id": 1, "state": "completed", "time_created_ns": 1}
    first = {
        "profiling_name": "nccl:reduce_scatter",
        "collective_seq_id": 41,
        "process_group": ["5", "mesh_shard"],
        "input_dtypes": ["BFloat16"] * 3,
        "input_sizes": [[64, 8], [8], [8]],
        "state": "started",
        "time_created_ns": 5,
    }
    send = {"profiling_name": "nccl:send 0->1", "is_p2p": True, "p2p_seq_id": 3, "state": "scheduled"}
    later = {**send, "process_group": ["0", ""], "time_created_ns": 9}
    text = "nccl:reduce_scatter 41 of mesh_shard, BFloat16 [64, 8], BFloat16 [8] and 1 more"
    assert describe_pending([{"entries": [done, later, first]}, {}]) == text
    assert describe_pending([{"entries": [done, later]}]) == "nccl:send 0->1 3 of 0"
    assert describe_pending([{"entries": [done, {**later, "retired": True}]}]) == ""


def test_a_rank_that_disconnects_without_signing_off_has_died() -> None:
    assert diagnosis_of(ranks({}, {"disconnected": True, "finished": True}, {})) is None
    assert diagnosis_of(ranks({}, {"disconnected": True, "last_heartbeat": NOW - 0.5}, {})) == Diagnosis(
        "died", (1,), 0.5
    )


def test_all_ranks_of_a_lost_host_are_named_together() -> None:
    lost = {"host": "node02", "last_heartbeat": NOW - 61.0}
    found = diagnosis_of(ranks({}, {}, lost, lost, lost))
    assert found == Diagnosis("silent", (2, 3, 4), 61.0)
    text = describe_fault(found, {status.rank: status for status in ranks({}, {}, lost, lost, lost)}, world_size=5)
    assert "rank 2 of 5 on node02 (pid 102) has sent no heartbeat for 61.0 s" in text
    assert "the same for ranks 3-4" in text
    assert "the others: ranks 0-1 at step 17, in training" in text


def test_an_error_is_the_cause_and_closed_connections_are_secondary() -> None:
    secondary = {"error": "RuntimeError: Connection closed by peer", "secondary": True, "error_time": NOW - 0.1}
    cause = {"error": "ValueError: boom", "error_time": NOW}
    assert diagnosis_of(ranks(secondary, secondary)) is None  # the cause may still be reported
    assert diagnosis_of(ranks(secondary, cause)) == Diagnosis("failed", (1,), 0.0)
    assert diagnosis_of(ranks(secondary, {"disconnected": True})) == Diagnosis("died", (1,), 0.0)


def test_a_broken_link_is_reported_where_ranks_lost_each_other_and_none_is_the_cause() -> None:
    statuses = ranks({"error": "RuntimeError: Connection closed by peer", "secondary": True, "error_time": NOW}, {})
    found = diagnosis_of(statuses, NOW + SETTLE_S + 0.1)
    assert (found.kind, found.ranks) == ("lost", (0,))
    text = describe_fault(found, {status.rank: status for status in statuses}, world_size=4)
    assert "rank 0 of 4 on node01 (pid 100) lost its connection to another rank" in text
    assert "no heartbeat was ever received from ranks 2-3: check these first" in text


@pytest.mark.parametrize(
    "symptom", [{"disconnected": True}, {"error": "DistBackendError: x", "secondary": True, "error_time": NOW - 3}]
)
def test_a_host_without_power_is_named_and_not_ranks_that_nccl_ended_because_of_it(symptom: dict[str, object]) -> None:
    # the timeout is 60 s; a call may hold the interpreter lock, which leaves one heartbeat every 30 s
    assert diagnosis_of(ranks(symptom, {}, {"last_heartbeat": NOW - 33.0})) == Diagnosis("silent", (2,), 33.0)
    found = diagnosis_of(ranks(symptom, {}, {"last_heartbeat": NOW - 31.0}))
    assert found.ranks == (0,)


def test_with_many_ranks_the_timeout_is_several_heartbeat_intervals() -> None:
    limits = WatchdogSection(heartbeat_timeout=60.0)
    assert heartbeat_timeout(limits, 8) == 60.0
    assert heartbeat_timeout(limits, 7680) == 4 * heartbeat_interval(7680) == 120.0


def test_of_ranks_without_progress_the_one_that_is_behind_is_named() -> None:
    hung = {"last_progress": NOW - 1600.0}
    assert diagnosis_of(ranks(hung, hung | {"transitions": 8, "phase": "reading data"}, hung)) == Diagnosis(
        "stuck", (1,), 1600.0
    )


def test_of_ranks_at_the_same_position_the_one_that_is_not_waiting_for_others_is_named() -> None:
    hung = {"last_progress": NOW - 1600.0}
    assert diagnosis_of(ranks(hung, hung, hung | {"stack": WORKING})) == Diagnosis("stuck", (2,), 1600.0)


def test_all_ranks_are_named_where_none_differs() -> None:
    hung = {"last_progress": NOW - 1600.0}
    assert diagnosis_of(ranks(hung, hung)) == Diagnosis("stuck", (0, 1), 1600.0)


def test_a_rank_in_a_debugger_does_not_count_as_hung() -> None:
    stack = ("python3.11/bdb.py:90 in trace_dispatch", *WORKING)
    assert in_debugger(stack)
    assert diagnosis_of(ranks({"last_progress": NOW - 9999.0, "stack": stack})) is None


def test_a_dump_of_faulthandler_is_parsed_to_the_same_lines_as_our_own_stack() -> None:
    dump = [
        "Timeout (0:00:20)!",
        "Thread 0x00007f0000000001 (most recent call first):",
        '  File "/usr/lib/python3.11/selectors.py", line 468 in select',
        "",
        "Thread 0x00007f0000000002 (most recent call first):",
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce',
        '  File "/home/me/headrace/pipeline/run/trainer.py", line 88 in go',
    ]
    stack = parse_faulthandler_dump(dump, thread=0x7F0000000002)
    assert stack == (
        "torch/distributed/distributed_c10d.py:3252 in all_reduce",
        "pipeline/run/trainer.py:88 in go",
    )
    assert is_waiting(stack)
    assert not is_waiting(WORKING)


def test_messages_are_decoded_however_they_are_split_and_with_other_text_between_them() -> None:
    data = encode({"step": 1}) + b"Timeout (0:00:20)!\n" + encode({"step": 2})
    decoder = MessageDecoder()
    messages = [message for byte in data for message in decoder.feed(bytes([byte]))]
    assert messages == [{"step": 1}, "Timeout (0:00:20)!", {"step": 2}]


def test_only_one_of_several_ranks_that_report_a_fault_records_it(tmp_path: Path) -> None:
    statuses = {status.rank: status for status in ranks({}, {"disconnected": True, "last_heartbeat": NOW - 0.5})}
    row = fault_row(Diagnosis("died", (1,), 0.5), statuses, world_size=2)
    assert [append_fault_once(tmp_path, row, token="a") for _ in range(2)] == [True, False]
    assert append_fault_once(tmp_path, row, token="of another start")
    first, _ = read_faults(tmp_path)
    assert (first["event"], first["fault"], first["step"]) == ("fault", "died", 17)
    assert first["ranks"][0] | {"stack": None} == {
        "rank": 1, "host": "node01", "pid": 101, "step": 17, "phase": "training", "stack": None,
    }  # fmt: skip


def test_the_row_of_thousands_of_lost_ranks_is_small(tmp_path: Path) -> None:
    lost = ranks(*({"disconnected": True, "last_heartbeat": NOW - 0.5} for _ in range(8192)))
    diagnosis = Diagnosis("died", tuple(range(8, 8192)), 0.5)
    row = fault_row(diagnosis, {status.rank: status for status in lost}, world_size=8192)
    assert append_fault_once(tmp_path, row, token="a")
    assert (tmp_path / "faults.jsonl").stat().st_size < 16_384
    [found] = read_faults(tmp_path)
    assert (len(found["ranks"]), found["further"], found["further_ranks"]) == (16, 8168, "ranks 24-8191")
    assert fault_line(found).startswith("rank 8 on node01 (and 8,183 more) was killed or crashed")


def test_a_directory_that_cannot_be_written_does_not_suppress_the_report(tmp_path: Path) -> None:
    assert append_fault_once(tmp_path / "nowhere", {"event": "fault"}, token="a")


CALLS = ("all_reduce", "send_and_receive", "gather_objects", "store_wait", "store_set", "deepspeed_collective")
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"

LOOKALIKES = [
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    RuntimeError("CUDA error: peer mapping resources exhausted"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionRefusedError(111, "Connection refused"),  # e.g. of a tracking service
    ConnectionResetError(104, "Connection reset by peer"),
    OSError("remote process closed the connection"),
    ValueError(GLOO),
    RuntimeError(f"the tokenizer has read: {GLOO}"),
    RuntimeError("[enforce fail at /pytorch/third_party/gloo/gloo/allreduce.cc:33] n > 0. 0 vs 0"),
    ConfigError("run.dir", "peer", why="connection refused", remedy="broken pipe"),
]


@pytest.mark.integration
@pytest.mark.parametrize("call", CALLS)
def test_what_is_raised_where_the_other_rank_was_killed_is_a_link_error(call: str) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "tests.runtime.faults.broken_link"]
    killed = subprocess.Popen([*command, "1", port, call], cwd=ROOT, stderr=subprocess.DEVNULL)
    done = subprocess.run(
        [*command, "0", port, call], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert killed.wait(120) == -9
    raised = json.loads(done.stdout.splitlines()[-1])
    assert raised["secondary"], raised


@pytest.mark.parametrize("error", LOOKALIKES, ids=lambda error: str(error)[:40])
def test_words_such_as_peer_do_not_make_an_error_one_of_a_lost_rank(error: Exception) -> None:
    assert not is_link_error(error)


@pytest.mark.parametrize(
    "error",
    [dist.DistBackendError("NCCL error"), dist.DistNetworkError("x"), dist.DistStoreError("x"), RuntimeError(GLOO)],
    ids=lambda error: type(error).__name__,
)
def test_a_link_error_has_the_exit_code_of_a_lost_rank(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert is_link_error(error)
    assert guarded(fail) == EXIT_LOST
    assert "Traceback" in capsys.readouterr().err
    assert is_link_error(LostError("rank 1 did not answer"))
