"""Importance by activations: sums over calibration tokens, in fp64, that any number of processes add up.

Every sum is over tokens. Data-parallel ranks run different windows, context-parallel ranks different positions of one
window, tensor-parallel ranks different features or positions, pipeline stages different layers: one all-reduce adds
them all up.
Summed values, by key:

| key | shape | summed over tokens |
|---|---|---|
| `layers.N.ffn.abs`, `.square` | [F] | of the input of the FFN's second matrix |
| `layers.N.experts.ffn.abs`, `.square` | [E, F] | the same of each expert, over the tokens it gets |
| `layers.N.experts.tokens`, `.mass` | [E] | tokens, and routing weights |
| `layers.N.heads.abs`, `.square` | [H x head size] | of the input of the output projection |
| `NORM.out.abs`, `NORM.out.square`, `NORM.in.square` | [D] | of the output and the input of a norm |
| `layers.N.influence` | [1] | 1 - cosine of the layer's input and output |
| `layers.N.without` | [1] | loss without the layer, nats |
| `tokens` | [1] | 1 |

A LayerNorm's input (GPT-2) is taken less its mean over the channels, because that norm squares the difference.

Sources: the choice of sums: Muralidharan et al. 2024, Minitron (arXiv:2407.14679), section 2.2; block influence: Men et
al. 2024, ShortGPT (arXiv:2403.03853), section 3.2.

Shapes: D residual channels, F FFN channels, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.compress.pruning.observing import Observer, left_out
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.models.decoder_layers import decoder_layers

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Windows:
    """A batch of one process.

    Attributes:
        batch: B windows, or this process's positions of them.
        real: number of leading windows that count; the others are padding, so that batches have the same shape.
    """

    batch: MicroBatch
    real: int


@torch.no_grad()
def gather(model: nn.Module, batches: Iterable[Windows], *, device: torch.device, depth_loss: bool = False) -> Sums:
    """Sums over the tokens of this process's batches, with a whole model.

    Args:
        model: a Hugging Face model in evaluation mode on `device`.
        batches: batches of this process.
        device: device of the model, to which batches are moved.
        depth_loss: whether to run each batch once more without each layer.

    Returns:
        Key -> fp64 on the CPU, as in the module's table.
    """
    observer, layers = Observer(device), decoder_layers(model)
    for windows in batches:
        batch = windows.batch.to(device)
        observer.begin(rows=windows.real, of=len(batch.input_ids))
        with observer.watching(model):
            _loss(model, batch)
        tokens = windows.real * batch.input_ids.shape[1]
        observer.add("tokens", torch.tensor([tokens], dtype=torch.float64, device=device))
        for number, layer in layers.items() if depth_loss else ():
            with left_out(layer):
                observer.add(f"layers.{number}.without", _loss(model, batch).view(1))
    return {key: value.cpu() for key, value in observer.sums.items()}


def add_up(sums: Mapping[str, Tensor]) -> Sums:
    """Adds up the sums of all processes in one fp64 all-reduce; missing keys count as zero. Collective."""
    found: list[dict[str, torch.Size]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, {key: value.shape for key, value in sums.items()})
    shapes = dict(sorted({key: shape for each in found for key, shape in each.items()}.items()))
    own = [sums[key] if key in sums else torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()]
    flat = torch.cat([each.reshape(-1) for each in own])
    dist.all_reduce(flat)
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def _loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Summed loss in nats, fp64; transformers derives the document mask from positions that restart."""
    given = {} if batch.positions is None else {"position_ids": batch.positions}
    logits = model(input_ids=batch.input_ids, use_cache=False, **given).logits
    losses = [
        F.cross_entropy(one.float(), row, reduction="none", ignore_index=IGNORE)
        for one, row in zip(logits, batch.labels, strict=True)
    ]
    return torch.stack(losses).sum(dtype=torch.float64)
