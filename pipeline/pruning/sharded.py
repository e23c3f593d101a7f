"""A model in tensor-parallel shards for the importance: each process holds 1 / tp of the matrices, read from the files.

Between the blocks a process has T / tp positions (`pipeline.parallel.tensor`), and within them its features of all
positions, so that every sum of `importance` is the sum of what the processes see.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.data.loader import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.launch.environment import Launch
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.hf_config import read_hf_config
from pipeline.models.materialize import materialize
from pipeline.models.meta import build_meta
from pipeline.models.stored_values import FromSafetensors
from pipeline.parallel.assemble import LocalModel, ShardedValues
from pipeline.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.parallel.tensor import apply_tensor_parallel


class ShardedModel:
    """This process's shards, and what runs them with those of the other processes of its group.

    Args:
        folder: Hugging Face folder.
        launch: of this process; consecutive ranks share a model. Collective.
        tp: processes that share a model, two or more.
        device: of the shards.

    Attributes:
        causal: the Hugging Face model, whose modules compute with the shards.

    Raises:
        ConfigError: the architecture has no tensor-parallel plan, or tp does not divide a size.
    """

    def __init__(self, folder: Path, launch: Launch, *, tp: int, device: torch.device) -> None:
        groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, launch.world_size, tp)]
        config = read_hf_config(folder)
        whole, causal = (build_meta(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME) for _ in range(2))
        owners = parameter_owners(causal)
        names = {id(getattr(*pairs[0])): name for name, pairs in owners.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
        tensor = apply_tensor_parallel(causal, groups[launch.rank // tp], names=names)
        self.causal = causal.eval()
        self._decoder = Decoder(causal, DecoderLayout(tensor=tensor), owners)
        local = LocalModel(self._decoder, tensor, shapes, frozenset())
        values = ShardedValues(FromSafetensors(folder, model=whole), local)
        sharded = {id(getattr(*pairs[0])): name for name, pairs in owners.items()}
        materialize(causal, values, device=device, names=sharded)

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Summed loss of a batch, fp32 scalar, the same on all processes of the group. Collective."""
        total: Tensor = self._decoder(batch.input_ids, batch, CrossEntropy())[0]
        return total


def feature_offset(module: nn.Module, features: int) -> tuple[int, int]:
    """Where the input features of a layer begin among all of them, and how many there are."""
    group = getattr(module, "group", None)
    if group is None:
        return 0, features
    return dist.get_rank(group) * features, dist.get_world_size(group) * features
