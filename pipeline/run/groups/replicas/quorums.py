"""Quorums for which the ranks of one replica ask together."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.run.groups.islands.lighthouse import LighthouseMember, Quorum, answer_of
from pipeline.run.groups.replicas.deal import ReplicaMember
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero


@dataclass
class Quorums:
    """Asks the lighthouse, on rank 0, and agrees with the other ranks of the replica. Every method is collective.

    Attributes:
        agreement: all-reduces small numbers over the ranks of the replica.
        signals: stop signals of this process.
        lighthouse: connection to the lighthouse on rank 0; None on other ranks.
        stop: stop that was requested while waiting for a quorum.
    """

    agreement: Agreement
    signals: StopSignals
    watchdog: Watchdog
    lighthouse: LighthouseMember[ReplicaMember] | None
    stop: Stop = field(default=Stop.NO, init=False)

    def ask(self, member: ReplicaMember, *, until_stop: bool = True) -> Quorum[ReplicaMember] | None:
        """Asks for the next quorum; None when a stop is requested first.

        Args:
            member: this replica's report.
            until_stop: whether to give up when a stop is requested; False where a begun step must be finished first.

        Raises:
            TrainingError: the lighthouse has failed.
        """
        self.enter_phase("waiting for other replicas", member.step)
        asked = self.lighthouse.ask(member) if self.lighthouse is not None else None
        while True:
            self.watchdog.report_progress()
            quorum = on_rank_zero(lambda: answer_of(asked, group="replica"))
            if quorum is not None:
                return quorum
            self.stop = self.agreement.requested_stop(self.signals) if until_stop else Stop.NO
            if self.stop:
                return None

    def agreed(self, failed: bool) -> bool:
        """Tells whether `failed` is true on any rank of the replica."""
        return self.failed_and_damaged(failed, 0)[0]

    def failed_and_damaged(self, failed: bool, damaged: int) -> tuple[bool, int]:
        """Tells whether any rank of the replica failed, and the largest number of damaged messages at a rank."""
        failed_any, most = self.agreement.max_over_ranks(int(failed), damaged)
        return bool(failed_any), most

    def enter_phase(self, phase: str, step: int) -> None:
        """Tells the watchdog the phase and the step."""
        self.watchdog.enter_phase(phase, step)

    def close(self) -> None:
        """Stops the heartbeats."""
        if self.lighthouse is not None:
            self.lighthouse.close()
