"""The objective of a distillation run on one rank."""

from __future__ import annotations

import torch

from pipeline.distillation.cached_logits import CachedReference
from pipeline.distillation.features import FeatureDistillation, make_matchings
from pipeline.distillation.objective import Distillation
from pipeline.distillation.teacher import Teacher
from pipeline.engines.objective import Objective
from pipeline.parallel.mesh import Mesh
from pipeline.run.prepare import PreparedRun


def make_distillation(prepared: PreparedRun, device: torch.device, mesh: Mesh | None) -> Objective:
    """The loss of a distillation, with its teacher on this rank or with cached logits, and what is matched besides."""
    config = prepared.run.config
    assert config.distill is not None
    if prepared.teacher is None:
        return Distillation(config.distill, CachedReference(), z_loss=config.loss.z_loss)
    teacher = Teacher(prepared.teacher, prepared.run, device=device, mesh=mesh)
    distillation = Distillation(config.distill, teacher, z_loss=config.loss.z_loss)
    models = {"student": prepared.model, "teacher": prepared.teacher.model}
    matchings = make_matchings(prepared.run, **models, mesh=mesh, device=device)
    return FeatureDistillation(distillation, teacher, matchings) if matchings else distillation
