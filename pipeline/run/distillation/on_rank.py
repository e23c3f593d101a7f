"""Makes the objective of a distillation on one rank, and the student's samples for on-policy distillation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.data.dataset import tokenizer_details
from pipeline.engines.base import Engine, Objective
from pipeline.engines.parallel.mesh import Mesh
from pipeline.run.distillation.cached_logits import CachedReference
from pipeline.run.distillation.features import FeatureDistillation, make_matchings
from pipeline.run.distillation.matching import SequenceShard
from pipeline.run.distillation.objective import Distillation
from pipeline.run.distillation.on_policy import OnPolicySamples
from pipeline.run.distillation.on_policy_loss import OnPolicyDistillation
from pipeline.run.distillation.teacher import Teacher
from pipeline.run.prepare import PreparedRun


def make_distillation(prepared: PreparedRun, device: torch.device, mesh: Mesh | None) -> Objective:
    """Makes the loss of a distillation, with a teacher on this rank or cached logits, and with matched features."""
    run, config = prepared.run, prepared.run.config
    assert config.distill is not None
    if prepared.teacher is None:
        return Distillation(config.distill, CachedReference(), z_loss=config.loss.z_loss)
    teacher = Teacher(prepared.teacher, run, device=device, mesh=mesh)
    if config.distill.on_policy is not None:
        return OnPolicyDistillation(config.distill, teacher, z_loss=config.loss.z_loss)
    distillation = Distillation(config.distill, teacher, z_loss=config.loss.z_loss)
    models = {"student": prepared.model, "teacher": prepared.teacher.model}
    length = run.batch.sequence_length
    shard = SequenceShard.of(mesh, device, length=length, cp=run.topology.cp, zigzag=run.zigzag)
    matchings = make_matchings(config.distill, shard, **models)
    return FeatureDistillation(distillation, teacher, matchings) if matchings else distillation


def make_samples(
    prepared: PreparedRun, engine: Engine, *, rank: int, device: torch.device, on_progress: Callable[[], None]
) -> OnPolicySamples:
    """Makes the student's samples of an on-policy distillation."""
    end_id = tokenizer_details(prepared.mixture.sources[0].manifest).get("eos_id")
    return OnPolicySamples(prepared.run, engine, rank=rank, device=device, end_id=end_id, on_progress=on_progress)
