"""Engine of a custom training loop: `engine(batch)`, `engine.backward(loss)`, `engine.step()`.

Its two implementations (`torch_engine.py`, `deepspeed_engine.py`) share gradient accumulation, learning rates, printing
on rank 0 and checkpoints.

The loss given to `backward` is the mean over this rank's micro-batch, as in a plain loop. Gradients are averaged over
ranks and over the micro-batches of an optimizer step (gradient accumulation), which gives the gradients of the mean
over the global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundation.errors import TrainingError
from foundation.interrupts import defer_interrupt
from pipeline.checkpoint import named_state
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.save import save_and_wait
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.schedule import Schedule
from pipeline.own_loop.batches import gathered, in_dtype
from pipeline.own_loop.config import BatchShare, LoopConfig
from pipeline.own_loop.state import StateEntry, check_optimizer, entries, load_scalars, plain_numbers, prepare_to_read
from pipeline.own_loop.torch_scheduler import step_taken_over
from pipeline.own_loop.weights import full_state_dict, write_model
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero


@dataclass(frozen=True)
class Parts:
    """Inputs of an engine.

    Attributes:
        config: the checked config.
        model: the user's model, on this rank's device.
        optimizer: the user's optimizer, or the config's.
        scheduler: the user's torch scheduler, or None.
        schedule: the config's learning-rate schedule, or None.
        share: division of a global batch over ranks.
        device: this rank's device.
    """

    config: LoopConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    schedule: Schedule | None
    share: BatchShare
    device: torch.device


class LoopEngine(ABC):
    """A distributed model for a custom training loop. Collective: every rank calls the same methods.

    All other attributes are those of the user's model: `engine.config`, `engine.generate`, ...

    Attributes:
        module: the user's model.
        rank, world_size, is_main: this process's rank, the number of processes, and whether the rank is 0.
        device: this rank's device.
        steps: optimizer steps so far.
        accumulation: micro-batches per optimizer step (`gradient_accumulation_steps`).
        grad_norm: L2 norm of the last step's gradient of all parameters, before clipping.
    """

    def __init__(self, parts: Parts) -> None:
        self.module, self.device = parts.model, parts.device
        self.rank, self.world_size, self.is_main = parts.share.rank, parts.share.ranks, parts.share.rank == 0
        self.steps, self.grad_norm = 0, 0.0
        self._parts, self._accumulation = parts, parts.share.accumulation
        self.accumulation = self._accumulation
        self._backwards = self._unsynced = 0
        self._peaks = [float(group["lr"]) for group in parts.optimizer.param_groups]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward pass in the config's precision. Half-precision outputs are cast to fp32."""
        return in_dtype(self._forward(*args, **kwargs), torch.float32)

    def __getattr__(self, name: str) -> Any:
        return (
            getattr(self.__dict__["module"], name) if "module" in self.__dict__ else object.__getattribute__(self, name)
        )

    def train(self, mode: bool = True) -> LoopEngine:
        """Sets training mode, as `nn.Module.train`."""
        self._root().train(mode)
        return self

    def eval(self) -> LoopEngine:
        """Sets evaluation mode, as `nn.Module.eval`."""
        return self.train(False)

    def backward(self, loss: Tensor) -> Tensor:
        """Runs the backward pass of a micro-batch: accumulates its gradient.

        Args:
            loss: scalar, the mean over this rank's micro-batch.

        Returns:
            The loss's mean over all ranks, detached.
        """
        if loss.ndim:
            raise TrainingError(
                f"backward needs a scalar loss, not shape {tuple(loss.shape)}\n  try: the mean of the loss"
            )
        if self._backwards == self._accumulation:
            raise TrainingError("backward was called again before step\n  try: one step after every backward")
        if self._unsynced and self._backwards + 1 == self._accumulation:
            raise TrainingError(
                f"backward within no_sync is micro-batch {self._backwards + 1} of {self._accumulation}, whose gradients"
                f" are reduced\n  try: no_sync only while model.sync_gradients is false, or remove it: micro-batches"
                f" before the last of gradient_accumulation_steps are not reduced anyway"
            )
        self._backwards += 1
        self._backward(loss)
        mean = loss.detach().float().clone()
        if self.world_size > 1:
            dist.all_reduce(mean)
        return mean / self.world_size

    def step(self) -> bool:
        """Updates the weights after every `gradient_accumulation_steps` calls. Call it after every `backward`.

        Returns:
            Whether this call completed an optimizer step.

        Raises:
            TrainingError: the gradient is not finite in fp32 or bf16; with fp16 the step is skipped.
        """
        if not self._backwards:
            raise TrainingError("step was called without a preceding backward\n  try: one step after every backward")
        ends = self._backwards == self._accumulation
        if ends:
            self._set_rates()
        if ends:
            self._backwards = 0
        self._step(ends)
        if ends:
            self.steps += 1
            if self._parts.scheduler is not None:
                step_taken_over(self._parts.scheduler)
        return ends

    @property
    def sync_gradients(self) -> bool:
        """Whether the next `backward` is the last of an optimizer step: gradients are then reduced over ranks."""
        return self._backwards % self._accumulation + 1 == self._accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of micro-batches whose gradients are accumulated on this rank, without communication.

        The engine itself does this for every micro-batch but the last of `gradient_accumulation_steps`. A loop written
        with `no_sync` may keep its lines, which are checked.

        Raises:
            TrainingError: a `backward` within the context is the last of an optimizer step.
        """
        self._unsynced += 1
        try:
            yield
        finally:
            self._unsynced -= 1

    def gather_for_metrics(self, values: Any) -> Any:
        """Gathers predictions or labels of the micro-batches of all ranks, in the order of samples. Collective.

        Micro-batches of one forward pass are consecutive samples over the ranks. No sample is a padding copy: nothing
        has to be dropped at the end of an epoch.

        Args:
            values: a tensor [B, ...] of this rank, or nested dicts, lists and tuples of tensors; B may differ between
                ranks. A scalar becomes a tensor [ranks].

        Returns:
            The same structure on every rank, detached, with tensors [sum of B, ...] on this rank's device.
        """
        return gathered(values, device=self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Gathers the full weights and buffers under the user's names, on the CPU. Collective.

        Weights are the fp32 master weights for every engine, ZeRO stage and precision. Parameters are gathered one at a
        time: other ranks never hold more than one.

        Returns:
            On rank 0 the `state_dict` of the plain model; empty on other ranks.
        """
        return full_state_dict(self._state_entries(), self.module, device=self.device)

    def save_model(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Writes the final weights as a model folder, complete or absent. Collective.

        A Hugging Face model is written as by its `save_pretrained`. Any other module is written as `model.safetensors`,
        to be loaded with `safetensors.torch.load_model`.

        Args:
            folder: the model folder, which must not exist yet.
            dtype: dtype of floating-point weights; buffers keep theirs.

        Raises:
            DataError: the folder exists.
        """
        weights, final = self.state_dict(), Path(folder)
        on_rank_zero(lambda: write_model(self.module, weights, final, dtype=dtype, steps=self.steps))
        return final

    def save_pretrained(self, folder: str | Path) -> Path:
        """Calls `save_model`: the module's own `save_pretrained` would write this rank's shards."""
        return self.save_model(folder)

    def print(self, *values: Any) -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)

    def save(self, directory: str | Path, *, keep: int = 2) -> Path:
        """Writes a checkpoint of weights, buffers, optimizer and step atomically, and deletes older ones.

        It can be resumed on any number of ranks and by either engine.

        Args:
            directory: directory in which checkpoints are written to `checkpoints/step-N`.
            keep: number of newest checkpoints to keep.
        """
        store = CheckpointStore(Path(directory), keep=keep)
        details = {
            "step": self.steps,
            "optimizer": type(self._parts.optimizer).__name__,
            "rates": [group["lr"] for group in self._parts.optimizer.param_groups],
            "scheduler": plain_numbers(self._parts.scheduler),
            "loss_scale": self._loss_scale(),
        }

        config = self._parts.config.model_dump(mode="json")
        about = CheckpointInfo(self.steps, config, parents={}, details=details)
        with defer_interrupt(f"the checkpoint of step {self.steps}"):
            return save_and_wait(store, about, lambda: entries(self._state_entries(), self.module)).path

    def load(self, directory: str | Path) -> int:
        """Resumes from the newest complete checkpoint written by `save`; does nothing without one.

        Returns:
            The optimizer step of the checkpoint, 0 without one.

        Raises:
            CheckpointError: the checkpoint belongs to another model or optimizer, or is damaged.
        """
        newest = CheckpointStore(Path(directory), keep=2).newest_intact(self.print)
        if newest is None:
            return 0
        details = newest.manifest.details
        check_optimizer(details, self._parts.optimizer)
        state_entries = self._state_entries()
        state, scalars = prepare_to_read(state_entries, self.module, newest.path)
        named_state.read({**state, **scalars}, newest.path)
        load_scalars(state_entries, scalars)
        self._after_load()
        for group, rate in zip(self._groups(), details["rates"], strict=True):
            group["lr"] = rate
        if self._parts.scheduler is not None and details["scheduler"] is not None:
            self._parts.scheduler.load_state_dict(details["scheduler"])
        self._set_loss_scale(details["loss_scale"])
        self.steps = newest.step
        return self.steps

    def _set_rates(self) -> None:
        schedule = self._parts.schedule
        if schedule is not None:
            share = schedule.lr(self.steps + 1) / self._peaks[0]
            for group, peak in zip(self._groups(), self._peaks, strict=True):
                group["lr"] = share * peak

    def _groups(self) -> list[dict[str, Any]]:
        return self._parts.optimizer.param_groups

    @abstractmethod
    def _root(self) -> Any:
        """The wrapped module."""

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def _step(self, ends: bool) -> None: ...

    @abstractmethod
    def _state_entries(self) -> list[StateEntry]: ...

    @abstractmethod
    def _after_load(self) -> None:
        """Updates all values derived from the weights; called after the weights were loaded."""

    @abstractmethod
    def _loss_scale(self) -> list[float]: ...

    @abstractmethod
    def _set_loss_scale(self, state: list[float]) -> None: ...


class PreparedOptimizer:
    """Replaces the user's optimizer in the loop: the engine's `step` updates the weights and clears gradients.

    Args:
        engine: the engine.
        optimizer: the user's optimizer, which provides all other attributes.
    """

    def __init__(self, engine: LoopEngine, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer

    def step(self) -> None:
        """Calls `engine.step()`."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine clears gradients after an optimizer step, not between micro-batches."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


@contextmanager
def at_rate_zero(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context with learning rates of 0: DeepSpeed runs a dummy step, which would otherwise decay the weights."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
