"""`headrace plan --search`, a plan, and the programs of pipeline schedules."""

from __future__ import annotations

from pathlib import Path

from pipeline.plan.predict.pipeline_simulation import StageTimes, simulate_pipeline
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.schedule_programs import make_program
from pipeline.plan.search.search import search
from pipeline.runtime.machines.known import load_machine
from tests.conftest import ROOT
from tests.scale.measuring import Figures, Part, measured

RANKS = (1024, 2048, 4096, 8192)
_CONFIG = str(ROOT / "ds_configs" / "llama_70b_fsdp_3d.json")
_MODEL = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


def _sets(ranks: int) -> list[str]:
    """A 405B with a global batch of one sample for each rank, so that every size has layouts."""
    model = [f"model.config.{key}={value}" for key, value in _MODEL.items()]
    batch = [f"train_batch_size={ranks}", "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=auto"]
    schedule = ["scheduler.type=WarmupLR", "scheduler.params={}"]
    return [*model, *batch, *schedule, "parallel.pp=1", "parallel.virtual_stages=1", "parallel.schedule=1f1b"]


def _planned(ranks: int) -> PlannedRun:
    return open_run(_CONFIG, _sets(ranks), load_machine("h100"), nodes=ranks // 8, processes=None)


def searched(ranks: int, work: Path) -> Figures:
    """Every layout of a 405B, by formulas."""
    del work
    planned = _planned(ranks)
    with measured() as figures:
        found = search(planned.run, planned.costs, planned.machine)
    assert found.looked_at > 100
    return figures


def checked(ranks: int, work: Path) -> Figures:
    """The config is resolved and planned for so many ranks."""
    del work
    _planned(8)  # imports
    with measured() as figures:
        planned = _planned(ranks)
        make_plan(planned.run, planned.costs, planned.machine)
    return figures


def scheduled(micro_batches: int, work: Path) -> Figures:
    """The program of pp 16 with 8 virtual stages is made and simulated."""
    del work
    make_program("torch", "interleaved_1f1b", ranks=2, micro_batches=4, virtual_stages=2)  # imports
    with measured() as figures:
        program = make_program("torch", "interleaved_1f1b", ranks=16, micro_batches=micro_batches, virtual_stages=8)
        times = [StageTimes(1.0, 1.0, 1.0)] * program.stages
        assert simulate_pipeline(program, times, transfers=[0.01] * (program.stages - 1)).seconds > micro_batches
    return figures


PARTS = [
    Part(
        "plan: search",
        "all layouts of a 405B by formulas, with a sample of the batch for each rank.",
        "ranks",
        (64, 128, 256, 512),
        8192,
        searched,
        note="Layouts increase with the number of divisors of the ranks. No job waits for this command.",
    ),
    Part("plan: check", "the config of a 405B is resolved and planned.", "ranks", RANKS, 8192, checked),
    Part(
        "plan: schedule",
        "the program of interleaved 1F1B over pp 16 x 8 virtual stages is made and simulated. Every rank makes it"
        " at its start, without the simulation.",
        "micro-batches",
        (64, 128, 256, 512),
        512,
        scheduled,
    ),
]
