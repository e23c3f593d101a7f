"""The engine on one device follows the reference, holds 14 bytes per parameter, and resumes bit for bit."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.torch_native import single
from tests.engines.comparison import FP32, HALF, layout
from tests.engines.layout_worker import make_engine, reference_case, resolved, step_batch, train

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 3e-3, "momentum": 0.9}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}}
SMALL = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "moments_dtype": "bf16"}}}
EIGHT = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "moments_dtype": "8bit"}}}
CLIPPED = {"optimizer": {"type": "Muon", "params": {"lr": 3e-3, "weight_decay": 0.1, "qk_clip": 0.05}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}}
CASES: dict[str, dict[str, Any]] = {
    "fp32": layout(0, micro=8, gradient_clipping=0.1),
    "fp32, accumulation, Lion": layout(0, micro=2, **LION),
    "bf16": layout(0, micro=8, bf16={"enabled": True}, gradient_clipping=0.1),
    "bf16, accumulation": layout(0, micro=2, bf16={"enabled": True}),
    "bf16, QK-Clip": layout(0, micro=8, bf16={"enabled": True}, **CLIPPED),
    "fp16, QK-Clip, overflows": layout(0, micro=2, **FP16, **CLIPPED),
    "bf16, SGD": layout(0, micro=8, bf16={"enabled": True}, **SGD),
    "bf16, small moments": layout(0, micro=8, bf16={"enabled": True}, **SMALL),
    "bf16, 8-bit moments": layout(0, micro=8, bf16={"enabled": True}, **EIGHT),
    "fp16, overflows": layout(0, micro=2, **FP16),
    "chunked loss, checkpointing": layout(3, micro=4, loss={"chunk": 8}, memory={"activation_checkpointing": "full"}),
}


def of(case: dict[str, Any]) -> Any:
    return resolved({"engine": "torch", **case}, processes=1)


@pytest.mark.integration
@pytest.mark.parametrize("name", CASES)
def test_it_follows_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "UPDATE_ELEMENTS", 4000)  # several updates
    case = CASES[name]
    reference = resolved(reference_case(case), processes=1)
    expected = train(reference, make_engine(reference), first=1, last=4)
    run = of(case)
    found = train(run, make_engine(run), first=1, last=4)
    tolerance = next((HALF[kind] for kind in HALF if kind in name), FP32)
    assert found.skipped == expected.skipped
    assert any(found.skipped) == ("overflows" in name)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.nats == pytest.approx(expected.nats, rel=tolerance)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    ["fp32", "bf16, accumulation", "bf16, QK-Clip", "bf16, small moments", "bf16, 8-bit moments", "fp16, overflows"],
)
def test_a_resumed_engine_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    run = of(CASES[name])
    whole = train(run, make_engine(run), first=1, last=4, save=tmp_path / "saved")
    resumed = make_engine(run)
    resumed.load(tmp_path / "saved")
    again = train(run, resumed, first=3, last=4)
    assert again.losses == whole.losses[2:]
    assert again.nats == whole.nats


@pytest.mark.parametrize(
    "runs",
    [
        {"single": of(CASES["bf16"]), "reference": resolved(reference_case(CASES["bf16"]), processes=1)},
        {"small": of(CASES["bf16, small moments"]), "fp32": of(layout(0, micro=8, bf16={"enabled": True}))},
    ],
    ids=["with the reference", "small moments with fp32 moments"],
)
def test_each_of_two_engines_resumes_from_the_other(tmp_path: Path, runs: dict[str, ResolvedRun]) -> None:
    for (name, run), other in zip(runs.items(), reversed(runs.values()), strict=True):
        whole = train(run, make_engine(run), first=1, last=4, save=tmp_path / name)
        engine = make_engine(other)
        engine.load(tmp_path / name)
        third, fourth = train(other, engine, first=3, last=4).losses
        assert third == pytest.approx(whole.losses[2], rel=HALF["bf16"])
        assert fourth == pytest.approx(whole.losses[3], rel=2**-8)  # after an update by moments rounded to bf16


@pytest.mark.parametrize(("case", "between", "at_update"), [("bf16", 12, 14), ("bf16, small moments", None, 10)])
def test_bytes_per_parameter_at_the_update_and_between_steps(case: str, between: int | None, at_update: int) -> None:
    run = of(CASES[case])
    engine = make_engine(run)
    parameters = sum(master.weight.numel() for master in engine._masters.values())
    engine.train_step(step_batch(run, 1), lr=1e-3)
    if between is not None:
        assert held_bytes(engine) == pytest.approx(between * parameters, rel=0.01)  # weight 2, residual 2, moments 8
    for micro in step_batch(run, 2).micro_batches:
        engine._decoder(micro.input_ids, micro, engine._objective)[0].backward()
    assert held_bytes(engine) == pytest.approx(at_update * parameters, rel=0.01)
    assert run.held_bytes_per_parameter == at_update


def test_micro_batches_are_added_up_in_fp32_and_freed() -> None:
    run = of(CASES["bf16, accumulation"])
    engine = make_engine(run)
    for micro in step_batch(run, 1).micro_batches:
        engine._decoder(micro.input_ids, micro, engine._objective)[0].backward()
        assert all(master.weight.grad is None for master in engine._masters.values())
        assert all(master.gradient.dtype == torch.float32 for master in engine._masters.values())


def held_bytes(engine: Any) -> int:
    """Bytes of weights, residuals, gradients and optimizer states, each storage once."""
    tensors = []
    for update in engine._updates:
        for master in update.masters.values():
            tensors += [master.weight.data, master.parameter.data, master.residual, master.gradient, master.weight.grad]
            tensors += list(update.optimizer.state[master.parameter].values())
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each is not None
    }
    return sum(storages.values())


def test_the_fp32_copies_of_an_update_are_freed() -> None:
    run = of(CASES["bf16"])
    engine = make_engine(run)
    engine.train_step(step_batch(run, 1), lr=1e-3)
    master = next(iter(engine._masters.values()))
    with engine._updates[0].master_values():
        copy = weakref.ref(master.parameter.data.untyped_storage())
        assert master.parameter.data.dtype == torch.float32
        assert master.parameter.numel() == master.weight.numel()
    assert master.parameter.numel() == 0
    assert copy() is None or copy().nbytes() == 0  # type: ignore[union-attr]
