"""The Hugging Face Trainer on the same model, tokens and batch, with its fastest plain settings.

Plain means without third-party packages: fused AdamW, bf16, TF32, torch's scaled dot product attention, torch.compile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu_check.cases import Row, Size
from benchmarks.gpu_check.inputs import draw, tokens
from benchmarks.gpu_check.meter import Meter

LR = 1e-4


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The samples of all steps in order, with labels in the Trainer's form: the model shifts them."""

    def __init__(self, size: Size, steps: int) -> None:
        self._rows = torch.cat([tokens(size, step)[:, :-1] for step in range(steps)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that takes samples in order: the tokens of a step are the same as ours."""

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Timed(TrainerCallback):  # type: ignore[misc]
    """Reports the end of every step to the meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Reports the end of an optimizer step."""
        self._meter.end_step()


@contextmanager
def opened(_device: torch.device) -> Iterator[None]:
    """Does nothing: the Trainer opens its own process group."""
    yield


class Contestant:
    """A model ready for training by the Trainer; arguments as in `ours.Contestant`."""

    def __init__(self, size: Size, row: Row, *, micro: int, checkpointing: str, device: torch.device) -> None:
        self._size, self._row, self._micro, self._device = size, row, micro, device
        self._checkpointing = checkpointing != "none"
        dtype = torch.bfloat16 if row.mode == "bf16-weights" else torch.float32
        config = AutoConfig.for_model(**size.model)
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self._model.config.use_cache = False
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(draw(name, tuple(parameter.shape), device))

    def train(self, meter: Meter) -> float:
        """Runs the meter's steps; returns the mean loss in nats per token."""
        with tempfile.TemporaryDirectory() as work:
            arguments = TrainingArguments(output_dir=work, max_steps=meter.total, **self._settings())
            data, callbacks = Samples(self._size, meter.total), [Timed(meter)]
            trainer = InOrder(model=self._model, args=arguments, train_dataset=data, callbacks=callbacks)
            return float(trainer.train().training_loss)

    def _settings(self) -> dict[str, Any]:
        cuda = self._device.type == "cuda"
        return {
            "per_device_train_batch_size": self._micro,
            "gradient_accumulation_steps": self._size.samples // self._micro,
            "learning_rate": LR,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch_fused",
            "bf16": True,
            "tf32": True if cuda else None,
            "torch_compile": self._row.mode != "eager",
            "gradient_checkpointing": self._checkpointing,
            "use_cpu": not cuda,
            "dataloader_pin_memory": cuda,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
