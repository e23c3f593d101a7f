"""Equivalence (law 3) and re-layout (law 4) on a GPU: NCCL, fused AdamW, pinned batches."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import command_line, losses, tiny_config, write_config
from tests.support import output_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is missing"),
]


def launch(script: str, config: Path, *sets: str, processes: int = 1) -> str:
    """Runs an entry point to its end, started as a user starts it; returns its output."""
    command = command_line(script, config, *sets, processes=processes)
    pipe = subprocess.PIPE
    return output_of(
        subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False, cwd=config.parent)
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-3)])
def test_zero_on_up_to_two_gpus_follows_the_reference_on_one(
    tokens: Path, tmp_path: Path, stage: int, dtype: str, tolerance: float
) -> None:
    base = tiny_config(tokens, tmp_path / "run", bf16={"enabled": dtype == "bf16"})
    config = write_config(tmp_path / "c.json", base)
    output = launch("train.py", config, "engine=reference", f"run.dir={tmp_path / 'reference'}")
    assert "NVIDIA" in output
    processes = min(2, torch.cuda.device_count())
    launch("train.py", config, f"zero_optimization.stage={stage}", processes=processes)
    expected = losses(tmp_path / "reference")
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(expected[step], rel=tolerance), step


def test_a_gpu_checkpoint_resumes_in_the_reference(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run"))
    launch("train.py", config, "run.steps=20")
    uninterrupted = losses(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000020").rename(tmp_path / "aside")
    assert "resuming after step 15" in launch("train.py", config, "engine=torch")
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(uninterrupted[step], rel=1e-4), step


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_fp8_kernels_give_what_their_emulation_gives(tokens: Path, tmp_path: Path, recipe: str) -> None:
    needed = (10, 0) if recipe == "mxfp8" else (8, 9)
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{recipe} needs compute capability {needed}")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = {"config": {"model_type": "llama", "num_hidden_layers": 2, **sizes}}
    section = {"enabled": True, "recipe": recipe}
    base = tiny_config(tokens, tmp_path / "run", bf16={"enabled": True}, fp8=section, model=model)
    config = write_config(tmp_path / "c.json", base)
    for engine in ("torch", "deepspeed"):
        for emulate in ("false", "true"):
            where = f"run.dir={tmp_path / engine / emulate}"
            launch("train.py", config, f"engine={engine}", f"fp8.emulate={emulate}", where)
        expected = losses(tmp_path / engine / "true")
        for step, loss in losses(tmp_path / engine / "false").items():
            assert loss == pytest.approx(expected[step], rel=5e-3), step


@pytest.mark.parametrize("ends", [(0, 50, 50, 70, 512), (0, 0, 0, 0, 0)], ids=["uneven", "no rows"])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_in_fp8_give_what_their_emulation_gives(ends: tuple[int, ...], transposed: bool) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's grouped products in fp8 are kernels of Hopper")
    pytest.importorskip("torchao", reason="fp8 needs torchao (extra fp8)")
    from pipeline.config.sections.run import Fp8Section  # noqa: PLC0415
    from pipeline.engines.parallel.fp8_products import GroupedScaling  # noqa: PLC0415

    generator = torch.Generator().manual_seed(1)
    rows, gradient = (torch.randn(ends[-1], size, generator=generator).bfloat16().cuda() for size in (256, 192))
    shape = (len(ends), 256, 192) if transposed else (len(ends), 192, 256)
    weight, found = torch.randn(*shape, generator=generator).bfloat16().cuda(), []
    for emulate in (True, False):
        inputs = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        last = torch.tensor(ends, dtype=torch.int32, device="cuda")
        output = GroupedScaling(Fp8Section(enabled=True, emulate=emulate))(*inputs, last, transposed)
        output.backward(gradient)
        found.append((output.detach(), inputs[0].grad, inputs[1].grad))
    for emulated, kernel in zip(*found, strict=True):
        # written in bf16; fast accumulation keeps 14 bits of a sum
        torch.testing.assert_close(kernel, emulated, rtol=2e-2, atol=5e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_later_stages_of_deepspeeds_pipeline_train_on_gpus(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", zero_optimization={"stage": 1}, parallel={"pp": 2})
    config["run"]["steps"] = 3
    launch("train.py", write_config(tmp_path / "c.json", config), processes=4)
    assert set(losses(tmp_path / "run")) == {1, 2, 3}
