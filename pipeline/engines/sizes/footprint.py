"""Tensor sizes of every pipeline rank, for a run's division of its model into stages."""

from __future__ import annotations

from torch import nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.common import matrices_of
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.rank_model import Footprint, counts_of, first_prefixes, rank_model, widths_of


def footprint_of(run: ResolvedRun, model: nn.Module) -> Footprint | None:
    """Counts the tensors of every pipeline rank, from the full model on meta.

    Returns:
        The footprint; None for an architecture not built like Llama's.

    Raises:
        ConfigError: the architecture does not support the layout; see `pipeline_stages` and `check_tp_plan`.
    """
    widths = widths_of(model.config)
    if widths is None:
        return None
    tp, pp = run.topology.tp, run.topology.pp
    stages = pipeline_stages(run, model)
    forms, table = matrices_of(model, run.config.optimizer), run.config.parallel.tp_plan
    counts = counts_of(model, tp=tp, ep=run.topology.ep, matrices=forms, table=table)
    before = first_prefixes(model) if pp > 1 else ()
    own = ([stage for stage in stages if run.rank_of_stage(stage.index) == rank] for rank in range(pp))
    return Footprint(widths, tuple(rank_model(model, counts, each, before=before, tp=tp) for each in own))
