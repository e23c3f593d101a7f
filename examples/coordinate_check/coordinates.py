"""Sizes of a model's coordinates: how far training moves activations, measured on one batch (a coordinate check).

With a parametrization that transfers, every coordinate moves by about as much at every size (Yang et al. 2022,
arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import Engine
from pipeline.engines.build import build_engine
from pipeline.engines.common import require_finite_step
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parametrization.kinds import ParameterKind, kind_of
from pipeline.models.decoder_layers import decoder_layers
from pipeline.run.prepare import PreparedRun, prepare

PLACES = ("embedding", "queries", "MLP activations", "residual stream", "logits")
"""Compared places: queries and MLP activations are the last layer's; the residual stream is the final norm's input."""


def begin(run: ResolvedRun) -> tuple[PreparedRun, Engine]:
    """Prepares a run, and builds its engine in one CPU process, at its first step."""
    prepared = prepare(run)
    objective = CrossEntropy(z_loss=run.config.loss.z_loss)
    engine = build_engine(run, prepared.model, prepared.values, objective, device=torch.device("cpu"))
    return prepared, engine


def losses(prepared: PreparedRun, engine: Engine) -> Iterator[float]:
    """Trains to the end; yields the loss of every step in nats per token.

    Raises:
        TrainingError: a loss or gradient norm is not finite.
    """
    run = prepared.run
    mask = run.config.data.mask_documents
    for batch in StepLoader(prepared.mixture, run.batch, dp_rank=0, steps=(1, run.steps), mask_documents=mask):
        yield require_finite_step(batch.step, engine.train_step(batch, lr=run.schedule.lr(batch.step))).loss


def measure(run: ResolvedRun) -> dict[str, float]:
    """Trains a run, and measures how far its activations move.

    Returns:
        Place -> root mean square, over coordinates, of how much the activations on the first micro-batch have changed
        since initialization.
    """
    prepared, engine = begin(run)
    first = next(iter(StepLoader(prepared.mixture, run.batch, dp_rank=0, steps=(1, 1))))
    probe = first.micro_batches[0]
    before = _activations(engine, prepared.model, probe)
    for _ in losses(prepared, engine):
        pass
    after = _activations(engine, prepared.model, probe)
    return {place: float((after[place] - before[place]).square().mean().sqrt()) for place in PLACES}


def _activations(engine: Engine, model: nn.Module, probe: MicroBatch) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    [decoder] = engine.decoders
    config: Any = model.config
    with _recording(decoder.causal, config.model_type, found):
        engine.forward_passes([probe], CrossEntropy())
    return found


@contextmanager
def _recording(causal: nn.Module, model_type: str, found: dict[str, Tensor]) -> Iterator[None]:
    """Records the activations of `PLACES` [B, T, ...], fp32, in the next forward pass."""
    head: Any = causal
    owners = _owners(causal, model_type)
    handles = [
        owners["embedding"].register_forward_hook(partial(_keep_output, found, "embedding")),
        owners["queries"].register_forward_hook(partial(_keep_output, found, "queries")),
        owners["MLP activations"].register_forward_pre_hook(partial(_keep_input, found, "MLP activations")),
        owners["residual stream"].register_forward_pre_hook(partial(_keep_input, found, "residual stream")),
        head.get_output_embeddings().register_forward_hook(partial(_keep_output, found, "logits")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _owners(causal: nn.Module, model_type: str) -> dict[str, nn.Module]:
    """Place -> module that has the place as its input or output."""
    last = str(max(decoder_layers(causal)))
    kinds = {name: kind_of(model_type, name) for name, _ in causal.named_parameters()}

    def owner(fits: Callable[[str], bool]) -> nn.Module:
        return causal.get_submodule(next(name for name in kinds if fits(name)).rpartition(".")[0])

    def in_last(kind: ParameterKind) -> list[str]:
        return [name for name, each in kinds.items() if each is kind and last in name.split(".")]

    return {
        "embedding": owner(lambda name: kinds[name] is ParameterKind.EMBEDDING),
        "queries": owner(lambda name: name == in_last(ParameterKind.HIDDEN)[0]),
        "MLP activations": owner(lambda name: name == in_last(ParameterKind.BRANCH_OUTPUT)[-1]),
        "residual stream": owner(lambda name: kinds[name] is ParameterKind.FINAL_NORM),
    }


def _keep_output(found: dict[str, Tensor], place: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
    found[place] = output.detach().float().clone()


def _keep_input(found: dict[str, Tensor], place: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    found[place] = inputs[0].detach().float().clone()
