"""The text that `headrace status` prints for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foundation.task_figures import figures_line
from pipeline.cluster.status.reason import agents_ended, reason_of
from pipeline.cluster.status.run import RunStatus, Uploading
from pipeline.cluster.status.slurm import QueuedJob
from pipeline.config.shares import shown
from pipeline.runtime.goodput.attempts import RecordedAttempt, fault_line
from pipeline.runtime.goodput.text import goodput_text
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.times import clock

_SHOWN = 5
"""Number of faults and of attempts that are printed; --json has all."""
_NODES = 8


def lines_of(status: RunStatus) -> Iterator[str]:
    """Yields the lines of a status, each with its label."""
    yield line("run", str(status.dir) if status.uploads is None else f"{status.uploads.url}, on this host {status.dir}")
    for job in status.jobs:
        yield line("Slurm job", job_line(job))
    yield from _progress(status)
    if status.exchange is not None:
        yield line("islands", _exchange(status.exchange))
    yield line("checkpoint", _checkpoint(status))
    if status.uploads is not None:
        yield from _uploads(status.uploads)
    yield line("process", _process(status))
    yield from _place(status)
    yield from _read(status.attempts)
    yield from _attempts(status.attempts)
    for fault in status.faults[-_SHOWN:]:
        yield line("fault", _fault(fault))
    if len(status.faults) > _SHOWN:
        yield line("", f"and {len(status.faults) - _SHOWN} earlier ones; --json lists all")
    if status.damaged_lines:
        yield line("journals", f"{status.damaged_lines} damaged lines were skipped")
    if agents_ended(status) or (status.attempts and status.attempts[-1].ended is not None):
        yield line("reason", reason_of(status))


def job_line(job: QueuedJob) -> str:
    """Formats a job's state, and why it waits."""
    if job.state == "PENDING":
        start = f", expected to start at {job.start}" if job.start not in ("", "N/A") else ""
        why = f": {job.why}" if job.why else ""
        return f"{job.id} waits{why} ({job.reason}){start}"
    where = f" on {job.nodelist}" if job.nodelist else ""
    left = f", {job.left} until its time limit" if job.state == "RUNNING" and job.left else ""
    why = f": {job.why}" if job.why and job.state != "RUNNING" else ""
    return f"{job.id} {job.state}{why}{where}, for {job.elapsed}{left}"


def step_text(status: RunStatus) -> str:
    """Formats the newest step and its share of the run: "7 of 20 (35 %)"."""
    if not status.steps:
        return f"{status.step:,}"
    return f"{status.step:,} of {status.steps:,} ({100 * status.step / status.steps:.0f} %)"


def state_text(status: RunStatus) -> str:
    """Names the state of a run in one or two words, for a table."""
    if status.training:
        return "training"
    waiting = next((job for job in status.jobs if job.state == "PENDING"), None)
    if waiting is not None:
        return "waits"
    if status.finished:
        return "finished"
    return "unknown" if status.training is None else "stopped"


def ago(seconds: float) -> str:
    """Formats a time in the past, in its largest unit."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


def line(label: str, text: str) -> str:
    """Formats a line with its label."""
    return f"{label:>14}  {text}"


def _progress(status: RunStatus) -> Iterator[str]:
    yield line("step", step_text(status))
    if status.loss is not None:
        yield line("loss", f"{status.loss:.4f} nats/token")
    if status.heldout_loss is not None:
        yield line("held-out loss", f"{status.heldout_loss:.4f} nats/token")
    for task, figures in status.tasks.items():
        yield line("task", f"{task}: {figures_line(figures)} at step {figures['step']:,}")
    if status.tokens_per_second is not None:
        mfu = "" if status.mfu is None else f", MFU {status.mfu:.1%}"
        yield line("speed", f"{status.tokens_per_second:,.0f} tokens/s{mfu}")
    if status.shares:
        yield line("shares", f"samples per data rank {shown(status.shares)}")
    if status.goodput is not None:
        yield line("goodput", goodput_text(status.goodput))
    if status.seconds_left is not None and not status.finished:
        yield line("time left", clock(status.seconds_left))


def _exchange(row: Mapping[str, Any]) -> str:
    names, sent = ", ".join(row["islands"]), row["bytes_sent"] / 1e6
    cost = f"{sent:,.1f} MB sent, {row['seconds']:.2f} s, waited {row['wait_seconds']:.2f} s for others"
    return f"exchange {row['round']} after step {row['step']} with {names}: {cost}"


def _checkpoint(status: RunStatus) -> str:
    newest = status.newest
    if newest is None:
        return "none yet"
    whole = "whole by the sizes of its files" if newest.damage is None else f"DAMAGED: {newest.damage}"
    return f"{newest.path}, {ago(newest.age_seconds)}, {whole}"


def _uploads(uploads: Uploading) -> Iterator[str]:
    """Yields the lines on uploads: the newest checkpoint in the object store, the backlog, and errors."""
    durable, age = uploads.durable_step, uploads.durable_age_seconds
    newest = "no checkpoint yet" if durable is None else f"newest checkpoint of step {durable:,}"
    since = "" if age is None else f", there since {ago(age)}"
    told = "" if uploads.released else f"; reported by {uploads.host} {ago(uploads.age_seconds)}"
    yield line("uploaded", f"{newest}{since}{told}")
    if uploads.waiting:
        steps = ", ".join(f"{step:,}" for step in uploads.waiting)
        what = f"{uploads.backlog_bytes / 1e6:,.1f} MB at {uploads.bytes_per_second / 1e6:,.1f} MB/s"
        yield line("to upload", f"{what}: checkpoints of step {steps}")
    if uploads.error is not None and not uploads.released:
        yield line("FAILING", uploads.error)


def _process(status: RunStatus) -> str:
    idle = "" if status.idle_seconds is None else f"; the journal was written {ago(status.idle_seconds)}"
    if status.training is None:
        return f"unknown: this file system has no locks{idle}"
    if status.training:
        return f"training now{idle}"
    return f"none{idle}" if not status.finished else "none: the run is finished"


def _place(status: RunStatus) -> Iterator[str]:
    if status.attempts:
        last = status.attempts[-1]
        hosts = [f"{host} (rank {ranks})" for host, ranks in last.nodes.items()]
        more = f", and {len(hosts) - _NODES} more" if len(hosts) > _NODES else ""
        nodes = f": {', '.join(hosts[:_NODES])}{more}" if hosts else ""
        count = f"{len(hosts)} node{'s' if len(hosts) != 1 else ''}, " if hosts else ""
        yield line("ranks", f"{count}{last.world_size} rank{'s' if last.world_size != 1 else ''}{nodes}")
    agents = status.agents
    if agents is None:
        return
    silent = f"; silent: {', '.join(agents.silent)}" if agents.silent and agents.outcome is None else ""
    first = (agents.reason.splitlines() or [""])[0]
    where = f"start {agents.start} on {', '.join(agents.members)}" if agents.members else "no start"
    yield line("agents", f"{where} ({first}){silent}")
    for node, why in agents.excluded.items():
        yield line("left out", f"{node}: {(why.splitlines() or [''])[0]}")


def _read(attempts: Sequence[RecordedAttempt]) -> Iterator[str]:
    """Yields where the newest start read its checkpoint from, if any part came from memory."""
    read = attempts[-1].read if attempts else {}
    memory, others, files = (read.get(name, 0) / 1e9 for name in ("memory", "other_nodes", "run_dir"))
    if memory or others:
        rest = f"{others:.3g} GB from other nodes' memory, {files:.3g} GB from the run's directory"
        yield line("restart", f"read {memory:.3g} GB of the checkpoint from memory, {rest}")


def _attempts(attempts: Sequence[RecordedAttempt]) -> Iterator[str]:
    if len(attempts) > 1:
        yield line("restarts", f"{len(attempts) - 1}")
    ended = [attempt for attempt in attempts[:-1] if attempt.ended is not None]
    for attempt in ended[-_SHOWN:]:
        reached = "" if attempt.reached is None else f" at step {attempt.reached:,}"
        yield line(f"attempt {attempt.number}", f"from step {attempt.step:,}, ended{reached}: {attempt.reason}")


def _fault(fault: JournalRow) -> str:
    if fault.get("event") == "fault":
        return fault_line(fault)
    if fault.get("lost"):
        ranges = ", ".join(f"{first} to {last} of {name}" for name, (first, last) in fault["lost"].items())
        return f"samples lost at step {fault.get('step')}: {ranges}"
    why = fault.get("why") or fault.get("cause")
    return f"{fault.get('event')} at step {fault.get('step')}{f': {why}' if why else ''}"
