"""What a loop of one's own talks to: `engine(batch)`, `engine.backward(loss)`, `engine.step()`.

Two families execute it (`torch_engine.py`, `deepspeed_engine.py`); what they share is here: counting forward passes,
learning rates, what is said on one rank only, checkpoints.

The loss that is given to `backward` is the mean over this rank's micro-batch, as in a plain loop. Gradients are
averaged over ranks and over the micro-batches of an update, so with equal shares they are those of the mean over all
samples of the update.
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

from headrace.base.errors import TrainingError
from headrace.base.interrupts import defer_interrupt
from pipeline.checkpoint import named_state
from pipeline.checkpoint.save import save_and_wait
from pipeline.checkpoint.store import CheckpointInfo, CheckpointStore
from pipeline.config.schedule import Schedule
from pipeline.own_loop.batches import in_dtype
from pipeline.own_loop.config import BatchShare, LoopConfig
from pipeline.own_loop.state import StateEntry, check_optimizer, entries, plain_numbers, prepare_to_read, take_scalars


@dataclass(frozen=True)
class Parts:
    """What an engine is made from.

    Attributes:
        config: the checked config.
        model: the user's, on this rank's device.
        optimizer: the user's, or AdamW from the config.
        scheduler: the user's torch scheduler, or None.
        schedule: the config's, or None.
        share: how the samples of an update are shared out.
        device: of this rank.
    """

    config: LoopConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    schedule: Schedule | None
    share: BatchShare
    device: torch.device


class LoopEngine(ABC):
    """A model in a layout, driven by somebody else's loop. Collective: every rank calls the same methods.

    What is not found here is looked up in the user's model: `engine.config`, `engine.generate`, ...

    Attributes:
        module: the user's model.
        rank, world_size, is_main: this process among all; `is_main` on rank 0.
        device: of this rank.
        steps: updates so far.
        grad_norm: 2-norm of the last update's whole gradient before clipping.
    """

    def __init__(self, parts: Parts) -> None:
        self.module, self.device = parts.model, parts.device
        self.rank, self.world_size, self.is_main = parts.share.rank, parts.share.ranks, parts.share.rank == 0
        self.steps, self.grad_norm = 0, 0.0
        self._parts, self._accumulation = parts, parts.share.accumulation
        self._backwards = 0
        self._peaks = [float(group["lr"]) for group in parts.optimizer.param_groups]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, in the config's dtype. Half-precision results come back as fp32."""
        return in_dtype(self._forward(*args, **kwargs), torch.float32)

    def __getattr__(self, name: str) -> Any:
        return (
            getattr(self.__dict__["module"], name) if "module" in self.__dict__ else object.__getattribute__(self, name)
        )

    def train(self, mode: bool = True) -> LoopEngine:
        """As `nn.Module.train`."""
        self._root().train(mode)
        return self

    def eval(self) -> LoopEngine:
        """As `nn.Module.eval`."""
        return self.train(False)

    def backward(self, loss: Tensor) -> Tensor:
        """Adds the gradient of a micro-batch.

        Args:
            loss: scalar, the mean over this rank's micro-batch.

        Returns:
            The mean of it over all ranks, without gradient.
        """
        if loss.ndim:
            raise TrainingError(f"backward was given a loss of shape {tuple(loss.shape)}\n  try: its mean, a scalar")
        if self._backwards == self._accumulation:
            raise TrainingError("backward was called again before step\n  try: one step after every backward")
        self._backwards += 1
        self._backward(loss)
        mean = loss.detach().float().clone()
        if self.world_size > 1:
            dist.all_reduce(mean)
        return mean / self.world_size

    def step(self) -> bool:
        """After every `backward`: updates the weights once `gradient_accumulation_steps` of them have come.

        Returns:
            Whether this call was one that updates.

        Raises:
            TrainingError: the gradient is not finite, in fp32 or bf16; with fp16 such an update is left out.
        """
        if not self._backwards:
            raise TrainingError("step was called without a backward before it\n  try: one step after every backward")
        ends = self._backwards == self._accumulation
        if ends:
            self._set_rates()
        if ends:
            self._backwards = 0
        self._step(ends)
        if ends:
            self.steps += 1
            if self._parts.scheduler is not None:
                self._parts.scheduler.step()
        return ends

    def print(self, *values: Any) -> None:
        """As `print`, on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)

    def save(self, directory: str | Path, *, keep: int = 2) -> Path:
        """Writes a checkpoint of weights, buffers, optimizer and step, and keeps the newest few. Whole or absent.

        Any number of ranks and either engine can go on from it.

        Args:
            directory: gets `checkpoints/step-N`.
            keep: how many stay.
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
            return save_and_wait(store, about, lambda: entries(self._pieces(), self.module)).path

    def load(self, directory: str | Path) -> int:
        """Goes on from the newest whole checkpoint that `save` has written; does nothing when there is none.

        Returns:
            Updates done in it, 0 when there is none.

        Raises:
            CheckpointError: it is of another model or optimizer, or damaged.
        """
        newest = CheckpointStore(Path(directory), keep=2).newest_intact(self.print)
        if newest is None:
            return 0
        details = newest.manifest.details
        check_optimizer(details, self._parts.optimizer)
        pieces = self._pieces()
        state, scalars = prepare_to_read(pieces, self.module, newest.path)
        named_state.read({**state, **scalars}, newest.path)
        take_scalars(pieces, scalars)
        self._loaded()
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
        """The module that is called."""

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def _step(self, ends: bool) -> None: ...

    @abstractmethod
    def _pieces(self) -> list[StateEntry]: ...

    @abstractmethod
    def _loaded(self) -> None:
        """Weights have been read: whatever is derived from them is brought up to date."""

    @abstractmethod
    def _loss_scale(self) -> list[float]: ...

    @abstractmethod
    def _set_loss_scale(self, state: list[float]) -> None: ...


class PreparedOptimizer:
    """Stands where the user's optimizer stood: `step` is the engine's, `zero_grad` is done by the engine.

    Args:
        engine: whose optimizer it is.
        optimizer: the user's; whatever else is asked for is found there.
    """

    def __init__(self, engine: LoopEngine, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer

    def step(self) -> None:
        """As `engine.step()`."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine clears gradients after an update, and not between the micro-batches of one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


@contextmanager
def at_rate_zero(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Learning rates are 0 inside: DeepSpeed makes a dummy step, and at any other rate it would decay the weights."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
