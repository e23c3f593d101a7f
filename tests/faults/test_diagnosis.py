"""Who is blamed, by what the ranks have told; and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.schema import WatchdogSection
from pipeline.faults.diagnosis import SETTLE_S, Diagnosis, RankStatus, diagnose
from pipeline.faults.heartbeat_messages import Lines, line
from pipeline.faults.rendezvous import heartbeat_interval, heartbeat_timeout
from pipeline.faults.report import claim, describe_fault, read_faults, row
from pipeline.faults.stack_dumps import debugged, parsed, waits

NOW = 1000.0
WAITS = ("torch/distributed/distributed_c10d.py:3252 in all_reduce", "pipeline/run/trainer.py:88 in go")
WORKS = ("pipeline/data/loader.py:40 in read", "pipeline/run/trainer.py:80 in go")
TRAINING = RankStatus(0, "node01", 100, heard=NOW, moved=NOW, places=9, step=17, phase="training", stack=WAITS)


def ranks(*changes: dict[str, object]) -> list[RankStatus]:
    """Records of ranks 0, 1, ... that differ from a rank in training as said."""
    return [
        replace(TRAINING, rank=rank, pid=100 + rank, **change)  # type: ignore[arg-type]
        for rank, change in enumerate(changes)
    ]


def verdict(records: list[RankStatus], now: float = NOW) -> Diagnosis | None:
    return diagnose(records, now, silent_s=60.0, stuck_s=1500.0)


def test_nothing_is_wrong_while_all_are_heard_and_somebody_moves() -> None:
    assert verdict(ranks({}, {"heard": NOW - 59, "moved": NOW - 9999})) is None


def test_a_connection_that_closes_without_goodbye_is_a_death() -> None:
    assert verdict(ranks({}, {"gone": True, "left": True}, {})) is None
    assert verdict(ranks({}, {"gone": True, "heard": NOW - 0.5}, {})) == Diagnosis("died", (1,), 0.5)


def test_all_ranks_of_a_host_that_is_gone_are_named_together() -> None:
    away = {"host": "node02", "heard": NOW - 61.0}
    found = verdict(ranks({}, {}, away, away, away))
    assert found == Diagnosis("silent", (2, 3, 4), 61.0)
    text = describe_fault(found, {record.rank: record for record in ranks({}, {}, away, away, away)}, world_size=5)
    assert "rank 2 of 5 on node02 (pid 102) has been silent for 61.0 s" in text
    assert "the same of ranks 3-4" in text
    assert "the others: ranks 0-1 at step 17, in training" in text


def test_an_error_is_the_cause_and_closed_connections_its_consequence() -> None:
    consequence = {"failed": "RuntimeError: Connection closed by peer", "consequence": True, "failed_at": NOW - 0.1}
    cause = {"failed": "ValueError: boom", "failed_at": NOW}
    assert verdict(ranks(consequence, consequence)) is None  # the cause may still be told
    assert verdict(ranks(consequence, cause)) == Diagnosis("failed", (1,), 0.0)
    assert verdict(ranks(consequence, {"gone": True})) == Diagnosis("died", (1,), 0.0)


def test_where_ranks_lost_each_other_and_none_is_the_cause_the_link_is() -> None:
    records = ranks({"failed": "RuntimeError: Connection closed by peer", "consequence": True, "failed_at": NOW}, {})
    found = verdict(records, NOW + SETTLE_S + 0.1)
    assert found is not None
    assert (found.kind, found.ranks) == ("lost", (0,))
    text = describe_fault(found, {record.rank: record for record in records}, world_size=4)
    assert "rank 0 of 4 on node01 (pid 100) lost its link to another rank" in text
    assert "never heard, so look at them first: ranks 2-3" in text


@pytest.mark.parametrize(
    "seen", [{"gone": True}, {"failed": "DistBackendError: x", "consequence": True, "failed_at": NOW - 3}]
)
def test_a_host_without_power_is_named_and_not_whom_nccl_ended_for_it(seen: dict[str, object]) -> None:
    # 60 s of silence are borne; a call may keep the interpreter's lock, and with it all signs of life but every 30 s
    assert verdict(ranks(seen, {}, {"heard": NOW - 33.0})) == Diagnosis("silent", (2,), 33.0)
    found = verdict(ranks(seen, {}, {"heard": NOW - 31.0}))
    assert found is not None
    assert found.ranks == (0,)


def test_with_many_ranks_silence_is_longer_than_several_beats() -> None:
    limits = WatchdogSection(heartbeat_timeout=60.0)
    assert heartbeat_timeout(limits, 8) == 60.0
    assert heartbeat_timeout(limits, 7680) == 4 * heartbeat_interval(7680) == 120.0


def test_of_ranks_that_all_stand_still_the_one_that_is_behind_is_named() -> None:
    still = {"moved": NOW - 1600.0}
    assert verdict(ranks(still, still | {"places": 8, "phase": "reading data"}, still)) == Diagnosis(
        "stuck", (1,), 1600.0
    )


def test_of_ranks_at_the_same_place_the_one_that_does_not_wait_for_others_is_named() -> None:
    still = {"moved": NOW - 1600.0}
    assert verdict(ranks(still, still, still | {"stack": WORKS})) == Diagnosis("stuck", (2,), 1600.0)


def test_where_nobody_differs_all_are_named() -> None:
    still = {"moved": NOW - 1600.0}
    assert verdict(ranks(still, still)) == Diagnosis("stuck", (0, 1), 1600.0)


def test_a_person_in_a_debugger_may_take_any_time() -> None:
    stack = ("python3.11/bdb.py:90 in trace_dispatch", *WORKS)
    assert debugged(stack)
    assert verdict(ranks({"moved": NOW - 9999.0, "stack": stack})) is None


def test_a_stack_that_faulthandler_wrote_reads_as_our_own() -> None:
    dump = [
        "Timeout (0:00:20)!",
        "Thread 0x00007f0000000001 (most recent call first):",
        '  File "/usr/lib/python3.11/selectors.py", line 468 in select',
        "",
        "Thread 0x00007f0000000002 (most recent call first):",
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce',
        '  File "/home/me/headrace/pipeline/run/trainer.py", line 88 in go',
    ]
    stack = parsed(dump, thread=0x7F0000000002)
    assert stack == (
        "torch/distributed/distributed_c10d.py:3252 in all_reduce",
        "pipeline/run/trainer.py:88 in go",
    )
    assert waits(stack)
    assert not waits(WORKS)


def test_messages_survive_any_cut_and_other_text_between_them() -> None:
    sent = line({"step": 1}) + b"Timeout (0:00:20)!\n" + line({"step": 2})
    lines = Lines()
    got = [message for byte in sent for message in lines.feed(bytes([byte]))]
    assert got == [{"step": 1}, "Timeout (0:00:20)!", {"step": 2}]


def test_of_many_who_report_a_fault_one_is_first_and_its_row_says_all(tmp_path: Path) -> None:
    records = {record.rank: record for record in ranks({}, {"gone": True, "heard": NOW - 0.5})}
    entry = row(Diagnosis("died", (1,), 0.5), records, world_size=2)
    assert [claim(tmp_path, entry, token="a"), claim(tmp_path, entry, token="a")] == [True, False]
    assert claim(tmp_path, entry, token="of another start")
    first, _ = read_faults(tmp_path)
    assert (first["event"], first["fault"], first["step"]) == ("fault", "died", 17)
    assert first["ranks"][0] | {"stack": None} == {
        "rank": 1, "host": "node01", "pid": 101, "step": 17, "phase": "training", "stack": None,
    }  # fmt: skip


def test_a_directory_that_cannot_be_written_does_not_keep_a_report_back(tmp_path: Path) -> None:
    assert claim(tmp_path / "nowhere", {"event": "fault"}, token="a")
