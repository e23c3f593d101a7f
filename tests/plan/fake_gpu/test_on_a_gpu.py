"""What fake devices cannot execute, for a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import launch, losses, tiny_config, write_config


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_later_stages_of_deepspeeds_pipeline_train_on_gpus(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", zero_optimization={"stage": 1}, parallel={"pp": 2})
    config["run"]["steps"] = 3
    launch("train.py", write_config(tmp_path / "c.json", config), processes=4)
    assert set(losses(tmp_path / "run")) == {1, 2, 3}
