"""Journal of attempts `attempts.jsonl`: when each start of a run began, where it resumed, and how it ended.

Rows of `metrics.jsonl` belong to steps and are removed on resume; these rows stay. Rank 0 appends them while it holds
the lock of the run's directory; `headrace status` reads them.

| event | written | fields besides `time`, `attempt` |
|---|---|---|
| start | once the directory is locked | see below |
| nodes | once all ranks are connected | `nodes`: host -> ranks, e.g. {"n1": "0-3"} |
| loaded | once a checkpoint is loaded | `step`, `seconds` of the load, `read` (bytes, see below), `warnings` |
| lost | before a resume or a rollback removes rows | `step` after which they are removed, `steps`, `seconds`, ... |
| training | before the first step | `step` after which it trains on |
| goodput | once training has ended | seconds of the run so far, by what they were spent on |
| measured | before an end that is not a failure | see `pipeline.run.hooks.measured` |
| end | when it ends by itself | `code`, `reason` |

The fields of a start: `launcher`, `world_size`, `host`, `pid`; `process_start`, when the process began; under Slurm
`job`, `requeue`, `nodelist`; `again`, the launcher's own count of starts; `before`, the last step in metrics.jsonl and
the time of its last row.

There is an event `lost` for each attempt whose rows are removed. It has the times of the first and the last removed row
(`since`, `until`), the `seconds` of the steps, of which `compile_seconds` were compilation, and `evaluation_seconds`,
`checkpoint_seconds`, `exchange_seconds`. The categories of `goodput`: `pipeline.runtime.goodput.account.TimeSpent`.

`read` has the bytes that all ranks have read to verify and to load the checkpoint: from copies in their own node's
memory (`memory`) or another node's (`other_nodes`), and from the run's directory (`run_dir`, without metadata).

An attempt without an end was killed or ended by the watchdog: then `faults.jsonl` has the cause. A failure to append
never ends a run.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from foundation.errors import EXIT_INTERRUPTED, EXIT_LOST, HeadraceError
from foundation.link_errors import is_link_error
from foundation.processes import seconds_since_start
from pipeline.runtime.goodput.account import read_goodput
from pipeline.runtime.goodput.text import goodput_line
from pipeline.runtime.launch import Launch, Rendezvous
from pipeline.runtime.launch.environment import AGENT_STARTS, RANK_STARTED
from pipeline.runtime.launch.run_lock import exclusive_run
from pipeline.runtime.metrics.attempts_journal import append_event, parse_row
from pipeline.runtime.metrics.journal import NAME as METRICS
from pipeline.runtime.metrics.time_sums import TimeSums
from pipeline.runtime.metrics.times import iso_time

_SLURM = {"job": "SLURM_JOB_ID", "requeue": "SLURM_RESTART_COUNT", "nodelist": "SLURM_JOB_NODELIST"}
_AGAIN = (AGENT_STARTS, "TORCHELASTIC_RESTART_COUNT")
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of the metrics: more than any row."""


class Attempt:
    """Appends the events of one attempt; does nothing if `run_dir` is None, as on all ranks but rank 0.

    Attributes:
        nodes: number of nodes of the run, set once all ranks are connected, on rank 0 only.
        tell_ranks: tells the other ranks of an error that ends this process; None until it is set.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.nodes = 1
        self._run_dir, self._id, self._accounted = run_dir, secrets.token_hex(4), True
        self._outcome: tuple[int, str] = 0, "finished"
        self.tell_ranks: Callable[[BaseException], None] = lambda _error: None

    def record(self, event: str, **fields: Any) -> None:
        """Appends an event."""
        if self._run_dir is not None:
            append_event(self._run_dir, event, attempt=self._id, **fields)

    def connected(self, launch: Launch, rendezvous: Rendezvous | None) -> None:
        """Records which hosts have which ranks."""
        if self._run_dir is not None:
            nodes = nodes_of(launch, rendezvous)
            self.nodes = len(nodes)
            self.record("nodes", nodes=nodes)

    def lost(self, step: int, removed: Sequence[TimeSums]) -> None:
        """Records the rows of steps that are about to be removed from the metrics."""
        for part in removed:
            since, until = (iso_time(each) for each in (part.since or 0.0, part.until or 0.0))
            self.record("lost", step=step, since=since, until=until, **part.lost())

    def training(self, step: int) -> None:
        """Records that the first step is about to begin."""
        self._accounted = False
        self.record("training", step=step)

    def account(self) -> str | None:
        """Records the run's goodput; returns a line that reports it, or None where the goodput is unknown."""
        self._accounted = True
        if self._run_dir is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged file must not keep a run from ending
            goodput = read_goodput(self._run_dir, training=True)
            if goodput is not None:
                self.record("goodput", **goodput.row())
                return goodput_line(goodput)
        return None

    def will_end(self, code: int, reason: str) -> int:
        """Sets how the attempt ends if no error ends it first; returns the exit code."""
        self._outcome = code, reason
        return code

    def end(self, error: BaseException | None) -> None:
        """Appends the end of the attempt."""
        code, reason = self._outcome if error is None else outcome_of(error)
        if not self._accounted:
            self.account()
        self.record("end", code=code, reason=reason)


@contextmanager
def locked_attempt(
    run_dir: Path, launch: Launch, *, holding: AbstractContextManager[object] | None = None
) -> Iterator[Attempt]:
    """Locks a run's directory on rank 0, and records the start and the end of an attempt there.

    Args:
        run_dir: the run's directory.
        launch: launcher and rank of this process.
        holding: context entered once the directory is locked, and left after the attempt's end is recorded.

    Raises:
        ConfigError: another process trains in the directory, or it cannot be written.
    """
    attempt = Attempt(run_dir if launch.rank == 0 else None)
    lock = exclusive_run(run_dir, lost=lambda error: attempt.tell_ranks(error))  # noqa: PLW0108  it is set later
    with lock if launch.rank == 0 else nullcontext(), holding or nullcontext():
        attempt.record("start", **_start(run_dir, launch))
        try:
            yield attempt
        except BaseException as error:
            attempt.end(error)
            raise
        attempt.end(None)


def outcome_of(error: BaseException) -> tuple[int, str]:
    """Returns the exit code with which entry points end for an error (`foundation.cli.guarded`), and its first line."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted (SIGINT)"
    first = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, HeadraceError):
        return error.exit_code, error.cause
    return EXIT_LOST if is_link_error(error) else 1, f"{type(error).__name__}: {first}"


def nodes_of(launch: Launch, rendezvous: Rendezvous | None) -> dict[str, str]:
    """Reads host -> its ranks, e.g. {"n1": "0-3", "n2": "4-7"}; on rank 0 only, by one request to the store."""
    hosts = rendezvous.hosts() if rendezvous is not None else {0: socket.gethostname()}
    found: dict[str, list[int]] = {}
    for rank in range(launch.world_size):
        found.setdefault(hosts.get(rank, "?"), []).append(rank)
    return {host: _ranges(ranks) for host, ranks in found.items()}


def _ranges(ranks: list[int]) -> str:
    members = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in members]
    ends = [rank for rank in ranks if rank + 1 not in members]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _start(run_dir: Path, launch: Launch) -> dict[str, Any]:
    again = next((os.environ[name] for name in _AGAIN if name in os.environ), None)
    return {
        "launcher": launch.launcher,
        "world_size": launch.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": iso_time(float(os.environ.get(RANK_STARTED, time.time() - seconds_since_start()))),
        **{key: os.environ[name] for key, name in _SLURM.items() if name in os.environ},
        **({} if again is None else {"again": again}),
        **({} if (before := _last_row(run_dir)) is None else {"before": before}),
    }


def _last_row(run_dir: Path) -> dict[str, Any] | None:
    """Reads the last step in the metrics, before a resume may remove it, and the time of their last row.

    A checkpoint's row has the step of its state, and may follow rows of later steps.
    """
    with suppress(OSError), (run_dir / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        rows = [row for line in file if (row := parse_row(line, key="time")) is not None and "step" in row]
        if rows:
            return {"step": max(row["step"] for row in rows), "time": rows[-1]["time"]}
    return None
