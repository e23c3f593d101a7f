"""Makes the replica that a rank belongs to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pipeline.checkpoint.store import Checkpoint
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.base import Engine, ExchangesGradients
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.groups.islands.build import curve_and_layout_digest, reach_others
from pipeline.run.groups.replicas.deal import Member
from pipeline.run.groups.replicas.quorums import Quorums
from pipeline.run.groups.replicas.record import ReplicaRecord
from pipeline.run.groups.replicas.replica import Loader, ReplicaOfRun, Surroundings
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.faults.watchdog import Watchdog


def open_replica(  # noqa: PLR0913  what a rank of a run has
    run: ResolvedRun,
    *,
    rank: int,
    engine: Engine,
    stepper: GuardedStepper,
    curve: dict[str, Any],
    agreement: Agreement,
    signals: StopSignals,
    watchdog: Watchdog,
    record: Callable[..., None],
    say: Callable[[str], None],
    load: Loader,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
) -> ReplicaOfRun | None:
    """The replica of this rank; None for an ordinary run. Collective. `stack` closes it.

    Args:
        run: the resolved config.
        rank: of this process in the replica.
        engine, stepper, load: see `Surroundings`.
        curve: what all replicas must agree on.
        agreement, signals, watchdog: see `Quorums`.
        record, say: see `ReplicaRecord`.
        checkpoint: where the run resumes; its state is loaded.
        stack: closes it.
    """
    section = run.config.replicas
    if section is None or section.name is None:
        return None
    lighthouse, peers = reach_others(section, rank=rank, parse=Member.from_plain, stack=stack, field="replicas")
    around = Surroundings(
        section=section,
        total=run.steps,
        samples=run.batch.samples,
        rank=rank,
        engine=engine,
        stepper=stepper,
        load=load,
        quorums=Quorums(agreement, signals, watchdog, lighthouse),
        record=ReplicaRecord(record, say),
    )
    member = member_at(section.name, checkpoint, layout=digest_of_run(run, engine, curve))
    replica = ReplicaOfRun(around, peers=peers, member=member)
    stack.callback(replica.close)
    assert isinstance(engine, ExchangesGradients), "refused by the rules on `replicas`"
    engine.exchange_gradients_by(replica.sum_gradients)
    return replica


def member_at(name: str, checkpoint: Checkpoint | None, *, layout: str) -> Member:
    """Where a replica stands that resumes a checkpoint, or begins.

    Args:
        name: of the replica.
        checkpoint: its own, or an ordinary run's; None at the start.
        layout: see `Member`.
    """
    manifest = checkpoint.manifest if checkpoint else None
    details = manifest.details.get("replicas", {}) if manifest else {}
    return Member(
        name=name,
        step=checkpoint.step if checkpoint else 0,
        exchanges=details.get("exchanges", 0),
        # an ordinary run's checkpoint names its bytes: two of one step need not be equal
        commit=details.get("commit", manifest.fingerprint[:16] if manifest else ""),
        before=None,
        held=(),
        between=True,
        group="",
        living=False,
        waited=False,
        layout=layout,
    )


def digest_of_run(run: ResolvedRun, engine: Engine, curve: dict[str, Any]) -> str:
    """Of what decides the bits of an update, and which steps are applied; and of the shards of all ranks."""
    config = run.config
    # the curve has no response to non-finite steps, with which a run may be resumed; here all must respond alike
    policies = config.anomalies.model_dump(mode="json")
    alike = (curve, policies, config.engine, config.zero_optimization.stage)
    # the ranks of one replica may have different devices
    return curve_and_layout_digest(engine, alike, of_rank=f"{engine.device_name} {torch.__version__}")
