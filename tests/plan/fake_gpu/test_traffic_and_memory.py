"""The formulas of memory and traffic, and the page of the docs, against the committed fake steps. No step is run."""

from __future__ import annotations

import pytest

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.sizes.memory import host_memory, peak_memory, phases
from tests.plan.fake_gpu.cells import GATING, gating_cases, measured, shipped_cases
from tests.plan.fake_gpu.document import (
    H200_BYTES,
    NOT_FITTING,
    PAGE,
    SLACK,
    facts,
    formula_peak,
    page,
    ratio_of,
    reason_of,
    rows,
)

CASES = {name: case for name, case in {**gating_cases(), **shipped_cases()}.items() if name in measured()}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_of_peak_memory_is_within_5_percent_of_the_executed_step(name: str) -> None:
    assert formula_peak(CASES[name]).total == pytest.approx(measured()[name]["peak"], rel=0.05)


@pytest.mark.parametrize("name", [name for name in CASES if measured()[name]["layout"].startswith("torch")])
def test_every_kind_of_memory_of_the_native_engine_is_within_5_percent_of_the_peak(name: str) -> None:
    # not of DeepSpeed: its flat buffers hold several kinds at once, and one function allocates them all
    formula, measured_bytes = formula_peak(CASES[name]), dict(measured()[name]["kinds"])
    # whether logits or activations are at their largest differs between moments of nearly the same total: their sum;
    # in a pipeline of several virtual stages such moments have gradients of more or fewer stages, too
    together = ["activations", "logits", "buffers"] + ["gradients"] * (CASES[name].resolved().virtual_stages > 1)
    for kind in {"weights", "gradients", "optimizer"} - {*together}:
        assert abs(getattr(formula, kind) - measured_bytes[kind]) < 0.05 * measured()[name]["peak"], kind
    passing, passed = (sum(of[kind] for kind in together) for of in (vars(formula), measured_bytes))
    assert abs(passing - passed) < 0.05 * measured()[name]["peak"]


def test_every_config_fits_an_h200_but_those_that_are_known_not_to() -> None:
    too_large = {name for name in shipped_cases() if name in CASES and measured()[name]["peak"] > H200_BYTES}
    assert too_large == set(NOT_FITTING)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_traffic_above_its_minimum_names_the_reason_and_none_is_below_it(name: str) -> None:
    case, layout = CASES[name], measured()[name]["layout"]
    for label, count, size, _dtype, least in rows(case, measured()[name]):
        purpose = label.split("|")[0]
        ratio = ratio_of(purpose, count, size, least)
        assert ratio <= SLACK or reason_of(case, purpose, ratio), (label, ratio)
        assert ratio > 0.99 or layout.startswith("deepspeed"), f"{label}: fewer bytes than the least, {ratio:.3f}"


@pytest.mark.parametrize("kind", ["FSDP2", "context parallelism", "mixture of experts"])
def test_embedding_and_head_are_gathered_once_a_micro_batch_and_layers_twice_each_in_a_collective(kind: str) -> None:
    layout, _ = facts(CASES[f"gate: {kind}"])
    counts = {row[0]: row[3] for row in measured()[f"gate: {kind}"]["collectives"]}
    layers, micro_batches = len(layout.rank.layers), layout.micro_batches
    assert counts["all_gather"] == micro_batches * (2 * layers + 2)
    assert counts["reduce_scatter"] == micro_batches * (layers + 2)


def test_the_page_shows_the_committed_steps() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.plan.fake_gpu.document"


@pytest.mark.sweep  # after make sweep-gpu, which keeps the report of every cell that has none
def test_every_config_of_the_native_engine_was_executed_on_every_rank_of_its_pipeline() -> None:
    native = {name for name, case in shipped_cases().items() if case.resolved().config.engine == "torch"}
    assert native <= measured().keys()


def test_one_config_of_every_kind_is_committed_as_gate() -> None:
    assert {f"gate: {name}" for name in GATING} <= measured().keys()


def test_a_larger_micro_batch_needs_more_memory_and_activation_checkpointing_less() -> None:
    case = shipped_cases()["llama_8b_8gpu.json"]
    layout, footprint = facts(case)
    one, two = (peak_memory(layout.run, footprint, micro=micro) for micro in (1, 2))
    assert 1.8 < two.activations / one.activations < 2.2  # the peak may be at another moment of the step
    peaks = []
    for mode in ("full", "selective", "none"):
        memory = layout.run.config.memory.model_copy(update={"activation_checkpointing": mode})
        config = layout.run.config.model_copy(update={"memory": memory})
        run = type(layout.run)(**{**vars(layout.run), "config": config})
        peaks.append(peak_memory(run, footprint).total)
    assert peaks == sorted(peaks)


def test_weights_kept_within_a_node_take_their_share_of_a_node() -> None:
    case = shipped_cases()["llama_8b_8gpu.json"]
    layout, footprint = facts(case)
    zero = layout.run.config.zero_optimization.model_copy(update={"zero_hpz_partition_size": 4})
    config = layout.run.config.model_copy(update={"zero_optimization": zero})
    run = type(layout.run)(**{**vars(layout.run), "config": config})
    more = peak_memory(run, footprint).weights - peak_memory(layout.run, footprint).weights
    assert more == pytest.approx(2 * sum(layout.rank.layers) / 4)


def _changed(run: ResolvedRun, *, stage: int, bucket: float, offload: str = "none", bf16: bool = True) -> ResolvedRun:
    section = run.config.zero_optimization
    offloaded = section.offload_optimizer.model_copy(update={"device": offload})
    zero = section.model_copy(update={"stage": stage, "reduce_bucket_size": bucket, "offload_optimizer": offloaded})
    precision = run.config.bf16.model_copy(update={"enabled": bf16})
    config = run.config.model_copy(update={"zero_optimization": zero, "bf16": precision})
    return type(run)(**{**vars(run), "config": config})


def test_buckets_of_deepspeed_are_counted_where_its_source_allocates_them() -> None:
    layout, footprint = facts(shipped_cases()["zero2.json"])

    def buffers(*, stage: int, bf16: bool = True) -> dict[str, float]:
        moments = phases(_changed(layout.run, stage=stage, bucket=1e6, bf16=bf16), footprint)
        return {name: moments[name].buffers for name in ("loss", "backward")}

    assert buffers(stage=1) == {"loss": 0, "backward": 0}  # BF16_Optimizer
    assert buffers(stage=2) == {"loss": 0, "backward": 2e6}  # allocated by the first gradient, in the model's dtype
    assert buffers(stage=3) == {"loss": 4e6, "backward": 4e6}  # for good, in the dtype of communication
    assert buffers(stage=1, bf16=False) == {"loss": 0, "backward": 4e6}


def test_offloaded_states_are_in_the_memory_of_the_host_which_is_the_devices_on_a_cpu() -> None:
    layout, footprint = facts(shipped_cases()["zero3.json"])
    run = _changed(layout.run, stage=3, bucket=1e6, offload="cpu")
    held = layout.rank.parameters / 2  # of two ranks
    assert host_memory(run, footprint) == pytest.approx(20 * held)  # masters, two fp32 gradients, Adam's moments
    assert host_memory(layout.run, footprint) == 0
    beside = peak_memory(run, footprint, cpu=True).total - peak_memory(run, footprint).total
    assert beside >= 20 * held
