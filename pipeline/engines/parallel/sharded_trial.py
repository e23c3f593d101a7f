"""Runs a tiny model as pipeline stages or tensor-parallel ranks, and compares loss and every gradient with the whole.

Stages run one after another in one process; tensor-parallel ranks are threads of it (`simulated_ranks`). Both use the
code of a real run: `keep_stage`, `apply_tensor_parallel`, `Decoder`. A layout is refused with the first tensor that
differs, be it sharded, tied, replicated or an end of a fused projection.

Shapes: B = 2 samples, T = 16 positions, V = 32 ids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, local_owners, parameter_owners
from pipeline.engines.parallel.recurrent import SequenceRanks, apply_recurrent, recurrent_blocks
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.engines.parallel.stages import StageLayers, keep_stage
from pipeline.engines.parallel.tensor import apply_tensor_parallel
from pipeline.engines.parallel.tensor_styles import NO_TABLE
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import ParameterValues

GRADIENT_TOLERANCE = 1e-3
"""Largest difference of a gradient in fp32, as a share of its largest value. Another order of summation differs by
1e-5, a missing summand or a wrong slice by 1e-1. Losses may differ by a tenth of it."""
_NOISE = 1e-5
"""Differences below this share of the largest value of all gradients are rounding: some gradients are zero."""


@dataclass(frozen=True)
class LossGradients:
    """Result of a forward and a backward pass.

    Attributes:
        loss: sum over targets, in nats.
        gradients: Hugging Face name -> gradient of the whole parameter; parameters without a gradient are left out.
    """

    loss: float
    gradients: dict[str, Tensor]

    def difference(self, expected: LossGradients) -> str | None:
        """Returns the first difference in words, by how far it exceeds the tolerance; None if all is equal."""
        if not abs(self.loss - expected.loss) <= 0.1 * GRADIENT_TOLERANCE * abs(expected.loss):
            return f"the loss is {self.loss:.4f} instead of {expected.loss:.4f}"
        noise = _NOISE * max((float(each.abs().max()) for each in expected.gradients.values()), default=0.0)
        worst, name = 1.0, ""
        for key in sorted(self.gradients.keys() | expected.gradients.keys()):
            size, off = _compared(key, self.gradients, expected.gradients)
            excess = off / (GRADIENT_TOLERANCE * size + noise + 1e-30)
            if not excess <= worst:
                worst, name = excess, key
        return f"the gradient of {name} differs" if name else None


def _compared(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Returns the largest value of an expected gradient, and the largest difference; no gradient counts as zeros."""
    own, other = found.get(name), expected.get(name)
    if own is None or other is None:
        given = own if other is None else other
        assert given is not None
        largest = float(given.abs().max())
        return (0.0 if other is None else largest), largest
    return float(other.abs().max()), float((own - other).abs().max())


def whole_gradients(model: nn.Module, ids: Tensor) -> LossGradients:
    """Computes loss and gradients by transformers' own forward pass."""
    logits = model(input_ids=ids, use_cache=False).logits
    total = CrossEntropy()(logits, ids).total
    total.backward()
    return LossGradients(float(total.detach()), _gradients(dict(model.named_parameters())))


def stage_gradients(
    models: list[nn.Module], stages: list[StageLayers], layout: DecoderLayout, ids: Tensor
) -> LossGradients:
    """Computes loss and gradients of pipeline stages, one after another; gradients of tied weights are summed.

    Args:
        models: a copy of the tiny model for every stage; changed.
        stages: the stages, in order.
        layout: layout of the whole model.
        ids: int64 [B, T].
    """
    batch, passed, decoders = MicroBatch(ids, ids), (ids,), list[Decoder]()
    for model, stage in zip(models, stages, strict=True):
        owners = parameter_owners(model)
        keep_stage(model, stage)
        model.get_output_embeddings()  # type: ignore[operator]  # as engines do; fails if it is part of another module
        own = local_owners(owners, model)
        before = decoders[-1].message if decoders else None
        decoders.append(Decoder(model, replace(layout, first=stage.first, last=stage.last), own))
        if before is not None and (message := decoders[-1].message) is not None:
            message.shapes[ids.shape] = before.sent_shapes
        passed = decoders[-1](passed[0], batch, CrossEntropy())
    passed[0].backward()
    found: dict[str, Tensor] = {}
    for decoder in decoders:
        for name, gradient in _gradients(decoder.parameters_by_name()).items():
            found[name] = found[name] + gradient if name in found else gradient
    return LossGradients(float(passed[0].detach()), found)


def rank_gradients(
    model: nn.Module,
    values: ParameterValues,
    layout: DecoderLayout,
    ids: Tensor,
    *,
    ranks: int,
    table: Mapping[str, str] = NO_TABLE,
) -> LossGradients:
    """Computes loss and gradients of tensor-parallel ranks, each a thread.

    Args:
        model: the tiny model, on meta; not changed.
        values: values of its whole parameters.
        layout: layout without tensor parallelism.
        ids: int64 [B, T].
        ranks: number of tensor-parallel ranks.
        table: the config's `parallel.tp_plan`.
    """
    results = run_ranks(ranks, partial(_rank_gradients, model, values, layout, ids, table))
    losses = {loss for loss, _ in results}
    assert len(losses) == 1, f"tensor-parallel ranks disagree about the loss: {losses}"
    found: dict[str, Tensor] = {}
    for name in sorted({name for _, gradients in results for name in gradients}):
        found[name] = torch.stack([gradients[name] for _, gradients in results if name in gradients]).sum(0)
    return LossGradients(losses.pop(), found)


def _rank_gradients(
    model: nn.Module,
    values: ParameterValues,
    layout: DecoderLayout,
    ids: Tensor,
    table: Mapping[str, str],
    group: dist.ProcessGroup,
) -> tuple[float, dict[str, Tensor]]:
    """Returns a rank's loss, and its summands of every whole gradient."""
    causal = copy.deepcopy(model)
    shapes = {name: p.shape for name, p in causal.named_parameters()}
    owners = parameter_owners(causal)
    names = {id(p): name for name, p in causal.named_parameters()}
    tensor = apply_tensor_parallel(causal, group, names=names, table=table)
    recurrent = apply_recurrent(causal, SequenceRanks(tp=group), blocks=recurrent_blocks(causal))
    decoder = Decoder(causal.eval(), replace(layout, tensor=tensor, recurrent=recurrent), owners)
    fill_buffers(causal, CPU)
    for name in decoder.parameters_by_name():
        decoder.set_parameter(name, nn.Parameter(values.value(name, box=tensor.boxes.get(name))))
    total = decoder(ids, MicroBatch(ids, ids), CrossEntropy())[0]
    total.backward()
    gradients = _gradients(decoder.parameters_by_name())
    for name, gradient in gradients.items():
        if (box := tensor.boxes.get(name)) is not None:
            whole = torch.zeros(shapes[name])
            whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = gradient
            gradients[name] = whole
    return float(total.detach()), gradients


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}
