"""Custom training loops equal the plain PyTorch loop: every engine, every ZeRO stage, one and two ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_model
from torch import nn

from foundation.directory import read_manifest
from pipeline.config.schedule import make_schedule
from pipeline.config.sections.deepspeed import SchedulerParams, SchedulerSection
from tests import warm
from tests.own_loop.worker import BATCH, data, network, optimizer_of
from tests.support import output_of

PLAIN = {"gradient_clipping": 0}  # as the plain loop
LAYOUTS = {
    **{f"torch-{stage}": {"engine": "torch", "zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 2, 3)},
    **{f"deepspeed-{stage}": {"zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 1, 2, 3)},
}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0}}  # no gradient is a gradient of zeros to it
HALF = dict.fromkeys(("torch-0", "torch-2", "torch-3", "deepspeed-0", "deepspeed-2", "deepspeed-3"), 1e-2)


def all_cases(work: Path) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS.items():
        clipped = {**layout, "gradient_accumulation_steps": 2, "gradient_clipping": 0.15, "scheduler": WARMUP}
        cases[f"everything {name}"] = {"config": {**clipped, "optimizer": ADAMW}, "optimizer": "none"}
        cases[f"sgd {name}"] = {"config": layout, "optimizer": "sgd", "user_schedule": True}
        folder = str(work / f"model {name}")
        cases[f"norm {name}"] = {"config": layout, "network": "norm", "save_model": folder, "gather": True}
        cases[f"experts {name}"] = {"config": {**layout, "optimizer": SGD}, "optimizer": "none", "network": "experts"}
        cases[f"save {name}"] = {"config": layout, "save": str(work / name), "network": "norm"}
    for name in ("torch-0", "torch-3", "deepspeed-2"):
        folder = str(work / f"tied {name}")
        cases[f"tied {name}"] = {"config": LAYOUTS[name], "network": "tied", "save_model": folder}
    for name in ("torch-0", "deepspeed-0"):
        cases[f"adafactor {name}"] = {"config": LAYOUTS[name], "optimizer": "adafactor"}
    for name in ("torch-0", "torch-3"):
        cases[f"fp16 {name}"] = {"config": {**LAYOUTS[name], "fp16": {"enabled": True}}, "network": "norm"}
    for name in HALF:
        cases[f"bf16 {name}"] = {"config": {**LAYOUTS[name], "bf16": {"enabled": True}}, "network": "norm"}
    return cases


def launched(work: Path, cases: dict[str, Any], *, processes: int) -> dict[str, Any]:
    work.mkdir(parents=True, exist_ok=True)
    (work / "cases.json").write_text(json.dumps(cases))
    worker = Path(__file__).with_name("worker.py")
    output_of(warm.run(worker, "cases.json", "out.json", cwd=work, processes=processes, timeout_s=500))
    results: dict[str, Any] = json.loads((work / "out.json").read_text())
    return results


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own_loop")


@pytest.fixture(scope="module")
def one(work: Path) -> dict[str, Any]:
    return launched(work / "one", all_cases(work / "one"), processes=1)


@pytest.fixture(scope="module")
def two(work: Path) -> dict[str, Any]:
    return launched(work / "two", all_cases(work / "two"), processes=2)


@pytest.fixture(params=["one", "two"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    results: dict[str, Any] = request.getfixturevalue(request.param)
    return results


def plain(kind: str, optimizer: torch.optim.Optimizer, model: nn.Module, *, clip: float = 0.0) -> Any:
    """The plain loop of torch; `kind` is warmup, steps or none. Returns losses, norms and the model's buffers."""
    section = SchedulerSection(type="WarmupLR", params=SchedulerParams(**WARMUP["params"]))
    schedule = make_schedule(section, lr=ADAMW["params"]["lr"], steps=None)  # type: ignore[index]
    steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1) if kind == "steps" else None
    inputs, targets = data()
    losses, norms = [], []
    for number in range(2 * len(inputs) // BATCH):
        where = slice(number * BATCH % len(inputs), number * BATCH % len(inputs) + BATCH)
        loss = nn.functional.mse_loss(model(inputs[where]), targets[where])
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(number + 1) if kind == "warmup" else group["lr"]
        optimizer.step()
        optimizer.zero_grad()
        if steps is not None:
            steps.step()
        losses.append(loss.item())
    return losses, norms, {name: value.tolist() for name, value in model.named_buffers()}


@cache
def plain_of(kind: str, optimizer: str, schedule: str) -> Any:
    model = network(kind)
    made = optimizer_of(optimizer, model)
    assert made is not None
    return plain(schedule, made, model)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulation_clipping_optimizer_and_scheduler_of_the_config(seen: dict[str, Any], layout: str) -> None:
    model = network("plain")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    losses, norms, _ = plain("warmup", torch.optim.AdamW(groups, lr=0.02), model, clip=0.15)
    assert min(norms) > 0.15  # otherwise nothing was clipped
    result = seen[f"everything {layout}"]
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batchnorm_sees_the_samples_of_all_ranks(seen: dict[str, Any], layout: str) -> None:
    losses, norms, buffers = plain_of("norm", "adamw", "none")
    result = seen[f"norm {layout}"]
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["norms"] == pytest.approx(norms, rel=1e-4)
    assert result["buffers"].keys() == buffers.keys()
    for name, value in buffers.items():
        assert result["buffers"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_a_rank_does_not_run_get_no_gradients_of_others(seen: dict[str, Any], layout: str) -> None:
    model = network("experts")
    losses, norms, _ = plain("none", torch.optim.SGD(model.parameters(), lr=0.05), model)
    assert seen[f"experts {layout}"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert seen[f"experts {layout}"]["norms"] == pytest.approx(norms, rel=1e-4)


@cache
def plain_weights(kind: str) -> dict[str, torch.Tensor]:
    """The state dict of the plain loop's model at the end, after AdamW."""
    model = network(kind)
    made = optimizer_of("adamw", model)
    assert made is not None
    plain("none", made, model)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize(
    ("kind", "layout"), [*(("norm", name) for name in LAYOUTS), ("tied", "torch-3"), ("tied", "deepspeed-2")]
)
def test_the_final_weights_are_those_of_the_plain_loop(
    request: pytest.FixtureRequest, work: Path, ranks: str, kind: str, layout: str
) -> None:
    request.getfixturevalue(ranks)
    folder = work / ranks / f"{'model' if kind == 'norm' else kind} {layout}"
    model = network(kind, seed=99)
    missing, unexpected = load_model(model, folder / "model.safetensors")
    assert (list(missing), unexpected) == ([], [])
    expected = plain_weights(kind)
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert read_manifest(folder, kind="model").details["steps"] == 8


def test_metrics_are_gathered_in_the_order_of_samples(one: dict[str, Any], two: dict[str, Any]) -> None:
    inputs, _ = data()
    for layout in LAYOUTS:
        assert one[f"norm {layout}"]["gathered"] == {"x": inputs[-BATCH:].tolist(), "rank": [0]}
        assert two[f"norm {layout}"]["gathered"] == {"x": inputs[-BATCH:].tolist(), "rank": [0, 1]}


@pytest.mark.parametrize("layout", ["torch-0", "deepspeed-0"])
def test_an_optimizer_of_whole_tensors_is_exact_where_nothing_is_sharded(seen: dict[str, Any], layout: str) -> None:
    losses, _, _ = plain_of("plain", "adafactor", "none")
    assert seen[f"adafactor {layout}"]["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "plain"),
    [
        *(("sgd", layout, ("plain", "sgd", "steps")) for layout in LAYOUTS),  # optimizer and scheduler of the user
        *(("tied", layout, ("tied", "adamw", "none")) for layout in ("torch-0", "torch-3", "deepspeed-2")),
    ],
)
def test_the_users_optimizer_and_tied_weights(
    seen: dict[str, Any], name: str, layout: str, plain: tuple[str, str, str]
) -> None:
    losses, norms, _ = plain_of(*plain)
    assert seen[f"{name} {layout}"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert seen[f"{name} {layout}"]["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("layout", HALF)
def test_bf16_follows_fp32_and_keeps_its_statistics_in_fp32(seen: dict[str, Any], layout: str) -> None:
    losses, _, buffers = plain_of("norm", "adamw", "none")
    result = seen[f"bf16 {layout}"]
    assert result["losses"] == pytest.approx(losses, rel=HALF[layout])
    # 2^-8 is bf16's precision; statistics of activations in bf16, kept in fp32
    assert result["buffers"]["1.running_var"] == pytest.approx(buffers["1.running_var"], rel=2**-6)


@pytest.mark.parametrize(("layout", "weights"), [("torch-3", "torch.float32"), ("bf16 torch-3", "torch.bfloat16")])
def test_fsdp_gathers_weights_in_bf16_and_reduces_in_fp32(two: dict[str, Any], layout: str, weights: str) -> None:
    found = two[layout if "bf16" in layout else f"norm {layout}"]
    assert found["collectives"] == {
        "c10d::_allgather_base_": [weights],
        "c10d::_reduce_scatter_base_": ["torch.float32"],
    }
    assert found["dtypes"] == ["torch.float32"]  # of the shards that the optimizer updates


@pytest.mark.parametrize("layout", ["torch-0", "torch-3"])
def test_fp16_with_loss_scaling_follows_fp32(seen: dict[str, Any], layout: str) -> None:
    losses, norms, _ = plain_of("norm", "adamw", "none")
    # 2^-11 is fp16's precision, and there are some ten roundings on the way
    assert seen[f"fp16 {layout}"]["losses"] == pytest.approx(losses, rel=5e-3)
    assert seen[f"fp16 {layout}"]["norms"] == pytest.approx(norms, rel=5e-2)


def test_fp16_that_deepspeed_does_not_support_here_is_refused(work: Path) -> None:
    if get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed runs fp16 on this device")
    with pytest.raises(AssertionError, match=r"fp16\.enabled = True"):
        launched(work / "refused", {"x": {"config": {"fp16": {"enabled": True}}}}, processes=1)


@pytest.mark.parametrize("reader", ["torch-3", "deepspeed-2"])
def test_any_layout_resumes_the_checkpoint_of_any_other(one: Any, two: Any, work: Path, reader: str) -> None:
    """A checkpoint of the first epoch of every layout, on one and on two ranks, read on one rank."""
    writers = [(where, name) for where in ("one", "two") for name in LAYOUTS]
    cases = {
        f"{where} {name}": {"config": LAYOUTS[reader], "load": str(work / where / name), "epochs": 1, "network": "norm"}
        for where, name in writers
    }
    results = launched(work / f"read-{reader}", cases, processes=1)
    for where, name in writers:
        wrote = {"one": one, "two": two}[where][f"save {name}"]
        result = results[f"{where} {name}"]
        assert result["done"] == 4
        assert result["losses"] == pytest.approx(wrote["losses"][4:], rel=1e-5), (where, name)


@pytest.mark.parametrize("reader", ["torch-0", "torch-2", "deepspeed-3"])
def test_two_ranks_resume_the_checkpoint_of_one(one: Any, work: Path, reader: str) -> None:
    load = str(work / "one" / "torch-0")
    cases = {"read": {"config": LAYOUTS[reader], "load": load, "epochs": 1, "network": "norm"}}
    result = launched(work / f"spread-{reader}", cases, processes=2)["read"]
    assert result["losses"] == pytest.approx(one["save torch-0"]["losses"][4:], rel=1e-5)
