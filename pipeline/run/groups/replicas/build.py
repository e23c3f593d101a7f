"""Makes the replica to which a rank belongs."""

from __future__ import annotations

import torch

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.config.rules.curve import Curve
from pipeline.config.sections.run import AnomaliesSection
from pipeline.engines.base import Engine, ExchangesGradients
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.groups.islands.build import curve_and_layout_digest, reach_others
from pipeline.run.groups.replicas.deal import ReplicaMember
from pipeline.run.groups.replicas.quorums import Quorums
from pipeline.run.groups.replicas.record import ReplicaRecord
from pipeline.run.groups.replicas.replica import Loader, ReplicaContext, ReplicaOfRun
from pipeline.run.rank_of_run import RankOfRun


def open_replica(here: RankOfRun, *, stepper: GuardedStepper, load: Loader) -> ReplicaOfRun | None:
    """Opens the replica of this rank; None for an ordinary run. Collective.

    Args:
        here: this rank; its stack closes the replica, its checkpoint has the state.
        stepper: runs the steps, and has the statistics of loss spikes.
        load: loads this rank's batches of some samples of the steps.
    """
    run, section, engine = here.run, here.run.config.replicas, here.engine
    if section is None or section.name is None:
        return None
    lighthouse, peers = reach_others(
        section, rank=here.rank, parse=ReplicaMember.from_plain, stack=here.stack, field="replicas"
    )
    context = ReplicaContext(
        section=section,
        total=run.steps,
        samples=run.batch.samples,
        rank=here.rank,
        engine=engine,
        stepper=stepper,
        load=load,
        quorums=Quorums(here.agreement, here.signals, here.watchdog, lighthouse),
        record=ReplicaRecord(here.record, here.say),
    )
    config = run.config
    digest = digest_of_run(
        engine,
        here.curve,
        anomalies=config.anomalies,
        engine_name=config.engine,
        stage=config.zero_optimization.stage,
    )
    member = member_at(section.name, here.checkpoint, layout=digest)
    replica = ReplicaOfRun(context, peers=peers, member=member)
    here.stack.callback(replica.close)
    assert isinstance(engine, ExchangesGradients), "refused by the rules on `replicas`"
    engine.exchange_gradients_by(replica.sum_gradients)
    return replica


def member_at(name: str, checkpoint: Checkpoint | None, *, layout: str) -> ReplicaMember:
    """Makes the report of a replica that resumes a checkpoint or starts at step 0.

    Args:
        checkpoint: the replica's checkpoint, or an ordinary run's; None at the start.
        layout: digest of all that determines an update bit for bit (see `ReplicaMember`).
    """
    manifest = checkpoint.manifest if checkpoint else None
    details = manifest.details.get("replicas", {}) if manifest else {}
    return ReplicaMember(
        name=name,
        step=checkpoint.step if checkpoint else 0,
        exchanges=details.get("exchanges", 0),
        # for an ordinary run's checkpoint, its fingerprint: two of one step may differ
        commit=details.get("commit", manifest.fingerprint[:16] if manifest else ""),
        before=None,
        held=(),
        between=True,
        group="",
        living=False,
        waited=False,
        layout=layout,
    )


def digest_of_run(engine: Engine, curve: Curve, *, anomalies: AnomaliesSection, engine_name: str, stage: int) -> str:
    """Computes a digest of all ranks' shards, and of the keys that determine updates bit for bit."""
    # the curve leaves out the response to non-finite steps, which a resume may change; replicas must respond alike
    policies = anomalies.model_dump(mode="json")
    alike = (curve, policies, engine_name, stage)
    # the ranks of one replica may have different devices
    return curve_and_layout_digest(engine, alike, of_rank=f"{engine.device_name} {torch.__version__}")
