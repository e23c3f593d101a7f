"""The objective of a distillation run on one rank."""

from __future__ import annotations

import torch

from pipeline.distillation.cached_logits import CachedReference
from pipeline.distillation.objective import Distillation, Reference
from pipeline.distillation.teacher import Teacher
from pipeline.parallel.mesh import Mesh
from pipeline.run.prepare import PreparedRun


def make_distillation(prepared: PreparedRun, device: torch.device, mesh: Mesh | None) -> Distillation:
    """The loss of a distillation, with its teacher on this rank or with cached logits."""
    config = prepared.run.config
    assert config.distill is not None
    reference: Reference
    if prepared.teacher is None:
        reference = CachedReference()
    else:
        reference = Teacher(prepared.teacher, prepared.run, device=device, mesh=mesh)
    return Distillation(config.distill, reference, z_loss=config.loss.z_loss)
