"""`headrace plan --timeline FILE`: the simulated step as a page, a drawing or a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.plan.drawing import streams, timeline
from pipeline.plan.predict.plan import run_rates
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.predict.rank_time import rank_time
from pipeline.plan.predict.rates import TYPICAL
from pipeline.plan.predict.simulated_step import SIMULATED, pipeline_timeline
from pipeline.plan.predict.step_model import data_parallel
from pipeline.plan.predict.step_time import works_of


def write_timeline(planned: PlannedRun, path: Path) -> str:
    """Writes the step at typical rates: passes of all pipeline ranks, or the two streams of a single stage.

    Args:
        planned: the run.
        path: file to write, which ends in .html, .svg or .json.

    Returns:
        The path and its content, in a sentence.
    """
    run, costs = planned.run, planned.costs
    rates = run_rates(run, costs, planned.machine, TYPICAL)
    ranks = [rank_time(work, rates, SIMULATED.collective) for work in works_of(run, costs)]
    if run.topology.pp > 1:
        passes = pipeline_timeline(run, ranks, rates)
        page, drawing, trace = (
            (lambda: timeline.html_page({run.layout: passes})),
            (lambda: timeline.svg(passes)),
            (lambda: timeline.chrome_trace(passes)),
        )
        shown = f"passes of {passes.ranks} pipeline ranks"
    else:
        how = data_parallel(run, rates)
        found = streams.streams_of(how, ranks[0], micro_batches=run.batch.accumulation, engine=run.config.engine)
        page, drawing, trace = (
            (lambda: streams.html_page(run.layout, found)),
            (lambda: streams.svg(found)),
            (lambda: streams.chrome_trace(found)),
        )
        shown = "computation and communication of a micro-batch"
    writers = {".html": page, ".svg": lambda: drawing() + "\n", ".json": lambda: json.dumps(trace()) + "\n"}
    path.write_text(writers[path.suffix](), encoding="utf-8")
    return f"{path}: {shown}, simulated at typical rates"
