"""Tasks with answers in a training run: scored or continued by its engine, in its layout, without a copy of the model.

Requests are distributed over the data-parallel ranks. Every rank makes the same number of forward passes, and gets all
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundation.errors import ConfigError
from foundation.task_figures import figures_line
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import sequence_chunks
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import Engine
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.compilation import compiles, eager
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, target_nats
from pipeline.evaluation.tasks.batches import request_batches
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.figures import generated_figures, ranked_figures
from pipeline.evaluation.tasks.passes import ForwardPass, PassShape, forward_passes
from pipeline.run.distillation.generation import Generator, Prompts
from pipeline.run.distillation.kv_cache import kv_cache_problem
from pipeline.run.distillation.sampling import Sampler

Batches = Callable[[Iterator[Any]], Iterator[Any]]
"""Function that passes batches on, and may end early, at the same batch on all ranks."""


class RequestNats:
    """Sums the cross-entropy of each request in forward passes, in place of a loss; an `Objective`.

    Args:
        requests: number of requests.

    Attributes:
        nats: fp64 [requests], -log p(continuation | context) for the positions on this rank.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        self.nats = torch.zeros(requests, dtype=torch.float64, device=device)
        self.parts: tuple[str, ...] = ()

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns the request of each position."""
        return (batch.requests,)  # type: ignore[attr-defined]

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Adds the nats of the positions to their requests (`Objective.__call__`)."""
        nats = target_nats(logits, labels, vocabulary)
        self.nats.index_add_(0, extra_targets[0].flatten(), nats.double())
        return Loss(nats.sum())

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Is not used: nothing is trained."""
        raise NotImplementedError


def check_tasks(run: ResolvedRun, model: nn.Module, tasks: tuple[EncodedTask, ...]) -> None:
    """Refuses prompts if the layout or the model cannot continue them.

    Args:
        run: the resolved config.
        model: the full model, on meta.

    Raises:
        ConfigError: prompts cannot be continued; the error names the field and what works.
    """
    generated = [task.name for task in tasks if task.generated]
    if not generated:
        return
    topology, config = run.topology, run.config
    without = f"remove the task {generated[0]} (headrace eval continues its prompts after an export), or use"
    for axis, size, why in (
        ("pp", topology.pp, "a new token would wait for all stages of the pipeline, one after another"),
        ("cp", topology.cp, "the next token follows the last, which one of the ranks of a sequence holds"),
    ):
        if size > 1:
            raise ConfigError(
                f"parallel.{axis}", size, why=f"{why}: a prompt is not continued there", remedy=f"{without} {axis} 1"
            )
    if config.fp8.enabled:
        why = "fp8 rounds with scales over the tokens of a pass: a continuation would depend on the others of its pass"
        raise ConfigError("fp8.enabled", True, why=why, remedy=f"{without} bf16 alone")
    if (name := expert_exchange(config)) != "all_to_all" and topology.ep > 1:
        why = "its buffers have the size of a micro-batch, and a continuation needs other sizes"
        raise ConfigError("parallel.ep_exchange", name, why=why, remedy=f"{without} all_to_all")
    why_not = kv_cache_problem(model, mask_documents=True, sequence_length=config.data.sequence_length)
    if why_not is not None:
        remedy = f'{without} engine torch with model.attn_implementation "sdpa"'
        raise ConfigError("evaluation.tasks", generated[0], why=why_not, remedy=remedy)


def pass_shape(run: ResolvedRun) -> PassShape:
    """Returns the shape of the tasks' forward passes in a layout."""
    topology, batch = run.topology, run.batch
    multiple = topology.tp * topology.cp * (2 if topology.cp > 1 else 1)
    # buffers of fused exchanges hold the tokens of one micro-batch
    fixed = topology.ep > 1 and expert_exchange(run.config) != "all_to_all"
    return PassShape(topology.dp, batch.micro, batch.sequence_length, multiple, fixed=fixed)


@dataclass(frozen=True)
class TaskEvaluation:
    """Evaluates tasks on one rank of a run.

    Attributes:
        run: the resolved config.
        tasks: the run's tasks, with their requests.
        engine: executes the forward passes.
        rank: global rank of this process.
        on_progress: called after every new token, since a task may exceed the hang timeout.
    """

    run: ResolvedRun
    tasks: tuple[EncodedTask, ...]
    engine: Engine
    rank: int
    device: torch.device
    on_progress: Callable[[], None] = lambda: None

    def figures(self, task: EncodedTask, batches: Batches = iter) -> dict[str, float] | None:
        """Computes the figures of a task; None if its batches ended early. Collective."""
        if task.generated:
            tokens = self.continued(task, batches)
            return None if tokens is None else generated_figures(task, tokens)
        nats = self.nats(task, batches)
        return None if nats is None else ranked_figures(task, nats)

    def line(self, task: EncodedTask, figures: Mapping[str, float]) -> str:
        """Formats the figures of a task for people."""
        return f"{task.name}: {figures_line(figures)}"

    def nats(self, task: EncodedTask, batches: Batches = iter) -> npt.NDArray[np.float64] | None:
        """Computes -log p of every request of a ranked task, float64 [requests]; None if its batches ended early."""
        topology, coordinates = self.run.topology, self.run.topology.coordinates(self.rank)
        passes = forward_passes(task.lengths, pass_shape(self.run))
        chunks = partial(sequence_chunks, cp=topology.cp, cp_rank=coordinates["cp"], zigzag=self.run.zigzag)
        made = _Counted(batches(request_batches(task, passes, dp_rank=coordinates["dp"], chunks=chunks)))
        found = RequestNats(len(task.ids), self.device)
        with eager(compiled=compiles(self.run.config.compile)):
            self.engine.forward_passes(made, found)
        if made.count < len(passes):
            return None
        last = coordinates["tp"] == 0 and coordinates["pp"] == self.run.rank_of_stage(-1)
        nats: npt.NDArray[np.float64] = self._gathered(found.nats, counts=last).numpy()
        return nats

    def continued(self, task: EncodedTask, batches: Batches = iter) -> npt.NDArray[np.int64] | None:
        """Continues every prompt greedily: int64 [prompts, new tokens]; None if the batches ended early."""
        topology, coordinates = self.run.topology, self.run.topology.coordinates(self.rank)
        generator = Generator(
            self.engine,
            Sampler(0.0, key=0),
            new_tokens=task.section.new_tokens,
            multiple=topology.tp,
            kv_cache=True,
            compiled=compiles(self.run.config.compile),
            on_progress=self.on_progress,
        )
        passes = forward_passes(task.lengths, pass_shape(self.run))
        tokens = torch.zeros((len(task.ids), task.section.new_tokens), dtype=torch.int64, device=self.device)
        made = _Counted(batches(self._prompts(task, each, coordinates["dp"]) for each in passes))
        for prompts, numbers in made:
            tokens[numbers] = generator.generate(prompts, step=0)[: len(numbers)]
        if made.count < len(passes):
            return None
        gathered: npt.NDArray[np.int64] = self._gathered(tokens, counts=coordinates["tp"] == 0).numpy()
        return gathered

    def _prompts(self, task: EncodedTask, each: ForwardPass, dp_rank: int) -> tuple[Prompts, Tensor]:
        """Returns this rank's prompts of a pass and their numbers; padding before short prompts is another document."""
        numbers = each.requests[dp_rank]
        longest = max(len(task.ids[number]) for own in each.requests for number in own.tolist())
        ids, begun = np.zeros((each.rows, longest), dtype=np.int64), np.zeros((each.rows, 1), dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            begun[row] = longest - len(task.ids[number])
            ids[row, begun[row, 0] :] = task.ids[number]
        place = np.arange(longest)[None]
        within = place >= begun
        made = (ids, np.where(within, place - begun, place), within.astype(np.int32), np.arange(each.rows))
        tokens, positions, documents, rows = (torch.from_numpy(array).to(self.device) for array in made)
        prompts = Prompts(tokens, positions, documents if begun.any() else None, rows)
        return prompts, torch.from_numpy(numbers).to(self.device)

    def _gathered(self, own: Tensor, *, counts: bool) -> Tensor:
        """Sums over the ranks that count, on the CPU."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            own = own if counts else torch.zeros_like(own)
            dist.all_reduce(own)
        return own.cpu()


class _Counted(Iterator[Any]):
    """Passes items on and counts them."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self.count = items, 0

    def __next__(self) -> Any:
        item = next(self._items)
        self.count += 1
        return item
