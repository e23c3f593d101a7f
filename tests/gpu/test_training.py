"""Training on one GPU: compiled layers, fused AdamW, FSDP2, ZeRO, bf16, checkpoints and pinned batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import named_state
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.optim.build import build_optimizer
from pipeline.runtime.launch import detect, process_group
from tests.engines.layout_worker import LAST, SAVED, Curve, largest_difference, make_engine, resolved, train
from tests.gpu.device import DEVICE, MARKS, needs_cuda

pytestmark = MARKS
FP32, BF16 = 1e-4, 5e-3
"""Tolerances of losses, as in tests/engines/test_gpu.py and docs/reference/parity.md."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(detect(), gpu=DEVICE.index):
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Graphs of other tests count toward the compiler's limit of graphs per function."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def expected() -> Curve:
    return curve(engine="torch")


def curve(**keys: Any) -> Curve:
    """Losses, norms and first gradients of four steps; not compiled unless asked for."""
    run = resolved({"compile": {"enabled": False}, **keys}, processes=1)
    return train(run, make_engine(run, device=DEVICE), first=1, last=LAST)


def assert_follows(found: Curve, expected: Curve, tolerance: float) -> None:
    """The losses of all steps, the evaluation, and with fp32's tolerance the gradient of every parameter."""
    assert largest_difference(found.losses, expected.losses) < tolerance
    assert largest_difference([found.nats], [expected.nats]) < tolerance
    if tolerance == FP32:
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            norm = gradient.norm().clamp(min=1e-30)
            assert float((found.gradients[name] - gradient).norm() / norm) < 10 * FP32, name


def test_the_device_trains_as_the_cpu(expected: Curve) -> None:
    run = resolved({"compile": {"enabled": False}}, processes=1)
    assert_follows(expected, train(run, make_engine(run), first=1, last=LAST), FP32)


@pytest.mark.parametrize("memory", ["none", "full", "selective"])
def test_compiled_layers_train_as_uncompiled_ones(expected: Curve, memory: str) -> None:
    section = {"activation_checkpointing": memory}
    assert_follows(curve(compile={"enabled": True}, memory=section), expected, FP32)


def test_bf16_follows_fp32(expected: Curve) -> None:
    assert_follows(curve(bf16={"enabled": True}), expected, BF16)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_one_device_follows_the_plain_engine(expected: Curve, stage: int, compiled: bool) -> None:
    pytest.importorskip("deepspeed")
    keys = {"zero_optimization": {"stage": stage}, "compile": {"enabled": compiled}}
    assert_follows(curve(engine="deepspeed", **keys), expected, FP32)


class Sharded(ResolvedRun):
    """A run on one process that FSDP2 takes although it has nothing to shard."""

    @property
    def alone(self) -> bool:
        """Never."""
        return False


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", FP32), ("bf16", BF16)])
@pytest.mark.parametrize("compiled", [False, True])
def test_fsdp2_on_one_device_follows_the_plain_engine(
    expected: Curve, monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float, compiled: bool
) -> None:
    from pipeline.engines import build  # noqa: PLC0415
    from pipeline.engines.parallel.mesh import Mesh  # noqa: PLC0415

    keys = {"bf16": {"enabled": dtype == "bf16"}, "compile": {"enabled": compiled}}
    run = resolved({"engine": "torch", "zero_optimization": {"stage": 3}, **keys}, processes=1)
    sharded = Sharded(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
    monkeypatch.setattr(
        build, "build_mesh", lambda topology, *, device_type, **_size: Mesh(topology, device_type=device_type)
    )
    engine = make_engine(sharded, device=DEVICE)
    assert type(engine).__name__ == "TorchParallel"
    assert_follows(train(sharded, engine, first=1, last=LAST), expected, tolerance)


def test_a_checkpoint_of_the_device_resumes_on_it(expected: Curve, tmp_path: Path) -> None:
    run = resolved({"compile": {"enabled": False}}, processes=1)
    train(run, make_engine(run, device=DEVICE), first=1, last=SAVED, save=tmp_path / "saved")
    resumed = make_engine(run, device=DEVICE)
    resumed.load(tmp_path / "saved")
    found = train(run, resumed, first=SAVED + 1, last=LAST)
    assert largest_difference(found.losses, expected.losses[SAVED:]) < 1e-5  # only the order of atomic sums differs
    named_state.write(resumed.state(), tmp_path)
    assert any(tmp_path.glob("*.distcp"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_updates_as_the_plain_loop(dtype: torch.dtype) -> None:
    section = OptimizerSection(params={"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1})
    torch.manual_seed(0)
    start = [torch.randn(shape, device=DEVICE).to(dtype) for shape in ((64, 33), (129,), (1,))]
    weights = []
    for fused in (True, False):
        own = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = build_optimizer([{"params": own, "weight_decay": 0.1}], section, lr=1e-2, fused=fused)
        for step in range(3):
            torch.manual_seed(step)
            for weight in own:
                weight.grad = torch.randn(weight.shape, device=DEVICE).to(dtype)
            optimizer.step()
        weights.append(own)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6  # bf16 rounds by 2^-9 in each of three steps
    for fused_weight, plain_weight in zip(*weights, strict=True):
        torch.testing.assert_close(fused_weight, plain_weight, rtol=tolerance, atol=tolerance)


def test_fused_adamw_skips_a_step_whose_flag_is_set_on_the_device() -> None:
    section = OptimizerSection(params={"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1})
    weight = torch.nn.Parameter(torch.randn(64, 8, device=DEVICE))
    before = weight.detach().clone()
    optimizer: Any = build_optimizer([{"params": [weight], "weight_decay": 0.1}], section, lr=1e-2)
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    optimizer.step()
    assert torch.equal(weight, before)
    optimizer.found_inf.zero_()
    weight.grad.fill_(1.0)
    optimizer.step()
    assert not torch.equal(weight, before)


@needs_cuda
def test_batches_are_copied_from_page_locked_memory() -> None:
    ids = torch.randint(0, 1000, (4, 128))
    documents = (torch.arange(128) // 50).int().expand(4, 128)
    batch = MicroBatch(ids, ids.roll(-1, 1), documents=documents).pin_memory()
    assert batch.input_ids.is_pinned()
    assert batch.documents.is_pinned()
    there = batch.to(DEVICE)
    assert there.input_ids.device == DEVICE
    torch.cuda.synchronize()
    assert torch.equal(there.input_ids.cpu(), ids)
    assert torch.equal(there.documents.cpu(), documents)
