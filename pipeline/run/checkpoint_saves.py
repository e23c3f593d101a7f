"""Saves a rank's checkpoints while it trains: when they are due, in the background, and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foundation.errors import CheckpointError, TrainingError
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.save import CheckpointWriter, SaveResult, checkpoint_or_error
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.checkpoint_timer import CheckpointTimer
from pipeline.run.groups.group import Group
from pipeline.run.manifest import RunManifest
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.uploads.uploads import Uploads
from pipeline.runtime.metrics.step_clock import Stopwatch


@dataclass
class Progress:
    """Progress of a run, in steps: an object that the loop and its saves share.

    Attributes:
        step: the last finished step.
        begun: the last step that was begun; flags in its result date from that moment.
        advanced: the last step begun when a save was advanced; flags of steps up to it are out of date.
        targets: first step of a span of equal steps -> targets of its steps that were begun.
    """

    step: int
    begun: int = 0
    advanced: int = 0
    targets: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaves:
    """Saves the state of an engine, a stepper and a group.

    Attributes:
        here: this rank of the run.
        stepper: runs the steps; its skips and its statistics of loss spikes are saved, too.
        writer: writes the files.
        manifest: writes the run's manifest, and makes the description in a checkpoint's manifest.
        uploads: copies checkpoints to an object store.
        timer: tells when a checkpoint is due by time.
        progress: the run's progress, updated when a save advances.
        group: an island or a replica, whose state is saved with the engine's; None in an ordinary run.
        blocked: stopwatch of the time in which training waited for checkpoints.
    """

    here: RankOfRun
    stepper: GuardedStepper
    writer: CheckpointWriter
    manifest: RunManifest
    uploads: Uploads
    timer: CheckpointTimer
    progress: Progress
    group: Group | None = None
    blocked: Stopwatch = field(default_factory=Stopwatch)

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self.writer.busy

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is begun but not yet committed."""
        return self.writer.pending

    def due(self, step: int) -> bool:
        """Tells whether the config asks for a checkpoint after a step, whatever the time."""
        every = self.here.run.config.run.checkpoint_every
        return every != "auto" and bool(every and step % every == 0)

    def save(self, step: int) -> None:
        """Starts writing a checkpoint once the previous one is written. Collective.

        A failure is reported, and training goes on.
        """
        with self.blocked.running():
            self.here.watchdog.enter_phase("saving", step)
            self.timer.restart()
            self._report(self.writer.wait())
            self.here.sinks.flush()  # writes the rows of its steps, even if the process is killed next
            try:
                self.writer.begin(self._described(step), self._state)
            except CheckpointError as error:
                self._report(SaveResult(step, None, str(error).splitlines()[0], 0.0, 0.0))

    def advance(self, *, busy: bool) -> None:
        """Commits the checkpoint that is being written once no rank still writes it. Collective."""
        self.uploads.report(self.here.record, self.here.say)
        if self.pending and not busy:
            self.progress.advanced = self.progress.begun
            self._report(self.writer.advance())

    def wait(self) -> None:
        """Waits for a checkpoint that is being written. Collective."""
        with self.blocked.running():
            self._report(self.writer.wait())
        self.writer.wait_for_copy()

    @contextmanager
    def finished_before_an_error(self) -> Iterator[None]:
        """Delays a TrainingError, which all ranks raise alike, until the checkpoint in progress is written."""
        try:
            yield
        except TrainingError:
            self.wait()
            raise

    def save_last(self, step: int) -> None:
        """Writes the checkpoint after which the run ends, unless it is written already. Collective.

        A run that will be resumed finds a copy of the checkpoint in memory.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self.group is not None and step < self.here.run.steps:
            self.group.leave()
        with self.blocked.running():
            self._write_last(step)
        if step == self.here.run.steps:
            self.writer.stop_copy()
        else:
            self.writer.wait_for_copy()

    def _write_last(self, step: int) -> None:
        self.here.watchdog.enter_phase("saving", step)
        previous = self.writer.wait()
        self._report(previous)
        if previous is not None and previous.step == step and previous.checkpoint is not None:
            return
        self.here.sinks.flush()
        self.writer.begin(self._described(step), self._state)
        saved = self.writer.wait()
        assert saved is not None
        self._report(saved, last=True)
        checkpoint_or_error(saved)

    def _described(self, step: int) -> CheckpointInfo:
        groups = self.group.details() if self.group else None
        skips, anomalies = self.stepper.skips, self.stepper.state_dict()
        targets = self.progress.targets
        return self.manifest.checkpoint(step, skips=skips, anomalies=anomalies, groups=groups, targets=targets)

    @property
    def _state(self) -> Callable[[], State]:
        return self.here.engine.state if self.group is None else self.group.state

    def _report(self, saved: SaveResult | None, *, last: bool = False) -> None:
        if saved is None:
            return
        times = {"seconds": saved.seconds, "waited_seconds": saved.waited_s, "blocked_seconds": self.blocked.take()}
        if saved.checkpoint is not None:
            self.manifest.write_if_possible(saved.step, self.here.say)
            self.here.record(saved.step, event="checkpoint", path=str(saved.checkpoint.path), **times)
            self._report_not_copied(saved)
            decision = self.timer.saved(waited_s=saved.waited_s, seconds=saved.seconds)
            if decision is not None:
                self.here.record(saved.step, event="checkpoint_interval", **decision.row())
                self.here.say(f"step {saved.step}: {decision}")
            self.here.sinks.flush()
            return
        self.here.record(saved.step, event="checkpoint_failed", why=saved.failure, **times)
        if not last:  # a failure of the last checkpoint is an error
            self.here.say(
                f"WARNING: the checkpoint of step {saved.step} could not be written: {saved.failure}\n"
                f"  training goes on; nothing since the checkpoint before is safe: free space there"
            )

    def _report_not_copied(self, saved: SaveResult) -> None:
        if saved.not_copied:
            ranks = sorted(saved.not_copied)
            why = saved.not_copied[ranks[0]]
            self.here.record(saved.step, event="checkpoint_not_copied", ranks=ranks, why=why)
            files = f"warning: {len(ranks)} checkpoint files were not copied into memory (rank {ranks[0]}: {why})"
            self.here.say(f"{files}; a restart reads them from the run's directory")
